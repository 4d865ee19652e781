"""The privacy-loss distribution of one selective release: a proved worst case, rounded up onto a grid.

For a direction (removing or adding the record) and ``k = e^eps``, the hockey-stick divergence is at most

    max over lam of  sum over r of  weight_r(lam) * g_r(k, Z(lam)) / Z(lam)

where ``g_r`` is convex in ``Z`` and has a closed form (docs/accounting.md, section 3.4). [0, 1] is cut into pieces; on
each, ``g_r`` lies below its chord, which leaves a quadratic over an affine function of ``lam``, whose maximum is
explicit. For every fixed ``lam`` that bound is convex in k, so its maximum U(k) is convex too: U is itself a
hockey-stick curve, with a pair of distributions whose tails are

    B(k) = -U'(k)   and   A(k) = U(k) + k B(k),

and both are sums of Gaussian tails taken at the best ``lam``. Masses between grid points come from differences
of A and B, so they carry no cancellation, and each is split between its two neighbours such that both distributions
keep their mass (the "connect the dots" rounding, which only ever raises the curve).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy.special import ndtr, ndtri

from sluice.accounting.events import SelectiveReleaseDpEvent

Array = np.ndarray
Direction = Literal["remove", "add"]
DIRECTIONS: tuple[Direction, Direction] = ("remove", "add")

LARGEST_LOSS = 700.0
_SMALLEST_TAIL = 1e-300
_LOWER_TAIL = 1e-20


@dataclass(frozen=True, kw_only=True)
class LossDistribution:
    """Masses of the privacy loss at ``(first + i) * spacing``, and the mass at infinity."""

    spacing: float
    first: int
    masses: Array
    infinity: float


@dataclass(frozen=True, kw_only=True)
class _Epsilons:
    """What every tail needs of the epsilons: ``k = e^eps``, and ``k - 1`` or ``1/k - 1``."""

    k: Array
    growth: Array

    @classmethod
    def of(cls, epsilons: Array, direction: Direction) -> _Epsilons:
        sign = 1.0 if direction == "remove" else -1.0
        return cls(k=np.exp(epsilons), growth=np.expm1(np.minimum(sign * epsilons, LARGEST_LOSS)))


@dataclass(frozen=True, kw_only=True)
class _Release:
    """The constants of one release, in one direction."""

    q: float
    mu: float
    low: float
    high: float
    direction: Direction

    @classmethod
    def of(cls, event: SelectiveReleaseDpEvent, direction: Direction) -> _Release:
        return cls(
            q=event.sampling_probability,
            mu=1.0 / event.effective_noise_multiplier,
            low=event.acceptance.ratio_min,
            high=event.acceptance.ratio_max,
            direction=direction,
        )

    def tails(self, at: _Epsilons, ratio: float, mean_ratio: float) -> tuple[Array, Array]:
        """The two parts of ``g = first - second`` at each epsilon; ``Z = 1 - q + q * mean_ratio``."""
        q, mu, z = self.q, self.mu, (1 - self.q) + self.q * mean_ratio
        excess = at.growth * (z / (q * ratio)) + (mean_ratio - ratio) / ratio
        # Below -1 the tail is all or nothing, and the logarithm of 0, -inf, says which.
        with np.errstate(divide="ignore"):
            u = np.log1p(np.maximum(excess, -1.0)) / mu + mu / 2
        if self.direction == "remove":
            plain = ndtr(-u)
            return (1 - q) * plain + (q * ratio) * ndtr(mu - u), z * at.k * plain
        plain = ndtr(u)
        return z * plain, at.k * ((1 - q) * plain + (q * ratio) * ndtr(u - mu))

    def range(self, upper_tail: float) -> tuple[float, float]:
        """Losses outside this range have less than ``upper_tail`` above and next to nothing below."""
        far, near = -float(ndtri(max(upper_tail, _SMALLEST_TAIL))), -float(ndtri(_LOWER_TAIL))
        z_low, z_high = (1 - self.q) + self.q * self.low, (1 - self.q) + self.q * self.high
        if self.direction == "remove":
            low, high = self._log_mix(self.low, -near), self._log_mix(self.high, self.mu + far)
            return low - math.log(z_high), high - math.log(z_low)
        low, high = self._log_mix(self.high, near), self._log_mix(self.low, -far)
        return math.log(z_low) - low, math.log(z_high) - high

    def _log_mix(self, ratio: float, u: float) -> float:
        rest = math.log1p(-self.q) if self.q < 1 else -math.inf
        return float(np.logaddexp(rest, math.log(self.q * ratio) + self.mu * u - self.mu**2 / 2))


def loss_range(event: SelectiveReleaseDpEvent, direction: Direction, *, upper_tail: float) -> tuple[float, float]:
    """The losses between which a grid has to reach."""
    low, high = _Release.of(event, direction).range(upper_tail)
    return max(low, -LARGEST_LOSS), min(high, LARGEST_LOSS)


def hockey_stick_bound(event: SelectiveReleaseDpEvent, direction: Direction, epsilons: Array, *, pieces: int) -> Array:
    """An upper bound of the hockey-stick divergence of one release at each epsilon.

    Guarantee:
        Holds for every data set, record and history, and exceeds the exact maximum by O(1 / pieces^2).
    """
    first, second = _envelope(_Release.of(event, direction), np.asarray(epsilons, dtype=float), pieces)
    return np.clip(first - second, 0.0, 1.0)


def sampled_gaussian_tails(
    event: SelectiveReleaseDpEvent, direction: Direction, epsilons: Array
) -> tuple[Array, Array]:
    """``A(k)`` and ``k B(k)`` of a release without a gate. Epsilons beyond the largest loss count as that."""
    return _envelope(_Release.of(event, direction), np.clip(epsilons, -LARGEST_LOSS, LARGEST_LOSS), pieces=1)


def loss_distribution(
    event: SelectiveReleaseDpEvent, direction: Direction, *, spacing: float, upper_tail: float, pieces: int
) -> LossDistribution:
    """The worst-case loss of one release on a grid.

    Guarantee:
        Its hockey-stick curve is nowhere below the true one, so composing it never under-reports.
    """
    low, high = loss_range(event, direction, upper_tail=upper_tail)
    first, last = math.floor(low / spacing), math.ceil(high / spacing)
    epsilons = np.arange(first, last + 1) * spacing
    above, scaled = _envelope(_Release.of(event, direction), epsilons, pieces)
    return connect_the_dots(spacing, first, above, scaled)


def connect_the_dots(spacing: float, first: int, above: Array, scaled: Array) -> LossDistribution:
    """Split the mass between grid points i and i+1 so that the masses of both distributions are kept."""
    above = np.minimum.accumulate(np.clip(above, 0.0, 1.0))
    between = above[:-1] - above[1:]
    shrink = math.exp(-spacing)
    up = (between - (scaled[:-1] - shrink * scaled[1:])) / -math.expm1(-spacing)
    up = np.clip(up, 0.0, between)
    masses = np.zeros_like(above)
    masses[0] = 1.0 - above[0]
    masses[:-1] += between - up
    masses[1:] += up
    infinity = float(np.clip(above[-1] - scaled[-1], 0.0, above[-1]))
    masses[-1] += above[-1] - infinity
    return LossDistribution(spacing=spacing, first=first, masses=masses, infinity=infinity)


def _envelope(release: _Release, epsilons: Array, pieces: int) -> tuple[Array, Array]:
    """``A(k)`` and ``k B(k)`` of the bound U, at the best ``lam`` for each k."""
    at = _Epsilons.of(epsilons, release.direction)
    if release.low == release.high:
        first, second = release.tails(at, release.high, release.high)
        z = (1 - release.q) + release.q * release.high
        return first / z, second / z
    best = np.full(epsilons.shape, -np.inf)
    best_first, best_second = np.zeros_like(best), np.zeros_like(best)
    for value, first, second in _candidates(release, at, pieces):
        better = value > best
        best = np.where(better, value, best)
        best_first = np.where(better, first, best_first)
        best_second = np.where(better, second, best_second)
    return best_first, best_second


def _candidates(release: _Release, at: _Epsilons, pieces: int) -> Iterator[tuple[Array, Array, Array]]:
    """On each piece: its ends, and the stationary point of quadratic over affine."""
    gap = release.high - release.low
    width = 1.0 / pieces

    def node(index: int) -> tuple[float, float, list[tuple[Array, Array]]]:
        weight = index / pieces
        mean_ratio = release.low + weight * gap
        z = (1 - release.q) + release.q * mean_ratio
        return weight, z, [release.tails(at, r, mean_ratio) for r in (release.high, release.low)]

    def mix(weight: Array | float, z: Array | float, parts: list[tuple[Array, Array]]) -> tuple[Array, Array, Array]:
        first = (weight * parts[0][0] + (1 - weight) * parts[1][0]) / z
        second = (weight * parts[0][1] + (1 - weight) * parts[1][1]) / z
        return first - second, first, second

    left = node(0)
    yield mix(*left)
    for index in range(1, pieces + 1):
        right = node(index)
        yield mix(*right)
        weight, z, parts = left
        slope_z = right[1] - z
        high_left, low_left = (first - second for first, second in parts)
        high_right, low_right = (first - second for first, second in right[2])
        constant = weight * high_left + (1 - weight) * low_left
        linear = weight * (high_right - high_left) + (1 - weight) * (low_right - low_left)
        linear = linear + width * (high_left - low_left)
        quadratic = width * ((high_right - high_left) - (low_right - low_left))
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            c = (linear * z - slope_z * constant) / quadratic
            stationary = -c / (z + np.sqrt(np.maximum(z * z - slope_z * c, 0.0)))
        t = np.clip(np.nan_to_num(stationary, nan=0.0, posinf=0.0, neginf=0.0), 0.0, 1.0)
        chord = [((1 - t) * a[0] + t * b[0], (1 - t) * a[1] + t * b[1]) for a, b in zip(parts, right[2], strict=True)]
        yield mix(weight + width * t, z + slope_z * t, chord)
        left = right
