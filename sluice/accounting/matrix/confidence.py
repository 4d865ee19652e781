"""A confidence bound on a mean that must not be under-estimated."""

from __future__ import annotations

import math

import numpy as np
import scipy

from sluice._base.errors import InputError

_PILOT_SHARE = 10
_ROUNDING = 1e-7


def upper_mean(values: np.ndarray, *, largest: float, failure_probability: float) -> float:
    """A number that the mean of the law behind the values exceeds with at most the given probability.

    For the true mean m and a fixed rate r < 1 / largest, the product of ``1 + r (m - x)`` over independent x has mean 1,
    so by Markov's inequality it exceeds 1 / failure_probability with at most that probability. The bound is the m at which
    the product of the values does. The rate is chosen by the first tenth of the values, the product is of the others.

    Guarantee:
        It holds for independent values in [0, largest] of the same law, at every sample size. Tests compare it with exact
        binomial bounds.
    """
    if values.size < 2 * _PILOT_SHARE:
        return largest
    largest *= 1 + _ROUNDING
    if not (values.min() >= 0 and values.max() <= largest):
        raise InputError(
            f"values from {values.min()} to {values.max()} are not allowed: they must be in [0, {largest}]."
        )
    pilot, rest = np.split(values, [values.size // _PILOT_SHARE])
    needed = math.log(1 / failure_probability)
    # A little is added to the variance, as a pilot that saw no rare value knows nothing of them.
    spread = float(pilot.var()) + largest * (float(pilot.mean()) + largest / pilot.size) / math.sqrt(pilot.size)
    rate = min(math.sqrt(2 * needed / (rest.size * spread)), 0.9 / largest)

    def excess(mean: float) -> float:
        return float(np.log1p(rate * (mean - rest)).sum()) - needed

    if excess(largest) <= 0:
        return largest
    return float(scipy.optimize.brentq(excess, float(rest.mean()), largest, xtol=1e-16, rtol=1e-10)) * (1 + 1e-9)


def expected_excess(*, variance: float, largest: float, samples: int, failure_probability: float) -> float:
    """How far above the mean the bound will come to lie, about."""
    needed = math.log(1 / failure_probability)
    rate = min(math.sqrt(2 * needed / (samples * max(variance, 1e-300))), 0.9 / largest)
    return needed / (0.9 * samples * rate) + rate * variance / 2
