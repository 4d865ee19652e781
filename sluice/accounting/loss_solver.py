"""Epsilon and delta of a collection of events, by privacy-loss distributions and Renyi divergences together."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace

import dp_accounting
import numpy as np

from sluice.accounting import dp_accounting_losses, dpa
from sluice.accounting.composition import ComposedLosses, Factors, GridTooLargeError, best_tilt, compose
from sluice.accounting.dpsur import DpsurAttemptDpEvent
from sluice.accounting.dpsur_attempt import attempt_losses, attempt_range, attempt_renyi, step_release
from sluice.accounting.events import UNGATED, SelectiveReleaseDpEvent
from sluice.accounting.gaussian import gaussian_delta, gaussian_epsilon
from sluice.accounting.loss_distribution import DIRECTIONS, Direction, loss_distribution
from sluice.accounting.loss_grid import Grid, choose_grid
from sluice.accounting.renyi_conversion import delta_and_order, epsilon_and_order
from sluice.accounting.selective_rdp import DEFAULT_ORDERS, renyi_divergences

Array = np.ndarray

_MAX_POINTS = 1 << 20
_MAX_PASSES = 5
_CUT_OFF = 1e-6
_LARGEST_EPSILON = 500.0
_SMALLEST_DELTA = 1e-280


@dataclass(frozen=True, kw_only=True)
class Events:
    """What is composed: releases and attempts, each with its count, and events that only dp-accounting understands."""

    releases: tuple[tuple[SelectiveReleaseDpEvent, int], ...] = ()
    attempts: tuple[tuple[DpsurAttemptDpEvent, int], ...] = ()
    others: tuple[tuple[dpa.DpEvent, int], ...] = ()

    @property
    def count(self) -> int:
        return sum(count for _, count in (*self.releases, *self.attempts, *self.others))

    @property
    def gaussian(self) -> float | None:
        """``mu`` of the one Gaussian release that equals them all; None where they are more than that."""
        plain = all(
            release.sampling_probability == 1.0 and release.acceptance == UNGATED for release, _ in self.releases
        )
        if self.attempts or self.others or not plain:
            return None
        return math.sqrt(sum(count / release.effective_noise_multiplier**2 for release, count in self.releases))

    def renyi(self) -> Array | None:
        """The Renyi divergences at ``DEFAULT_ORDERS``; None where dp-accounting gives none for some event."""
        orders = np.array(DEFAULT_ORDERS)
        total = np.zeros_like(orders)
        for release, count in self.releases:
            total += count * renyi_divergences(release, orders)
        for attempt, count in self.attempts:
            total += count * attempt_renyi(attempt.attempt, orders)
        if self.others:
            accountant = dp_accounting.rdp.RdpAccountant(list(DEFAULT_ORDERS))
            if not all(accountant.supports(event) for event, _ in self.others):
                return None
            for event, count in self.others:
                accountant.compose(event, count)
            total += accountant.rdp
        return total


def solve_epsilon(events: Events, *, delta: float, tolerance: float) -> float:
    """The smaller of the Renyi and the loss-distribution bound of epsilon; both are sound. Answers are remembered."""
    return _solve_epsilon(events, delta, tolerance) if events.others else _remembered(events, delta, tolerance)


@functools.lru_cache(maxsize=1024)
def _remembered(events: Events, delta: float, tolerance: float) -> float:
    return _solve_epsilon(events, delta, tolerance)


def _solve_epsilon(events: Events, delta: float, tolerance: float) -> float:
    if events.count == 0:
        return 0.0
    if events.gaussian is not None and delta >= _SMALLEST_DELTA:
        return gaussian_epsilon(events.gaussian, delta)
    renyi = events.renyi()
    if renyi is None:
        composed, guess = _compose_without_order(events, delta)
        return max(losses.epsilon(delta, near=guess) for losses in composed)
    bound, order = epsilon_and_order(DEFAULT_ORDERS, renyi, delta=delta)
    if bound == 0 or bound > _LARGEST_EPSILON or delta < _SMALLEST_DELTA:
        return bound
    best, used = bound, math.inf
    for _ in range(_MAX_PASSES):
        grid = _grid(events, tilt=order - 1, epsilon=best, delta=delta, tolerance=tolerance)
        if grid.spacing > 0.8 * used:
            break
        composed = _compose(events, grid, tilt=order - 1)
        used = composed[-1].spacing
        previous, best = best, min(best, max(losses.epsilon(delta, near=best) for losses in composed))
        # Where rare, large losses make the Renyi bound loose, the grid was chosen for too large an epsilon.
        if best > 0.7 * previous or best == 0 or used > grid.spacing:
            break
    return best


def solve_delta(events: Events, *, epsilon: float, tolerance: float) -> float:
    """The smaller of the Renyi and the loss-distribution bound of delta; both are sound."""
    if events.count == 0:
        return 0.0
    if events.gaussian is not None:
        return gaussian_delta(events.gaussian, epsilon)
    renyi = events.renyi()
    if renyi is None:
        composed, _ = _compose_without_order(events, 1e-9)
        return max(losses.delta(epsilon) for losses in composed)
    bound, order = delta_and_order(DEFAULT_ORDERS, renyi, epsilon=epsilon)
    if bound < _SMALLEST_DELTA or epsilon > _LARGEST_EPSILON:
        return bound
    grid = _grid(events, tilt=order - 1, epsilon=max(epsilon, 1e-3), delta=bound, tolerance=tolerance)
    composed = _compose(events, grid, tilt=order - 1)
    return min(bound, max(losses.delta(epsilon) for losses in composed))


def _grid(events: Events, *, tilt: float, epsilon: float, delta: float, tolerance: float) -> Grid:
    # An attempt's losses are about those of its step, which is all that the choice of a grid has to know but for its size:
    # with little noise in the test they reach much farther.
    steps = tuple((step_release(event.attempt), count) for event, count in events.attempts)
    upper_tail = _CUT_OFF * delta / events.count
    spans = (
        attempt_range(event.attempt, direction, upper_tail=upper_tail)
        for event, _ in events.attempts
        for direction in DIRECTIONS
    )
    smallest = [
        *(dp_accounting_losses.smallest_spacing(event) for event, _ in events.others),
        *((high - low) / _MAX_POINTS for low, high in spans),
    ]
    return choose_grid(
        (*events.releases, *steps),
        tilt=tilt,
        epsilon=epsilon,
        upper_tail=upper_tail,
        tolerance=tolerance,
        smallest_spacing=max(smallest, default=0.0),
    )


def _compose(events: Events, grid: Grid, *, tilt: float) -> tuple[ComposedLosses, ...]:
    """Compose in both directions, on the given grid or on the finest coarser one that is small enough."""
    while True:
        try:
            return tuple(
                compose(_factors(events, direction, grid), tilt=tilt, max_points=_MAX_POINTS)
                for direction in DIRECTIONS
            )
        except GridTooLargeError as error:
            grid = replace(grid, spacing=grid.spacing * max(1.5, 1.1 * error.points / _MAX_POINTS))


def _compose_without_order(events: Events, delta: float) -> tuple[tuple[ComposedLosses, ...], float]:
    """Where Renyi divergences are not at hand: dp-accounting's usual spacing, and the tilt found on the grid."""
    spacing = max(1e-4, *(dp_accounting_losses.smallest_spacing(event) for event, _ in events.others))
    upper_tail = _CUT_OFF * delta / events.count
    while True:
        grid = Grid(spacing=spacing, upper_tail=upper_tail, pieces=(32,) * len(events.releases))
        per_direction = [_factors(events, direction, grid) for direction in DIRECTIONS]
        tilt, guess = max((best_tilt(factors, delta=delta) for factors in per_direction), key=lambda pair: pair[1])
        try:
            composed = tuple(compose(factors, tilt=tilt, max_points=_MAX_POINTS) for factors in per_direction)
            return composed, guess
        except GridTooLargeError as error:
            spacing *= max(1.5, 1.1 * error.points / _MAX_POINTS)


def _factors(events: Events, direction: Direction, grid: Grid) -> Factors:
    own = [
        (
            loss_distribution(event, direction, spacing=grid.spacing, upper_tail=grid.upper_tail, pieces=pieces),
            count,
        )
        for (event, count), pieces in zip(events.releases, grid.pieces[: len(events.releases)], strict=True)
    ]
    attempts = [
        (attempt_losses(event.attempt, direction, spacing=grid.spacing, upper_tail=grid.upper_tail), count)
        for event, count in events.attempts
    ]
    other = [
        (dp_accounting_losses.loss_distribution(event, direction, spacing=grid.spacing), count)
        for event, count in events.others
    ]
    return [*own, *attempts, *other]
