"""The conditional-composition bound (MMCC) of correlated noise under plain Poisson sampling.

Every record is in every batch with the same probability, on its own. Given the rows released so far, who took part in the
past is no longer a fair coin; but but for a small probability, which delta pays, no coin has become heavier than a
bound. With all coins at their bounds each row is a mixture of normals, and the rows compose.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import numpy as np
import scipy

from sluice._base import validate
from sluice._base.errors import InputError
from sluice.accounting.composition import Factors, GridTooLargeError, best_tilt, compose
from sluice.accounting.matrix.accounting import accounted_coefficients, require_non_negative
from sluice.accounting.matrix.mixture_loss import REACH, Direction, Mixture, mixture_loss, sum_of_coins
from sluice.accounting.matrix.strategy import Strategy

DEFAULT_TAIL_SHARE = 0.3
SMALLEST_DELTA = 1e-12
_DIRECTIONS: tuple[Direction, Direction] = ("remove", "add")
_MAX_POINTS = 1 << 20
_CELLS = 512
_BLOCKS_PER_DOUBLING = 3
_DROPPED = 1e-4
_SPACING = 1e-3


@dataclass(frozen=True, kw_only=True)
class ConditionalEpsilon:
    """Epsilon by conditional composition.

    Attributes:
        epsilon: at ``delta``, which includes ``tail_probability``.
        delta: at which.
        tail_probability: the part of delta that is charged for coins beyond their bounds; 0 where rows are independent.
        participation_bounds: the bound on the coin of the step d + 1 rows back, for each such row that still shows.
    """

    epsilon: float
    delta: float
    tail_probability: float
    participation_bounds: tuple[float, ...]


def conditional_epsilon(
    strategy: Strategy,
    *,
    steps: int,
    sample_rate: float,
    noise_multiplier: float,
    delta: float,
    tail_share: float = DEFAULT_TAIL_SHARE,
) -> ConditionalEpsilon:
    """Epsilon under Poisson sampling, for any strategy without negative coefficients.

    Args:
        strategy: without negative coefficients, banded or not.
        steps: how many rows are released.
        sample_rate: of :class:`sluice.randomness.sampling.PoissonSampler`, the same at every step.
        noise_multiplier: standard deviation of z over ``max_grad_norm * strategy.column_norm(steps)``.
        delta: at which.
        tail_share: which part of delta is charged for the coins; any choice is sound.

    Guarantee:
        An upper bound under adding or removing one record, for gradients chosen adaptively (docs/matrix.md,
        section 6). For a strategy with one band it is the bound of plain DP-SGD.
    """
    validate.open_fraction(delta=delta, tail_share=tail_share)
    if delta < SMALLEST_DELTA:
        raise InputError(
            f"delta={delta} is not allowed with conditional composition: it must be at least {SMALLEST_DELTA:g}, far "
            "above the rounding errors of its loss distributions."
        )
    moved = _checked_coefficients(strategy, steps=steps, sample_rate=sample_rate, noise_multiplier=noise_multiplier)
    return _solve(moved, sample_rate, delta, tail_share * delta if len(moved) > 1 else 0.0)


def _checked_coefficients(strategy: Strategy, *, steps: int, sample_rate: float, noise_multiplier: float) -> _Moved:
    validate.fraction(sample_rate=sample_rate)
    require_non_negative(strategy, accountant="conditional composition")
    moved = accounted_coefficients(strategy, steps=steps, noise_multiplier=noise_multiplier)
    bands = steps if strategy.bands is None else min(strategy.bands, steps)
    return _Moved(coefficients=tuple(float(value) for value in moved[:bands]), steps=steps)


@dataclass(frozen=True, kw_only=True)
class _Moved:
    """The band of accounted coefficients, and the number of rows."""

    coefficients: tuple[float, ...]
    steps: int

    def __len__(self) -> int:
        return len(self.coefficients)

    @property
    def coins(self) -> int:
        """How many pairs of a row and an earlier participation that shows in it there are."""
        return sum(min(row, len(self) - 1) for row in range(self.steps))

    def blocks(self) -> list[tuple[int, int]]:
        """How many earlier steps show in a row, at most, for runs of rows; and how many rows each run has."""
        result, row = [], 0
        while row < self.steps:
            lags = min(row, len(self) - 1)
            end = (
                self.steps if lags == len(self) - 1 else max(row + 1, math.ceil(row * 2 ** (1 / _BLOCKS_PER_DOUBLING)))
            )
            end = min(end, self.steps)
            result.append((min(end - 1, len(self) - 1), end - row))
            row = end
        return result


@functools.lru_cache(maxsize=64)
def _solve(moved: _Moved, sample_rate: float, delta: float, tail: float) -> ConditionalEpsilon:
    bounds = participation_bounds(
        np.array(moved.coefficients), sample_rate=sample_rate, steps=moved.steps, failure=tail / max(moved.coins, 1)
    )
    shifts, coins = np.array(moved.coefficients), np.concatenate([[sample_rate], bounds])
    mixtures = [
        (
            sum_of_coins(shifts[: lags + 1], coins[: lags + 1], cells=_CELLS, dropped=_DROPPED * delta / moved.steps),
            count,
        )
        for lags, count in moved.blocks()
    ]
    epsilon = max(_epsilon(mixtures, direction, delta=delta - tail) for direction in _DIRECTIONS)
    return ConditionalEpsilon(
        epsilon=float(epsilon), delta=delta, tail_probability=tail, participation_bounds=tuple(float(p) for p in bounds)
    )


def participation_bounds(coefficients: np.ndarray, *, sample_rate: float, steps: int, failure: float) -> np.ndarray:
    """For 1, 2, ... rows after a step: a bound on the probability, given those rows, that the record took part in it.

    The odds of taking part, whatever the record did at other steps, are those of the coin times ``e^R`` with ``R <= (c, z) +
    sum_k x_k (c, c_k) - |c|^2 / 2`` where c is the column of the step in the rows seen, c_k that of step k and x_k its coin. The tail
    of R is bounded by Chernoff's method, at any rate that happens to be good.

    Guarantee:
        Each bound fails with at most the given probability, whether the record is there or not.
    """
    lags = len(coefficients) - 1
    if lags == 0 or sample_rate == 1:
        return np.ones(lags)
    needed = -math.log(failure)
    result = np.empty(lags)
    padded = np.concatenate([coefficients, np.zeros(steps)])
    for lag in range(1, lags + 1):
        window = padded[:lag]
        # Steps before, in the longest run there is, then the step itself and those after it.
        before = scipy.signal.correlate(padded[1 : len(coefficients) + lag], window, mode="valid")[: steps - 1]
        after = scipy.signal.correlate(window, window, mode="full")[lag:]
        square = float(window @ window)
        overlaps = np.concatenate([before, [square], after])
        # More than the rounding errors of a Fourier transform.
        overlaps = np.maximum(overlaps, 0.0) + 1e-12 * square
        rates = math.sqrt(2 * needed / square) * np.geomspace(0.1, 1.3, 24)
        exponents = np.minimum(rates[:, None] * overlaps, 700.0)
        usable = exponents.max(axis=1) < 700
        coins = np.log1p(sample_rate * np.expm1(exponents)).sum(axis=1)
        bounds = (needed + coins) / rates + (rates - 1) * square / 2
        result[lag - 1] = (
            float(scipy.special.expit(scipy.special.logit(sample_rate) + bounds[usable].min())) if usable.any() else 1.0
        )
    return result


def _epsilon(mixtures: list[tuple[Mixture, int]], direction: Direction, *, delta: float) -> float:
    # The loss at the last place that is looked at, as far as it may be above 0.
    longest = max(float(mixture.means.max()) for mixture, _ in mixtures)
    spacing = max(_SPACING, longest * (longest + REACH) / _MAX_POINTS)
    while True:
        factors: Factors = [(mixture_loss(mixture, direction, spacing=spacing), count) for mixture, count in mixtures]
        tilt, guess = best_tilt(factors, delta=delta)
        if not math.isfinite(guess):
            return math.inf
        try:
            return compose(factors, tilt=tilt, max_points=_MAX_POINTS).epsilon(delta, near=guess)
        except GridTooLargeError as error:
            spacing *= max(1.5, 1.1 * error.points / _MAX_POINTS)
