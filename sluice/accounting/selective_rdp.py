"""Renyi divergence of one selective release: the exact worst case over what the gate may do.

Write ``s_r = 1 - q + q r`` for ``r`` in ``{ratio_min, ratio_max}`` and ``Z`` for the mean of ``s_r`` under the weights
``(1 - lam, lam)``. Both directions of the divergence at order a are the maximum over ``lam`` in [0, 1] of

    1 / (a - 1) * log( sum of weights * m_r(b) / Z^b ),     m_r(b) = E_u[((1-q) + q r L(u))^b],

with ``b = a`` (removing the record) and ``b = 1 - a`` (adding it); docs/accounting.md, section 3.3. The argument of the
logarithm is affine over a power of something affine, so its only stationary point solves a linear equation and is a
maximum: the maximum over ``lam`` below is exact, not a grid's.
"""

from __future__ import annotations

import functools
import math

import numpy as np

from sluice.accounting.events import SelectiveReleaseDpEvent
from sluice.accounting.renyi_conversion import proved
from sluice.accounting.tilted_moments import log_moments, power_deviation

Array = np.ndarray

#: Fine where epsilon is large and reacts to the order, integers where it is ordinary, geometric beyond.
DEFAULT_ORDERS: tuple[float, ...] = (
    *(1.02, 1.03, 1.05, 1.07),
    *(1 + step / 20 for step in range(2, 20)),
    *(2 + step / 10 for step in range(40)),
    *(float(order) for order in range(6, 65)),
    *(64.0 * 2 ** (step / 4) for step in range(1, 37)),
)

# Added to every divergence so that what floating point loses is never lost in the user's disfavour.
_ROUNDING = 1e-10

# Below this there is no privacy to speak of, and numbers of points and squares would leave their types' range.
_SMALLEST_NOISE = 1e-7


def renyi_divergences(event: SelectiveReleaseDpEvent, orders: Array) -> Array:
    """An upper bound of the Renyi divergence of one release at each order, for the worse of the two directions.

    Guarantee:
        Holds for every data set, record and history (docs/accounting.md, section 3.3), up to the attempt cap, whose
        cost the accountant adds.
    """
    if event.effective_noise_multiplier < _SMALLEST_NOISE:
        return np.full(len(orders), np.inf)
    return np.array(_cached(event, tuple(float(order) for order in orders)))


@functools.lru_cache(maxsize=256)
def _cached(event: SelectiveReleaseDpEvent, orders: tuple[float, ...]) -> tuple[float, ...]:
    order = np.array(orders)
    remove = _worst_log_moment(event, order)
    add = _worst_log_moment(event, 1.0 - order)
    return tuple(proved(np.maximum(remove, add) / (order - 1) * (1 + _ROUNDING)))


def _worst_log_moment(event: SelectiveReleaseDpEvent, powers: Array) -> Array:
    q, mu = event.sampling_probability, 1.0 / event.effective_noise_multiplier
    low, high = event.acceptance.ratio_min, event.acceptance.ratio_max
    s_low, s_high = (1 - q) + q * low, (1 - q) + q * high
    log_high = log_moments(rate=q * high / s_high, mu=mu, powers=powers)
    if low == high:
        return log_high
    log_low = log_moments(rate=q * low / s_low, mu=mu, powers=powers)
    gap = q * (high - low)
    growth = powers * math.log1p(gap / s_low) + (log_high - log_low)
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        stationary = (np.divide(s_low, gap) - powers / np.expm1(growth)) / (powers - 1)
    # A weight that is not a number gives a moment that is none, which proves nothing; any other number would hide the maximum.
    weights = np.stack([np.ones_like(powers), np.zeros_like(powers), np.clip(stationary, 0.0, 1.0)])
    worst: Array = np.max(_log_moment_at(weights, powers, s_low, s_high, log_low, log_high), axis=0)
    return worst


def _log_moment_at(weight: Array, powers: Array, s_low: float, s_high: float, log_low: Array, log_high: Array) -> Array:
    """Log of the mean of ``(s_r / Z)^b E[...]`` where ``s_high`` has the given weight, a row for each row of weights."""
    mean = s_low + weight * (s_high - s_low)
    below, above = -weight * (s_high - s_low) / mean, (1 - weight) * (s_high - s_low) / mean
    with np.errstate(divide="ignore", invalid="ignore"):
        # Where the ratios are far apart, `below` is -1 to all digits of a double.
        log_far = np.log(s_low) - np.log(mean)
        log_below, log_above = powers * np.where(below < -0.5, log_far, np.log1p(below)), powers * np.log1p(above)
        logs = np.logaddexp(np.log(weight) + log_above + log_high, np.log1p(-weight) + log_below + log_low)
    # Where the moment is close to 1 the first-order terms cancel between the two ratios; take them out beforehand.
    cap = 50.0
    high_part = power_deviation(powers, above, np.minimum(log_above, cap)) + np.exp(
        np.minimum(log_above, cap)
    ) * np.expm1(np.minimum(log_high, cap))
    low_part = power_deviation(powers, below, np.minimum(log_below, cap)) + np.exp(
        np.minimum(log_below, cap)
    ) * np.expm1(np.minimum(log_low, cap))
    near = np.log1p(np.maximum(weight * high_part + (1 - weight) * low_part, 0.0))
    moment: Array = np.where(logs < 0.5, near, logs)
    return moment
