"""Gaussian releases of the whole data set: the one case whose cost has a closed form (Balle and Wang, 2018).

Any number of them, adaptively chosen, costs what one does whose ``mu = sensitivity / standard deviation`` is the root of the
sum of their squares; and ``delta(epsilon) = Phi(mu/2 - epsilon/mu) - e^epsilon Phi(-mu/2 - epsilon/mu)`` exactly.
"""

from __future__ import annotations

import math

import scipy

# Relative, of the logarithms that are subtracted: far more than float64 and scipy lose.
_ROUNDING = 1e-13
_STEPS = 100


def gaussian_delta(mu: float, epsilon: float) -> float:
    """The delta of one Gaussian release, rounded up."""
    log_with = float(scipy.special.log_ndtr(mu / 2 - epsilon / mu))
    log_without = epsilon + float(scipy.special.log_ndtr(-mu / 2 - epsilon / mu))
    lost = _ROUNDING * (1.0 + epsilon - log_with + abs(log_without - epsilon))
    return min(1.0, math.exp(log_with) * (lost - math.expm1(min(0.0, log_without - log_with))))


def gaussian_epsilon(mu: float, delta: float) -> float:
    """The smallest epsilon >= 0 of one Gaussian release at this delta, rounded up."""
    if gaussian_delta(mu, 0.0) <= delta:
        return 0.0
    low, high = 0.0, mu * mu / 2 + mu
    while gaussian_delta(mu, high) > delta:
        low, high = high, 2 * high
    for _ in range(_STEPS):
        middle = (low + high) / 2
        if not low < middle < high:
            break
        low, high = (low, middle) if gaussian_delta(mu, middle) <= delta else (middle, high)
    return high
