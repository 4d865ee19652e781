"""Sampling rates: the number that is sampled with is the number that is accounted for."""

from __future__ import annotations

from sluice._base import validate
from sluice._base.errors import InputError


def exact_sample_rate(*, batch_size: int, dataset_size: int) -> float:
    """The rate at which batches have ``batch_size`` records on average: the number to account with.

    Nothing is lost by rounding: sampler and accountant use the very same float.
    """
    validate.positive_integer(batch_size=batch_size, dataset_size=dataset_size)
    if batch_size > dataset_size:
        raise InputError(
            f"batch_size={batch_size} is not allowed: it must be at most dataset_size={dataset_size}; "
            "a Poisson sample holds no record twice."
        )
    return batch_size / dataset_size


def cyclic_sample_rate(*, batch_size: int, dataset_size: int, groups: int) -> float:
    """The rate within a group at which batches have ``batch_size`` records on average: ``groups`` times the usual."""
    validate.positive_integer(batch_size=batch_size, dataset_size=dataset_size, groups=groups)
    if groups * batch_size > dataset_size:
        raise InputError(
            f"groups={groups} is not allowed with batch_size={batch_size} and dataset_size={dataset_size}: a group "
            f"holds {dataset_size / groups:g} records on average; use fewer bands, at most {dataset_size // batch_size}."
        )
    return groups * batch_size / dataset_size
