"""The dominating pair of balls-in-bins batches, and unbiased estimates of its two hockey-stick divergences.

With record: a uniform choice among the normals ``N(m_i, 1)``, m_i being the sum of the columns of C at the steps of bin i,
in standard deviations of the noise. Without: ``N(0, 1)``. L is the ratio of their densities. Plain simulation sees a
handful of values that matter at a delta of 1e-5; these estimates are made so that nearly every value matters a little:

* with record against without, by drawing from normals at ``s m_i``, s > 1, and weighting;
* without against with, by drawing a line along the mean of all m_i and integrating along it in closed form.

Both come with a proved bound on every value, without which there is no confidence statement.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
import scipy

from sluice._base import validate
from sluice._base.errors import InputError
from sluice.accounting.matrix import series
from sluice.accounting.matrix.accounting import accounted_coefficients, require_non_negative
from sluice.accounting.matrix.strategy import Strategy

Array = np.ndarray
Direction = Literal["remove", "add"]

_VALUES_PER_CHUNK = 1 << 20
_NEWTON_STEPS = 60
_PRECISION = 1e-11
_LARGEST_EXPONENT = 700.0
# More than a difference of two probabilities loses to rounding.
_CANCELLATION = 1e-15
# Normal probabilities below this are zero in double precision.
_LOWEST_EDGE = -40.0


@dataclass(frozen=True, kw_only=True)
class BinsPair:
    """The pair in coordinates of the space that the means span.

    Attributes:
        means: one column for each bin.
    """

    means: Array

    @classmethod
    def of(cls, strategy: Strategy, *, steps: int, bins: int, noise_multiplier: float) -> BinsPair:
        """The pair of a strategy that releases ``steps`` rows, step t taking the whole of bin ``t mod bins``."""
        validate.positive_integer(steps=steps, bins=bins)
        require_non_negative(strategy, accountant="balls-in-bins batches")
        if bins > steps:
            raise InputError(f"bins={bins} is not allowed: with steps={steps} some bins would never be used.")
        moved = accounted_coefficients(strategy, steps=steps, noise_multiplier=noise_multiplier)
        first = series.repeated(moved, count=steps, separation=bins)
        columns = np.zeros((steps, bins))
        for index in range(bins):
            columns[index:, index] = first[: steps - index]
        return cls(means=np.asarray(np.linalg.qr(columns, mode="r")))

    @property
    def bins(self) -> int:
        return int(self.means.shape[1])

    @property
    def gram(self) -> Array:
        """Inner products of the means; none is negative, but for rounding."""
        products: Array = np.maximum(self.means.T @ self.means, 0.0)
        return products

    def largest_value(self, direction: Direction, epsilon: float) -> float:
        """A bound on every value of the estimates below, by proof (docs/matrix.md, section 5)."""
        if direction == "remove":
            return math.exp(min(self._log_bound(self.tilt(epsilon), epsilon), _LARGEST_EXPONENT)) + _CANCELLATION
        # By Jensen's inequality L is at least a log-normal along the mean of the means.
        gram = self.gram
        length = math.sqrt(float(gram.mean()))
        half = float(gram.diagonal().mean()) / 2
        edge = (half - epsilon) / length
        with_record = np.exp(epsilon - half + length**2 / 2 + scipy.special.log_ndtr(edge - length))
        return max(float(scipy.special.ndtr(edge) - with_record), 0.0) + _CANCELLATION

    def tilt(self, epsilon: float) -> float:
        """The factor s by which means are moved out; any is sound, and this one has the least bound."""
        found = scipy.optimize.minimize_scalar(
            lambda x: self._log_bound(1 + math.exp(x), epsilon), bounds=(-5.0, 8.0), method="bounded"
        )
        return 1 + math.exp(float(found.x))

    def _log_bound(self, tilt: float, epsilon: float) -> float:
        square = float(self.gram.diagonal().max())
        peak = (tilt - 1) * math.log1p(-1 / tilt) - math.log(tilt)
        return tilt * (tilt - 1) * square / 2 - (tilt - 1) * epsilon + peak

    def estimates(self, direction: Direction, *, epsilon: float, samples: int, seed: int) -> Array:
        """Independent non-negative values whose mean is the divergence, for the given seed.

        "remove" is the record being there against not, "add" the other way about.
        """
        draws = self._draws(direction, samples=samples, seed=seed)
        if direction == "remove":
            tilt = self.tilt(epsilon)
            parts = [self._remove(epsilon, tilt, normals, bins) for normals, bins in draws]
        else:
            parts = [self._add(epsilon, normals) for normals, _ in draws]
        values: Array = np.maximum(np.concatenate(parts), 0.0)
        return values

    def _draws(self, direction: Direction, *, samples: int, seed: int) -> Iterator[tuple[Array, Array]]:
        generator = np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, direction == "add"])))
        chunk = max(1, _VALUES_PER_CHUNK // self.bins)
        for start in range(0, samples, chunk):
            size = min(chunk, samples - start)
            yield generator.standard_normal((size, self.bins)), generator.integers(self.bins, size=size)

    def _remove(self, epsilon: float, tilt: float, normals: Array, bins: Array) -> Array:
        """``max(0, L - e^eps)`` over the density of the tilted mixture, both relative to ``N(0, 1)``."""
        gram = self.gram
        squares = gram.diagonal()
        exponents = normals @ self.means + tilt * gram[bins] - squares / 2
        log_ratio = _log_mean_exp(exponents)
        log_tilted = _log_mean_exp(tilt * exponents - (tilt**2 - tilt) * squares / 2)
        gain = -np.expm1(np.minimum(epsilon - log_ratio, 0.0))
        values = gain * np.exp(np.minimum(log_ratio - log_tilted, _LARGEST_EXPONENT))
        # What is not a number stays none, and `upper_mean` refuses it.
        return np.where(log_ratio <= epsilon, 0.0, values)

    def _add(self, epsilon: float, normals: Array) -> Array:
        """Along the mean of the means: the expectation of ``max(0, 1 - e^eps L)`` on that line."""
        gram = self.gram
        length = math.sqrt(float(gram.mean()))
        slope = gram.mean(axis=1) / length
        direction = self.means.mean(axis=1) / length
        projections = normals @ self.means
        along = normals @ direction
        heights = projections - along[:, None] * slope - gram.diagonal() / 2 - math.log(self.bins)
        start = np.full(len(normals), (float(gram.diagonal().mean()) / 2 - epsilon) / length)
        edge = _root(heights, np.broadcast_to(slope, heights.shape), level=-epsilon, start=start)
        with_record = np.exp(epsilon + heights + slope**2 / 2 + scipy.special.log_ndtr(edge[:, None] - slope)).sum(
            axis=1
        )
        expectation: Array = scipy.special.ndtr(edge) - with_record
        return expectation


def _root(heights: Array, slopes: Array, *, level: float, start: Array) -> Array:
    """Where ``log sum exp(heights + slopes u)``, convex and increasing, is the level: Newton's method from above.

    Where it is above the level all along the line, or at any u that matters, the answer is the lowest such u.
    """
    edge = start.copy()
    active = np.arange(len(edge))
    for _ in range(_NEWTON_STEPS):
        exponents = heights[active] + slopes[active] * edge[active, None]
        peak = exponents.max(axis=1)
        weights = np.exp(exponents - peak[:, None])
        total = weights.sum(axis=1)
        step = (peak + np.log(total) - level) * total / np.maximum((weights * slopes[active]).sum(axis=1), 1e-100)
        edge[active] = np.maximum(edge[active] - step, _LOWEST_EDGE)
        active = active[(np.abs(step) > _PRECISION) & (edge[active] > _LOWEST_EDGE)]
        if not active.size:
            break
    return edge


def _log_mean_exp(exponents: Array) -> Array:
    peak = exponents.max(axis=1)
    return np.asarray(peak + np.log(np.exp(exponents - peak[:, None]).mean(axis=1)))
