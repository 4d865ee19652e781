"""The privacy-loss distribution of one selective release: a proved worst case, rounded up onto a grid.

For a direction (removing or adding the record) and ``k = e^eps``, the hockey-stick divergence is at most

    max over lam of  sum over r of  weight_r(lam) * g_r(k, Z(lam)) / Z(lam)

where ``g_r`` is convex in ``Z`` and has a closed form (docs/accounting.md, section 3.4). [0, 1] is cut into pieces; on
each, ``g_r`` lies below its chord, which leaves a quadratic over an affine function of ``lam``, whose maximum is
explicit. For every fixed ``lam`` that bound is convex in k, so its maximum U(k) is convex too: U is itself a
hockey-stick curve. What is computed is an upper bound of U at each grid point, with an allowance for rounding.
The lower convex hull of these values is the curve of a distribution on the grid, and is nowhere below U (section 3.5).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
import scipy

from sluice.accounting.events import SelectiveReleaseDpEvent

Array = np.ndarray
Direction = Literal["remove", "add"]
DIRECTIONS: tuple[Direction, Direction] = ("remove", "add")

LARGEST_LOSS = 700.0
_SMALLEST_TAIL = 1e-300
_LOWER_TAIL = 1e-20
_LARGEST = 1e300
#: A few units in the last place, and where the normal law's tail has no value in float64 any more.
_ROUNDING = 2.0**-50
_FARTHEST = -40.0
#: So many numbers at a time fit into a processor's cache.
_BLOCK = 1 << 13
#: After so many passes that leave out some points each, the hull is walked along.
_PASSES = 32


@dataclass(frozen=True, kw_only=True)
class LossDistribution:
    """Masses of the privacy loss at ``(first + i) * spacing``, and the mass at infinity."""

    spacing: float
    first: int
    masses: Array
    infinity: float


@dataclass(frozen=True, kw_only=True)
class _Epsilons:
    """What every gain needs of the epsilons: ``k = e^eps``, and ``k - 1`` or ``1/k - 1``."""

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

    def gain(self, at: _Epsilons, ratio: float, mean_ratio: float | Array) -> Array:
        """An upper bound of ``g`` at each epsilon; ``Z = 1 - q + q * mean_ratio``. A column of means gives a row for each.

        With ``c`` for the likelihood ratio at which a loss passes epsilon, g is ``E[(L - c)_+]`` times ``q * ratio``,
        or ``E[(c - L)_+]`` times ``k * q * ratio`` in the adding direction. For whatever threshold ``u`` the
        difference of tails is at most that, so rounding of ``u`` costs nothing to first order.
        """
        mu, z = self.mu, (1 - self.q) + self.q * mean_ratio
        scale = z / (self.q * ratio)
        largest = _LARGEST / np.maximum(scale, 1.0)
        growth = np.minimum(at.growth, largest) * scale
        tilt = (mean_ratio - ratio) / ratio
        c = (1.0 + tilt) + growth
        # Where c is not positive the tail is all or nothing, and the logarithm of 0, -inf, says which.
        with np.errstate(divide="ignore"):
            u = np.log1p(np.maximum(growth + tilt, -1.0)) / mu + mu / 2
        sign = -1.0 if self.direction == "remove" else 1.0
        of_ratio, of_ratio_off = _tail(sign * (u - mu))
        of_one, of_one_off = _tail(sign * u)
        rounding = of_ratio_off + (1.0 + np.abs(tilt) + np.abs(growth)) * of_one_off
        gain: Array = (np.maximum(sign * (c * of_one - of_ratio), 0.0) + rounding) * (self.q * ratio)
        if self.direction == "remove":
            return gain
        # A ratio that was cut off would make this too small; the whole of Z is always enough.
        return np.where(at.growth < largest, gain * at.k, z)

    def range(self, upper_tail: float) -> tuple[float, float]:
        """Losses outside this range have less than ``upper_tail`` above and next to nothing below."""
        far, near = (
            -float(scipy.special.ndtri(max(upper_tail, _SMALLEST_TAIL))),
            -float(scipy.special.ndtri(_LOWER_TAIL)),
        )
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
        Holds for every data set, record and history, and exceeds the exact maximum by O(1 / pieces^2). Beyond the
        largest loss it is the bound there.
    """
    within = np.clip(np.asarray(epsilons, dtype=float), -LARGEST_LOSS, LARGEST_LOSS)
    bound: Array = np.minimum(_envelope(_Release.of(event, direction), within, pieces), 1.0)
    return bound


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
    bounds = _envelope(_Release.of(event, direction), epsilons, pieces)
    return dominating_losses(bounds, spacing=spacing, first=first)


def dominating_losses(bounds: Array, *, spacing: float, first: int) -> LossDistribution:
    """The losses whose hockey-stick curve is the lower convex hull of ``(0, 1)`` and ``(e^((first + i) spacing), bounds[i])``.

    Guarantee:
        If the bounds are nowhere below some pair's hockey-stick curve, neither is the result's curve, also between and
        beyond the grid points: between two points that are kept, a convex curve lies below their chord. Points
        that are not on the hull are left out. (Cutting negative masses off instead would lower the curve.) A bound that is
        not a number counts as 1, which always holds.
    """
    bounds = np.minimum.accumulate(np.minimum(np.where(np.isnan(bounds), 1.0, bounds), 1.0))
    kept = np.arange(len(bounds))
    for passes in itertools.count(1):
        values = bounds[kept]
        corners = _corners(values, np.diff(kept) * spacing)
        convex = corners >= 0
        if convex.all():
            break
        kept = kept[convex]
        if passes % _PASSES == 0:  # long arcs above the hull lose only their ends in a pass
            kept = _on_hull(bounds, kept, spacing=spacing)
    masses = np.zeros_like(bounds)
    masses[kept] = corners
    return LossDistribution(spacing=spacing, first=first, masses=masses, infinity=float(values[-1]))


def _on_hull(bounds: Array, places: Array, *, spacing: float) -> Array:
    """Those places that may be on the lower hull, in one walk: each new point takes away those before it that lie above."""
    hull: list[int] = []
    steepness: list[float] = []  # of the side that ends at each: minus its slope, times k there
    for place, value in zip(places.tolist(), bounds[places].tolist(), strict=True):
        while hull:
            fall = float(bounds[hull[-1]]) - value
            gap = (place - hull[-1]) * spacing
            slope = fall / math.expm1(gap) if gap < LARGEST_LOSS else 0.0
            if steepness[-1] >= slope:
                break
            hull.pop()
            steepness.pop()
        hull.append(place)
        steepness.append(slope + fall if len(hull) > 1 else 1.0 - value)
    return np.array(hull)


def _corners(values: Array, gaps: Array) -> Array:
    """By how much the polygon's slope rises at each point, times k there: the mass that a distribution has at it.

    The first side comes from ``(0, 1)``, and after the last point the polygon is level.
    """
    falls = values[:-1] - values[1:]
    # Minus the slope of each side, times k at its left end; at its right end it is more by just the fall, which keeps
    # the masses' sum at one.
    slopes = falls / np.expm1(gaps)
    masses: Array = np.concatenate([[1.0 - values[0]], slopes + falls]) - np.concatenate([slopes, [0.0]])
    return masses


def _tail(x: Array) -> tuple[Array, Array]:
    """The normal law's mass below x, and how far rounding may have moved it: relatively more the farther out x is."""
    mass = scipy.special.ndtr(x)
    return mass, _ROUNDING * (1.0 + np.clip(x, _FARTHEST, 0.0) ** 2) * mass


def _envelope(release: _Release, epsilons: Array, pieces: int) -> Array:
    """An upper bound of U at each epsilon."""
    at = _Epsilons.of(epsilons, release.direction)
    if release.low == release.high:
        return release.gain(at, release.high, release.high) / ((1 - release.q) + release.q * release.high)
    best = np.zeros_like(epsilons)
    together = max(1, _BLOCK // len(epsilons))
    for begin in range(0, pieces, together):
        for values in _candidates(release, at, begin, min(begin + together, pieces), pieces):
            np.maximum(best, values.max(axis=0), out=best)
    return best


def _candidates(release: _Release, at: _Epsilons, begin: int, end: int, pieces: int) -> Iterator[Array]:
    """Of some of the pieces, a row for each: their ends, and the stationary points of quadratic over affine."""
    nodes = np.arange(begin, end + 1)[:, None] / pieces
    mean_ratios = release.low + nodes * (release.high - release.low)
    zs = (1 - release.q) + release.q * mean_ratios
    highs, lows = release.gain(at, release.high, mean_ratios), release.gain(at, release.low, mean_ratios)
    yield (nodes * highs + (1 - nodes) * lows) / zs
    width, weight, z, high, low = 1.0 / pieces, nodes[:-1], zs[:-1], highs[:-1], lows[:-1]
    slope_z, slope_high, slope_low = zs[1:] - z, highs[1:] - high, lows[1:] - low
    constant = weight * high + (1 - weight) * low
    linear = weight * slope_high + (1 - weight) * slope_low + width * (high - low)
    quadratic = width * (slope_high - slope_low)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        c = (linear * z - slope_z * constant) / quadratic
        stationary = -c / (z + np.sqrt(np.maximum(z * z - slope_z * c, 0.0)))
    t = np.clip(np.where(np.isfinite(stationary), stationary, 0.0), 0.0, 1.0)
    yield (constant + linear * t + quadratic * t * t) / (z + slope_z * t)
