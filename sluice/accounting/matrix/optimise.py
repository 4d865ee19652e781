"""Strategies with the least error for a workload: L-BFGS on the exact loss and its exact gradient.

The loss is the logarithm of ``sensitivity^2 * (mean or largest squared error)``. With f = velocities * c^-1 the mean error
is a quadratic form of f and df = -c^-1 * (f * dc), so the gradient costs three more convolutions.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import scipy

from sluice._base import validate
from sluice._base.errors import InputError
from sluice.accounting.matrix import series
from sluice.accounting.matrix.series import Series
from sluice.accounting.matrix.strategy import BandedToeplitz, BufferedLinearToeplitz
from sluice.accounting.matrix.workload import Workload

Objective = Literal["mean", "largest"]
MAX_BUFFERS = 8
_ITERATIONS = 500
_LARGEST_DECAY = 1 - 1e-7
# Below 1 by more than the rounding errors of a sum.
_LARGEST_SCALE = 1 - 1e-12
_LARGEST_ERROR = 1e30


@functools.lru_cache(maxsize=64)
def optimise_banded(
    workload: Workload,
    *,
    bands: int,
    objective: Objective = "mean",
    participations: int = 1,
    separation: int | None = None,
) -> BandedToeplitz:
    """The banded strategy with the least error.

    Args:
        workload: whose iterates are to be known well.
        bands: how many diagonals; at most ``workload.steps``.
        objective: "mean" for the mean squared error over the iterates, "largest" for the largest.
        participations: in how many steps a record takes part, at most.
        separation: how many steps at least lie between two of them; at least ``bands``, which is the default. The
            best strategy is then the same for any number of participations.
    """
    separation = bands if separation is None else separation
    _check(workload, objective=objective, participations=participations, separation=separation)
    validate.positive_integer(bands=bands)
    if not bands <= min(workload.steps, separation):
        raise InputError(
            f"bands={bands} is not allowed: it must be at most the number of steps, {workload.steps}, and the "
            f"separation, {separation}."
        )
    loss = _loss_of(workload, objective=objective, participations=1, separation=1)
    start = series.inverse(_half_power(workload))[:bands]

    def evaluate(tail: np.ndarray) -> tuple[float, np.ndarray]:
        column = np.zeros(workload.steps)
        column[0], column[1:bands] = 1.0, tail
        value, gradient = loss(column)
        return value, gradient[1:bands]

    if bands == 1:
        return BandedToeplitz((1.0,))
    found = scipy.optimize.minimize(
        evaluate, start[1:], jac=True, method="L-BFGS-B", options={"maxiter": _ITERATIONS, "ftol": 1e-13, "gtol": 1e-9}
    )
    return BandedToeplitz((1.0, *(float(value) for value in found.x)))


@functools.lru_cache(maxsize=64)
def optimise_blt(
    workload: Workload,
    *,
    buffers: int,
    objective: Objective = "mean",
    participations: int = 1,
    separation: int = 1,
) -> BufferedLinearToeplitz:
    """A buffered linear strategy of least error: the best of a few searches from fixed starting points.

    Guarantee:
        Whatever the workload, its coefficients are non-negative and never increase, so that its sensitivity is known for
        every separation: no other strategies are searched.
    """
    _check(workload, objective=objective, participations=participations, separation=separation)
    require_buffers(buffers)
    search = _BltSearch(
        loss=_loss_of(workload, objective=objective, participations=participations, separation=separation),
        lags=np.arange(workload.steps - 1, dtype=float),
    )
    target = series.inverse(_half_power(workload))
    longest_memories = {float(max(workload.steps, 4)), float(max(separation, 4)), max(workload.steps, 16) / 4}
    starts = [
        search.fitted(target, memory=np.geomspace(1.5, longest, buffers) if buffers > 1 else np.sqrt([longest]))
        for longest in sorted(longest_memories)
    ]
    return min((search.improved(start) for start in starts), key=search.loss_at)


@dataclass(frozen=True)
class _BltSearch:
    """Buffered linear strategies as points of a box, all of which have coefficients that never increase.

    A point is the log-odds of each decay, the logarithm of each buffer's share of the scale, and the sum of the scale,
    which is the second coefficient: at most the first, 1.

    Attributes:
        loss: of a column of coefficients, with its gradient.
        lags: 0, 1, ... for the second, third, ... coefficient.
    """

    loss: Callable[[Series], tuple[float, np.ndarray]]
    lags: np.ndarray

    def fitted(self, target: Series, *, memory: np.ndarray) -> np.ndarray:
        """The point with buffers of the given memories whose coefficients are nearest the target."""
        decay = np.exp(-1 / memory)
        scale = (
            scipy.optimize.nnls(decay ** self.lags[:, None], target[1:])[0] if len(self.lags) else np.ones(len(decay))
        )
        scale = np.maximum(scale, 1e-3)
        total = min(float(scale.sum()), 0.9)
        return np.concatenate([np.log(decay / (1 - decay)), np.log(scale / scale.sum()), [total]])

    def improved(self, start: np.ndarray) -> BufferedLinearToeplitz:
        """The strategy of the local minimum that a search from here ends in."""
        buffers = len(start) // 2
        found = scipy.optimize.minimize(
            self._evaluate,
            start,
            jac=True,
            method="L-BFGS-B",
            bounds=[(-8.0, 16.0)] * buffers + [(-14.0, 14.0)] * buffers + [(0.0, _LARGEST_SCALE)],
            options={"maxiter": _ITERATIONS, "maxfun": 2 * _ITERATIONS, "ftol": 1e-12, "gtol": 1e-8},
        )
        decay, share, total = self._unpack(found.x)
        order = np.argsort(-decay)
        return BufferedLinearToeplitz(
            decay=tuple(float(value) for value in decay[order]),
            scale=tuple(float(value) for value in total * share[order]),
        )

    def loss_at(self, strategy: BufferedLinearToeplitz) -> float:
        return self.loss(strategy.coefficients(len(self.lags) + 1))[0]

    @staticmethod
    def _unpack(point: np.ndarray) -> tuple[np.ndarray, np.ndarray, float]:
        odds, logits = np.split(point[:-1], 2)
        share = np.exp(logits - logits.max())
        return _LARGEST_DECAY / (1 + np.exp(-odds)), share / share.sum(), float(point[-1])

    def _evaluate(self, point: np.ndarray) -> tuple[float, np.ndarray]:
        decay, share, total = self._unpack(point)
        powers = decay ** self.lags[:, None]
        value, gradient = self.loss(np.concatenate([[1.0], powers @ share * total]))
        by_scale = gradient[1:] @ powers
        by_decay = (gradient[1:] * self.lags) @ (powers / decay) * share * total
        by_total = float(share @ by_scale)
        by_odds = by_decay * decay * (1 - decay / _LARGEST_DECAY)
        return value, np.concatenate([by_odds, total * share * (by_scale - by_total), [by_total]])


def require_buffers(buffers: int) -> None:
    """Refuse a number of buffers that no search is made for."""
    validate.positive_integer(buffers=buffers)
    if buffers > MAX_BUFFERS:
        raise InputError(f"buffers={buffers} is not allowed: it must be at most {MAX_BUFFERS}; more do not help.")


def _check(workload: Workload, *, objective: str, participations: int, separation: int) -> None:
    validate.one_of(("mean", "largest"), objective=objective)
    validate.positive_integer(participations=participations, separation=separation)
    if objective == "largest" and workload.learning_rates is not None:
        raise InputError(
            'objective="largest" is not allowed with learning_rates: the iterate with the largest error is not known '
            'beforehand; use "mean".'
        )


def _half_power(workload: Workload) -> Series:
    """The inverse square root of the workload with a constant learning rate: nearly the best ``C^-1``."""
    halves = np.cumprod(np.concatenate([[1.0], 1 - 1.5 / np.arange(1, workload.steps)]))
    return series.multiply(halves, halves * workload.momentum ** np.arange(workload.steps, dtype=float))


def _loss_of(
    workload: Workload, *, objective: Objective, participations: int, separation: int
) -> Callable[[Series], tuple[float, np.ndarray]]:
    steps = workload.steps
    if workload.learning_rates is None:
        base = workload.coefficients
        weights = np.ones(steps) if objective == "largest" else np.arange(steps, 0, -1) / steps

        def applied(vector: Series) -> Series:
            weighted: Series = weights * vector
            return weighted
    else:
        base, form = workload.velocity_coefficients, workload.mean_form()

        def applied(vector: Series) -> Series:
            return np.asarray(form @ vector)

    def loss(column: Series) -> tuple[float, np.ndarray]:
        with np.errstate(over="ignore", invalid="ignore"):
            inverse = series.inverse(column)
            filtered = series.multiply(base, inverse)
            weighted = applied(filtered)
            error = float(filtered @ weighted)
        moved = series.repeated(column, count=participations, separation=separation)
        squared = float(moved @ moved)
        if not 0 < error < _LARGEST_ERROR:
            # Too long a step of the line search, to where the inverse grows without bound: it turns back.
            return 2 * math.log(_LARGEST_ERROR), np.zeros(steps)
        by_error = -2 * series.transposed_multiply(series.multiply(inverse, filtered), weighted) / error
        by_norm = 2 * series.transposed_repeated(moved, count=participations, separation=separation) / squared
        return math.log(error) + math.log(squared), by_error + by_norm

    return loss
