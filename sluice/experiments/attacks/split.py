"""Which records each model of an attack is trained on: drawn by a seed, apart from all other randomness."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sluice._base import validate
from sluice._base.errors import InputError

Positions = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, eq=False)
class FourWaySplit:
    """The paper's split, 2:1:2:1, of positions in the pool of all records. A remainder of up to five is left out."""

    target_train: Positions
    target_test: Positions
    shadow_train: Positions
    shadow_test: Positions


def four_way_split(records: int, *, seed: int) -> FourWaySplit:
    """Split positions 0 .. records - 1, permuted first: data sets come in an order, and parts must not differ by it."""
    validate.positive_integer(records=records)
    part = records // 6
    if not part:
        raise InputError(f"records={records} is not allowed: a split 2:1:2:1 needs at least 6.")
    order = _generator(seed, "four-way split").permutation(records)
    target_train, target_test, shadow_train, shadow_test, _ = np.split(order, np.array([2, 3, 5, 6]) * part)
    return FourWaySplit(
        target_train=target_train, target_test=target_test, shadow_train=shadow_train, shadow_test=shadow_test
    )


def drawn_records(records: int, *, of: int, seed: int) -> Positions:
    """So many different positions of a pool, in increasing order."""
    validate.positive_integer(records=records)
    if records > of:
        raise InputError(f"records={records} is not allowed: the data set has {of}.")
    return np.sort(_generator(seed, "records").permutation(of)[:records])


def half_of(records: int, *, seed: int, target: int) -> NDArray[np.bool_]:
    """The members of a target: half of the records, drawn for this target alone."""
    inside = np.zeros(records, dtype=bool)
    inside[_generator(seed, f"target {target}").permutation(records)[: records // 2]] = True
    return inside


def shadow_membership(records: int, *, shadows: int, seed: int) -> NDArray[np.bool_]:
    """For each shadow model (row) and record (column), whether it is trained on it.

    Each record is in half of the models, so none lacks an OUT model. Targets are drawn apart: were they rows of this same
    balanced table, the number of shadow models that a record is in would tell whether it is in the target.
    """
    validate.positive_integer(records=records, shadows=shadows)
    if shadows < 2:
        raise InputError(f"shadows={shadows} is not allowed: at least 2 are needed, so that each record is out of one.")
    ranks = _generator(seed, "shadows").random((shadows, records)).argsort(axis=0)
    inside: NDArray[np.bool_] = ranks < shadows // 2
    return inside


def _generator(seed: int, purpose: str) -> np.random.Generator:
    return np.random.default_rng([seed, *purpose.encode()])
