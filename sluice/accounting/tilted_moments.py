"""Moments ``E[((1-q) + q L)^b]`` of the sampled Gaussian, for any real power b, accurate to rounding.

Here ``L = exp(mu u - mu^2 / 2)`` and ``u`` is standard normal. Positive powers give one direction of the Renyi
divergence, negative powers the other. The trapezoid rule converges geometrically for such integrands (they are
analytic in a strip of half-width ``pi / mu``), so a step of ``0.5 / max(mu, 1)`` leaves an error near ``exp(-39)``.
"""

from __future__ import annotations

import math

import numpy as np

Array = np.ndarray

_POINTS_PER_POWER = 1500
_SIGMAS = 10.0
_ALL = 1 - 1e-10


def log_moments(*, rate: float, mu: float, powers: Array) -> Array:
    """``log E[((1-q) + q L)^b]`` for each power b > 1 or b < 0; relative accuracy holds even where it is tiny.

    Guarantee:
        Never below the truth by more than rounding. Where the integral would need an unreasonable number of points
        (a huge power or very little noise) a closed-form upper bound takes its place, so work and memory are bounded.
    """
    if rate > _ALL:  # divergences do not fall as the rate rises, and the rule below misses digits of this one
        exact: Array = powers * (powers - 1) * (mu * mu / 2)
        return exact
    step = 0.5 / max(mu, 1.0)
    crossing = (math.log1p(-rate) - math.log(rate) + mu * mu / 2) / mu
    upper = np.maximum(powers, 2.0) * mu + _SIGMAS
    lower = np.where(powers < 0, np.maximum(powers * mu, min(0.0, crossing)), 0.0) - _SIGMAS
    counts = np.ceil((upper - lower) / step).astype(int) + 1
    result = _closed_form_bounds(rate, mu, powers)
    chosen = np.flatnonzero(counts <= _POINTS_PER_POWER)
    if chosen.size:
        result[chosen] = _integrate(rate, mu, powers[chosen], lower[chosen], counts[chosen], step)
    return result


def _closed_form_bounds(rate: float, mu: float, powers: Array) -> Array:
    """Minkowski's inequality for powers above 1; convexity, and L >= 0, for negative ones."""
    with np.errstate(over="ignore"):
        minkowski = powers * np.logaddexp(math.log1p(-rate), math.log(rate) + (powers - 1) * (mu * mu / 2))
        convex = np.logaddexp(math.log1p(-rate), math.log(rate) + powers * (powers - 1) * (mu * mu / 2))
        smallest = powers * math.log1p(-rate)
    return np.where(powers > 0, minkowski, np.minimum(convex, smallest))


def _integrate(rate: float, mu: float, powers: Array, lower: Array, counts: Array, step: float) -> Array:
    starts = _starts(counts)
    offsets = np.arange(int(counts.sum())) - np.repeat(starts, counts)
    u = np.repeat(lower, counts) + step * offsets
    power = np.repeat(powers, counts)
    log_weight = -0.5 * u * u + math.log(step / math.sqrt(2 * math.pi))
    log_ratio = mu * u - mu * mu / 2
    excess = rate * np.expm1(np.minimum(log_ratio, 700.0))
    log_mix = np.where(log_ratio < 700.0, np.log1p(excess), log_ratio + math.log(rate))

    terms = power * log_mix + log_weight
    peaks = np.maximum.reduceat(terms, starts)
    large: Array = peaks + np.log(np.add.reduceat(np.exp(terms - np.repeat(peaks, counts)), starts))
    is_small = large < 1.0
    if not is_small.any():
        return large
    # Below, 1 and the first-order term (whose mean is 0) are subtracted inside the integral: what is left of a
    # moment close to 1 then keeps its digits.
    kept = np.repeat(is_small, counts)
    power, excess, log_mix, log_weight = power[kept], excess[kept], log_mix[kept], log_weight[kept]
    clipped = np.minimum(power * log_mix, 600.0)
    deviation = power_deviation(power, np.minimum(excess, 1e280), clipped)
    small = np.add.reduceat(np.exp(log_weight) * deviation, _starts(counts[is_small]))
    large[is_small] = np.log1p(np.maximum(small, 0.0))
    return large


def _starts(counts: Array) -> Array:
    return np.concatenate(([0], np.cumsum(counts)[:-1]))


def power_deviation(power: Array | float, excess: Array, log_power: Array) -> Array:
    """``(1+x)^b - 1 - b x`` with ``log_power = b log(1+x)``, without cancellation for small x."""
    near = np.abs(excess) < 0.03
    x = np.where(near, excess, 0.0)
    log1p_minus = (
        x * x * (-1 / 2 + x * (1 / 3 + x * (-1 / 4 + x * (1 / 5 + x * (-1 / 6 + x * (1 / 7 + x * (-1 / 8)))))))
    )
    close = _expm1_minus(np.where(near, log_power, 0.0)) + power * log1p_minus
    return np.where(near, close, np.expm1(log_power) - power * excess)


def _expm1_minus(z: Array) -> Array:
    small = np.abs(z) < 0.03
    s = np.where(small, z, 0.0)
    series = s * s / 2 * (1 + s / 3 * (1 + s / 4 * (1 + s / 5 * (1 + s / 6 * (1 + s / 7)))))
    return np.where(small, series, np.expm1(z) - z)
