"""Composition of privacy-loss distributions by one Fourier transform, exact to rounding wherever delta lies.

The masses are first tilted, ``p(l) e^(t l) / M(t)``, with t near the best Renyi order minus one. That moves the bulk of
the composed distribution to the losses that decide epsilon, so rounding errors are relative to delta rather than
to 1, and the grid need only cover that bulk. Everything cut off or rounded away is added to delta.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from sluice.accounting.loss_distribution import LossDistribution
from sluice.accounting.renyi_conversion import at_least_zero, at_most_one

Array = np.ndarray

#: Factors: a one-step distribution and how often it is composed.
Factors = Sequence[tuple[LossDistribution, int]]

_LOG_TAIL = math.log(1e-12)
_UNIT = 1e-15
_LARGEST_EXPONENT = 600.0


class GridTooLargeError(Exception):
    """The composed grid would need more points than allowed; ``points`` says how many."""

    def __init__(self, points: int) -> None:
        super().__init__(f"the composed grid needs {points} points")
        self.points = points


@dataclass(frozen=True, kw_only=True)
class ComposedLosses:
    """Composed losses from ``(first) * spacing`` on, as tilted masses: ``mass = tilted * exp(log_scale - tilt * loss)``.

    ``infinity`` is all mass that counts fully towards delta; ``error`` bounds the sum of the tilted masses' rounding
    errors; ``drift`` bounds what rounding can have moved a loss by.
    """

    spacing: float
    first: int
    tilt: float
    log_scale: float
    tilted: Array
    infinity: float
    error: float
    drift: float

    def delta(self, epsilon: float) -> float:
        """An upper bound of the hockey-stick divergence at epsilon."""
        epsilon = epsilon - self.drift
        losses = (self.first + np.arange(len(self.tilted))) * self.spacing
        if not epsilon >= losses[0]:
            return 1.0
        gain = losses - epsilon
        relevant = gain > 0
        weights = -np.expm1(-gain[relevant]) * np.exp(-self.tilt * gain[relevant])
        total = float(weights @ self.tilted[relevant]) + self.error * _largest_weight(self.tilt)
        exponent = self.log_scale - self.tilt * epsilon
        return at_most_one(self.infinity + total * math.exp(min(exponent, _LARGEST_EXPONENT)))

    def epsilon(self, delta: float, *, near: float) -> float:
        """The smallest epsilon >= 0 that this bounds by delta; infinite if there is none. ``near`` is a rough guess."""
        budget = delta - self.infinity
        # The last grid point has nothing above it that could fail to be a number.
        if not budget > 0 or math.isnan(float(self.tilted.sum())):
            return math.inf
        relative = (self.first + np.arange(len(self.tilted))) * self.spacing - near
        # No epsilon below 0 is asked for; and far below the guess, untilting would overflow.
        begin = int(np.searchsorted(relative, max(-300.0 / max(1.0, self.tilt), -near - 2 * self.spacing)))
        relative, tilted = relative[begin:], self.tilted[begin:]
        if relative.size == 0:
            return math.inf
        untilt = np.exp(-self.tilt * relative)
        target = math.exp(min(math.log(budget) - self.log_scale + self.tilt * near, _LARGEST_EXPONENT))
        masses = tilted * untilt
        above = _sum_above(masses)
        below = _sum_above(masses * np.exp(-relative))
        slack = self.error * _largest_weight(self.tilt) * untilt
        growth = np.exp(np.minimum(relative, _LARGEST_EXPONENT))
        reached = np.flatnonzero(above - growth * below + slack <= target)
        if reached.size == 0:
            return math.inf
        cell = int(reached[0]) - 1
        if cell < 0:
            return at_least_zero(near + float(relative[0]) + self.drift)
        # Between two grid points the curve is affine in e^epsilon.
        room = float(above[cell] + slack[cell]) - target
        epsilon = float(relative[cell + 1])
        if room > 0 and below[cell] > 0:
            epsilon = min(epsilon, math.log(room / float(below[cell])))
        return at_least_zero(near + max(epsilon, float(relative[cell])) + self.drift)


def compose(factors: Factors, *, tilt: float, max_points: int) -> ComposedLosses:
    """Compose all factors, on the grid points that matter at this tilt.

    Guarantee:
        The result's ``delta`` and ``epsilon`` are never below those of the exact composition.

    Raises:
        GridTooLargeError: when more than ``max_points`` would be needed; a coarser spacing needs fewer.
    """
    spacing = factors[0][0].spacing
    if not all(distribution.infinity < 1 for distribution, _ in factors):
        return _nothing_proved(spacing)
    cumulants = [_Cumulants.of(distribution, tilt) for distribution, _ in factors]
    counts = [count for _, count in factors]
    log_scale = sum(count * each.log_moment(tilt) for each, count in zip(cumulants, counts, strict=True))
    mean = sum(count * each.mean for each, count in zip(cumulants, counts, strict=True))
    deviation = math.sqrt(sum(count * each.variance for each, count in zip(cumulants, counts, strict=True)))
    deviation = max(deviation, spacing)

    def log_moment(order: float) -> float:
        return sum(count * each.log_moment(order) for each, count in zip(cumulants, counts, strict=True))

    # Chernoff's bound says where the tilted distribution ends; what lies beyond adds little to delta, and is added.
    upper = _least(lambda step: (log_moment(tilt + step) - log_scale - _LOG_TAIL) / step, start=6.0 / deviation)
    lower = -_least(lambda step: (log_moment(tilt - step) - log_scale - _LOG_TAIL) / step, start=6.0 / deviation)
    start = sum(count * distribution.first for distribution, count in factors)
    stop = start + sum(count * (len(distribution.masses) - 1) for distribution, count in factors)
    first = min(max(start, math.floor(min(lower, mean) / spacing)), stop)
    last = min(stop, max(first + 1, math.ceil(max(upper, mean) / spacing)))
    points = _fast_length(last - first + 1)
    if points > max_points:
        raise GridTooLargeError(points)

    spectrum = np.ones(points // 2 + 1, dtype=complex)
    for count, each in zip(counts, cumulants, strict=True):
        spectrum *= _power(np.fft.rfft(_wrapped(each.tilted, points)), count)
    tilted = np.roll(np.fft.irfft(spectrum, points), -((first - start) % points))
    beyond = math.exp(min(0.0, log_scale - tilt * last * spacing + _LOG_TAIL)) if last < stop else 0.0
    total = sum(counts)
    kept = sum(count * math.log1p(-distribution.infinity) for distribution, count in factors)
    reach = sum(count * len(distribution.masses) * spacing for distribution, count in factors)
    return ComposedLosses(
        spacing=spacing,
        first=first,
        tilt=tilt,
        log_scale=log_scale,
        tilted=np.maximum(tilted, 0.0),
        infinity=at_most_one(-math.expm1(kept) + beyond),
        error=_UNIT * (total + 20) * math.sqrt(2.0) * float(np.linalg.norm(spectrum)),
        drift=_UNIT * reach,
    )


def _nothing_proved(spacing: float) -> ComposedLosses:
    """All mass at infinity: delta is 1 at every epsilon."""
    return ComposedLosses(
        spacing=spacing, first=0, tilt=1.0, log_scale=0.0, tilted=np.zeros(1), infinity=1.0, error=0.0, drift=0.0
    )


def best_tilt(factors: Factors, *, delta: float) -> tuple[float, float]:
    """The tilt with the best Chernoff-type bound of epsilon, and that bound, where no Renyi order is at hand."""
    best = (1.0, math.inf)
    for tilt in np.geomspace(0.02, 2000.0, 60):
        log_moment = sum(count * _log_moment(_losses(each), _log(each.masses), float(tilt)) for each, count in factors)
        bound = (log_moment + math.log(_largest_weight(float(tilt))) - math.log(delta)) / tilt
        if bound < best[1]:
            best = (float(tilt), bound)
    return best


@dataclass(frozen=True, kw_only=True)
class _Cumulants:
    losses: Array
    log_masses: Array
    tilted: Array
    mean: float
    variance: float

    @classmethod
    def of(cls, distribution: LossDistribution, tilt: float) -> _Cumulants:
        losses, log_masses = _losses(distribution), _log(distribution.masses)
        tilted = np.exp(tilt * losses + log_masses - _log_moment(losses, log_masses, tilt))
        mean = float(np.sum(tilted * losses))
        variance = max(0.0, float(np.sum(tilted * (losses - mean) ** 2)))
        return cls(losses=losses, log_masses=log_masses, tilted=tilted, mean=mean, variance=variance)

    def log_moment(self, order: float) -> float:
        return _log_moment(self.losses, self.log_masses, order)


def _losses(distribution: LossDistribution) -> Array:
    return (distribution.first + np.arange(len(distribution.masses))) * distribution.spacing


def _log(masses: Array) -> Array:
    with np.errstate(divide="ignore"):
        logs: Array = np.log(masses)
        return logs


def _log_moment(losses: Array, log_masses: Array, order: float) -> float:
    exponents = order * losses + log_masses
    peak = float(exponents.max())
    return peak + math.log(float(np.sum(np.exp(exponents - peak))))


def _least(bound: Callable[[float], float], *, start: float) -> float:
    """The minimum, to a factor of the step, of a function with one valley."""
    best, step = bound(start), start
    for factor in (2.0, 0.5):
        for _ in range(16):
            value = bound(step * factor)
            if value >= best:
                break
            best, step = value, step * factor
    return best


def _fast_length(least: int) -> int:
    """The smallest number from ``least`` on with no prime factor above 5: such transforms are fast.

    As ``scipy.fft.next_fast_len(real=True)``, without loading ``scipy.fft``: commands that only count would wait for it.
    """
    best = 1 << (least - 1).bit_length()
    fives = 1
    while fives < best:
        odd = fives
        while odd < best:
            best = min(best, odd << max(0, (-(-least // odd) - 1).bit_length()))
            odd *= 3
        fives *= 5
    return best


def _wrapped(masses: Array, points: int) -> Array:
    if len(masses) <= points:
        return np.pad(masses, (0, points - len(masses)))
    return np.bincount(np.arange(len(masses)) % points, weights=masses, minlength=points)


def _power(values: Array, exponent: int) -> Array:
    """Repeated squaring: numpy's complex power is ten times slower."""
    result = np.ones_like(values)
    while True:
        if exponent & 1:
            result *= values
        exponent >>= 1
        if not exponent:
            return result
        values = values * values


def _sum_above(masses: Array) -> Array:
    """For each grid point, the mass strictly above it."""
    sums = np.cumsum(masses[::-1])[::-1]
    return np.append(sums[1:], 0.0)


def _largest_weight(tilt: float) -> float:
    """The maximum over x > 0 of ``(1 - e^-x) e^(-t x)``."""
    return math.exp(tilt * math.log(tilt) - (1 + tilt) * math.log1p(tilt)) if tilt > 0 else 1.0
