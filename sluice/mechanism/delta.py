"""A delta that promises nothing: one that is not below one over the number of records."""

from __future__ import annotations

import warnings
from typing import Any


class DeltaWarning(UserWarning):
    """Delta is so large that an epsilon with it protects nobody."""


def delta_problem(delta: float, *, records: float | None) -> str | None:
    """What is wrong with a delta for so many records (public), in a sentence; None if nothing is, or their number is unknown."""
    if records is None or not records >= 1 or delta * records < 1:
        return None
    return (
        f"delta={delta:g} is not below 1/N = {1 / records:.3g} (N = {records:,.0f} records): publishing one record in the "
        f"clear, chosen at random, has such a guarantee too, whatever epsilon is. Choose delta well below 1/N, "
        f"{_suggested(records):g} say."
    )


def _suggested(records: float) -> float:
    """A power of ten, at most a tenth of 1/N and at most the usual 1e-5."""
    power = 5
    while 10.0**power < 10 * records:
        power += 1
    return 10.0**-power


def records_of(mechanism: Any) -> float | None:
    """The public number of records that a mechanism was planned for, as far as it tells."""
    size = getattr(mechanism, "dataset_size", None)
    if size is not None:
        return float(size)
    rate, batch = getattr(mechanism, "sample_rate", None), getattr(mechanism, "expected_batch_size", None)
    if rate is None or batch is None:
        return None
    # Cyclic batches come from one of several groups at a time, and the rate is that within a group.
    groups = mechanism.groups if getattr(mechanism, "batches", None) == "cyclic-poisson" else 1
    return float(round(groups * batch / rate))


def warn_of_delta(delta: float, mechanism: Any) -> None:
    """Warn if an epsilon at this delta would protect nobody."""
    problem = delta_problem(delta, records=records_of(mechanism))
    if problem is not None:
        warnings.warn(problem, DeltaWarning, stacklevel=4)


__all__ = ["DeltaWarning", "delta_problem", "records_of", "warn_of_delta"]
