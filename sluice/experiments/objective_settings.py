"""Which losses there are, and what settings go with those for numbers; readable without torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from sluice._base.errors import InputError
from sluice.models import REGRESSORS

CROSS_ENTROPY, SQUARED, POISSON = "cross-entropy", "squared", "poisson"
LOSSES = (CROSS_ENTROPY, SQUARED, POISSON)


def predicts_numbers(loss: str | None) -> bool:
    """Whether the target of this loss is a number for each record; None stands for cross-entropy."""
    return loss not in (None, CROSS_ENTROPY)


def range_of(text: str) -> tuple[float, float]:
    """``LOW,HIGH`` as two finite numbers, the lower first."""
    try:
        low, high = (float(each) for each in text.split(","))
    except ValueError:
        low, high = math.nan, math.nan
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise InputError(
            f"target_range={text!r} is not allowed: it must be LOW,HIGH, two numbers, the lower first, such as 0,100."
        )
    return low, high


def require_objective(loss: str | None, *, target_range: str | None, model: str, of_classes: Mapping[str, Any]) -> None:
    """Refuse settings of classes beside a loss of numbers, and settings of numbers beside one of classes.

    Args:
        of_classes: the settings that are about classes, None where they are not given.
    """
    if not predicts_numbers(loss):
        if target_range is not None:
            raise InputError(
                f"target_range={target_range!r} is not allowed for classes: it is for numbers. Give loss='squared' or "
                "'poisson', or leave it out."
            )
        return
    for name, value in of_classes.items():
        if value is not None:
            raise InputError(
                f"{name}={value!r} is not allowed with loss={loss!r}, which is for numbers: leave it out, or use "
                f"loss={CROSS_ENTROPY!r}."
            )
    if model not in REGRESSORS:
        raise InputError(
            f"model={model!r} is not allowed with loss={loss!r}: {' and '.join(REGRESSORS)} predict a number, all others "
            "classes."
        )
    if target_range is not None and range_of(target_range)[0] < 0 and loss == POISSON:
        raise InputError(f"target_range={target_range!r} is not allowed with loss='poisson': counts are not negative.")


__all__ = ["CROSS_ENTROPY", "LOSSES", "POISSON", "SQUARED", "predicts_numbers", "range_of", "require_objective"]
