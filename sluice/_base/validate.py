"""Validators that take their value by keyword, so that the message names the argument for free.

>>> positive(noise_multiplier=2.0)
>>> positive(noise_multiplier=-1)
Traceback (most recent call last):
    ...
sluice._base.errors.InputError: noise_multiplier=-1 is not allowed: it must be a finite number > 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection

from sluice._base.errors import InputError


def _require(allowed: str, accept: Callable[[float], bool], values: dict[str, object]) -> None:
    for name, value in values.items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not accept(value):  # type: ignore[arg-type]
            raise InputError(f"{name}={value!r} is not allowed: it must be {allowed}.")


def positive(**values: object) -> None:
    _require("a finite number > 0", lambda x: math.isfinite(x) and x > 0, values)


def positive_or_infinite(**values: object) -> None:
    _require("a number > 0 (infinity allowed)", lambda x: x > 0, values)


def non_negative(**values: object) -> None:
    _require("a finite number >= 0", lambda x: math.isfinite(x) and x >= 0, values)


def finite(**values: object) -> None:
    _require("a finite number", math.isfinite, values)


def fraction(**values: object) -> None:
    """A rate that may be 1, such as a sampling probability."""
    _require("in (0, 1]", lambda x: 0 < x <= 1, values)


def open_fraction(**values: object) -> None:
    """A probability strictly between 0 and 1, such as delta."""
    _require("strictly between 0 and 1", lambda x: 0 < x < 1, values)


def positive_integer(**values: object) -> None:
    _require("an integer >= 1", lambda x: isinstance(x, int) and x >= 1, values)


def one_of(allowed: Collection[str], **values: object) -> None:
    for name, value in values.items():
        if value not in allowed:
            choices = ", ".join(sorted(allowed))
            raise InputError(f"{name}={value!r} is not allowed: it must be one of {choices}.")
