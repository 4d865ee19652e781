"""How fine a grid has to be for a given looseness of epsilon. Nothing here can make an answer unsound."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from sluice.accounting.events import SelectiveReleaseDpEvent
from sluice.accounting.loss_distribution import DIRECTIONS, loss_range

Array = np.ndarray

_MAX_ONE_STEP_POINTS = 1 << 18
_MAX_TAIL_EVALUATIONS = 1 << 19
_MAX_PIECES = 160


@dataclass(frozen=True, kw_only=True)
class Grid:
    """Spacing of the losses, and for each release in how many pieces the gate's weight is bounded."""

    spacing: float
    upper_tail: float
    pieces: tuple[int, ...]


def choose_grid(
    releases: tuple[tuple[SelectiveReleaseDpEvent, int], ...],
    *,
    tilt: float,
    epsilon: float,
    upper_tail: float,
    tolerance: float,
    smallest_spacing: float,
) -> Grid:
    """A grid whose rounding raises epsilon by about ``tolerance * epsilon``, if its size allows.

    Rounding a loss up to the grid raises the logarithm of its moment at the tilt; divided by the tilt, and summed
    over all releases, that is what it adds to epsilon.
    """
    span = max(
        (
            high - low
            for event, _ in releases
            for low, high in (loss_range(event, d, upper_tail=upper_tail) for d in DIRECTIONS)
        ),
        default=1.0,
    )
    finest = max(span / _MAX_ONE_STEP_POINTS, smallest_spacing)
    coarsest = max(finest, min(0.25 / (1 + tilt), 0.02 * epsilon))
    candidates = np.geomspace(coarsest, finest, 48)
    cost = np.zeros_like(candidates)
    for event, count in releases:
        cost += count * _rounding_cost(event, tilt, candidates)
    fitting = np.flatnonzero(cost <= 0.6 * tolerance * epsilon)
    spacing = float(candidates[fitting[0]] if fitting.size else candidates[-1])
    total = sum(count for _, count in releases) or 1
    pieces = []
    for event, _ in releases:
        q, gate = event.sampling_probability, event.acceptance
        spread = math.log1p(q * (gate.ratio_max - gate.ratio_min) / ((1 - q) + q * gate.ratio_min))
        wanted = spread * math.sqrt(total * (1 + tilt) / (8 * 0.4 * tolerance * max(epsilon, 1e-9)))
        low, high = loss_range(event, "remove", upper_tail=upper_tail)
        affordable = _MAX_TAIL_EVALUATIONS * spacing / max(high - low, spacing)
        pieces.append(int(min(max(2, math.ceil(wanted)), max(2, affordable), _MAX_PIECES)))
    return Grid(spacing=spacing, upper_tail=upper_tail, pieces=tuple(pieces))


def _rounding_cost(event: SelectiveReleaseDpEvent, tilt: float, spacings: Array) -> Array:
    """What rounding one release adds to epsilon, for each spacing, by a rough integral over the noise."""
    q, mu, ratio = event.sampling_probability, 1.0 / event.effective_noise_multiplier, event.acceptance.ratio_max
    reach = min(max(2.0, 1 + tilt) * mu, 400.0)
    u = np.arange(-10.0, reach + 10.0, max(0.25 / max(mu, 1.0), (reach + 20.0) / 4000))
    log_mix = np.logaddexp(math.log1p(-q) if q < 1 else -math.inf, math.log(q * ratio) + mu * u - mu * mu / 2)
    losses = log_mix - math.log((1 - q) + q * ratio)
    exponent = (1 + tilt) * log_mix - u * u / 2
    weights = np.exp(exponent - exponent.max())
    weights /= weights.sum()
    rest = np.mod(losses[None, :], spacings[:, None])
    up = np.expm1(-rest) / np.expm1(-spacings)[:, None]
    growth = np.exp(-tilt * rest) * (1 + up * np.expm1(tilt * spacings)[:, None]) - 1
    excess: Array = np.log1p(np.maximum(np.sum(growth * weights, axis=1), 0.0)) / tilt
    return excess
