"""Public grids on which sums, noise and probabilities are exact."""

from __future__ import annotations

import math
from fractions import Fraction
from functools import lru_cache

from sluice._base.errors import InputError

# The grid of a release is chosen so that rounding to it adds at most this much to the sensitivity, in units of the
# standard deviation of the noise.
RELEASE_GRID = 2.0**-15


def release_grid(
    *, noise_multiplier: float, sensitivity: float, entries: int, sum_error: float = 0.0
) -> tuple[float, float]:
    """The public grid step of a release, and the standard deviation that covers rounding to it."""
    nominal = noise_multiplier * sensitivity
    if not 1e-200 < nominal < 1e200:
        raise InputError(
            f"noise_multiplier={noise_multiplier} times sensitivity={sensitivity} is not allowed: "
            "the standard deviation must be between 1e-200 and 1e200."
        )
    root = math.sqrt(max(entries, 1))
    step = power_of_two_below(nominal * RELEASE_GRID / root)
    # The last factor exceeds every rounding error made on this line.
    std = noise_multiplier * (sensitivity + step * root + 2 * sum_error) * (1 + 2.0**-40)
    return step, std


def power_of_two_below(value: float) -> float:
    """The largest power of two that is at most ``value``."""
    return math.ldexp(0.5, math.frexp(value)[1])


@lru_cache(maxsize=64)
def bernoulli_threshold(probability: float) -> int:
    """``floor(probability * 2^64)``, exactly."""
    return math.floor(Fraction(probability) * (1 << 64))
