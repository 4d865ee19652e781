"""The privacy-loss distribution of a mixture of normals with means >= 0 against the normal at 0, rounded up onto a grid."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
import scipy

from sluice._base.errors import InputError
from sluice.accounting.loss_distribution import LossDistribution

Array = np.ndarray
Direction = Literal["remove", "add"]

REACH = 10.0
_ENDS = 4001
_FINER = 16
_VALUES_PER_CHUNK = 1 << 21


@dataclass(frozen=True, kw_only=True)
class Mixture:
    """Unit normals at ``means`` >= 0 with ``weights``; what is missing to 1 counts as infinitely far away."""

    means: Array
    weights: Array

    @property
    def missing(self) -> float:
        return max(0.0, 1.0 - float(self.weights.sum()))


def sum_of_coins(shifts: Array, probabilities: Array, *, cells: int, dropped: float) -> Mixture:
    """The law of a sum of shifts, each present with its own probability, rounded up to ``cells`` values where needed.

    Guarantee:
        The result is stochastically at least the sum. About ``dropped`` of its mass is infinitely far away.
    """
    if not (np.isfinite(shifts).all() and ((probabilities >= 0) & (probabilities <= 1)).all()):
        raise InputError(
            "shifts and probabilities of coins are not all numbers, the latter from 0 to 1: nothing is proved."
        )
    present = (shifts > 0) & (probabilities > 0)
    shifts, probabilities = shifts[present], probabilities[present]
    if len(shifts) <= math.log2(cells):
        means, weights = np.zeros(1), np.ones(1)
        for shift, probability in zip(shifts, probabilities, strict=True):
            means = np.concatenate([means, means + shift])
            weights = np.concatenate([weights * (1 - probability), weights * probability])
        return Mixture(means=means, weights=weights)
    # The first pass finds where the mass ends, nearer than Chernoff's bound. The second has cells so fine that rounding
    # each shift up does not add up, and rounds to the coarser ones once.
    spare = min(len(shifts), cells // 2)
    end = _upper_end(shifts, probabilities, dropped / 2) * (cells - 1) / (cells - 1 - spare)
    weights = _convolved(shifts, probabilities, cell=end / (cells - 1), cells=cells)
    beyond = 1.0 - weights.sum() + np.concatenate([np.cumsum(weights[:0:-1])[::-1], [0.0]])
    last = int(np.flatnonzero(beyond <= dropped)[0]) if beyond[-1] <= dropped else cells - 1
    cell = max(last, 1) * end / (cells - 1) ** 2
    fine = _convolved(shifts, probabilities, cell=cell / _FINER, cells=(cells - 1) * _FINER + 1)
    weights = np.concatenate([fine[:1], fine[1:].reshape(cells - 1, _FINER).sum(axis=1)])
    kept = weights > 0
    return Mixture(means=np.arange(cells)[kept] * cell, weights=weights[kept])


def _convolved(shifts: Array, probabilities: Array, *, cell: float, cells: int) -> Array:
    """Masses at multiples of the cell, each shift rounded up to one; what falls beyond the last cell is dropped."""
    weights = np.zeros(cells)
    weights[0] = 1.0
    for shift, probability in zip(shifts, probabilities, strict=True):
        places = math.ceil(shift / cell)
        moved = np.zeros(cells)
        if places < cells:
            moved[places:] = weights[: cells - places]
        weights = (1 - probability) * weights + probability * moved
    return weights


def _upper_end(shifts: Array, probabilities: Array, dropped: float) -> float:
    """The sum exceeds this with at most the given probability, by Chernoff's bound."""
    rates = np.geomspace(0.01, 1000, 120)[:, None] / shifts.max()
    log_moments = np.log1p(probabilities * np.expm1(np.minimum(rates * shifts, 700.0))).sum(axis=1)
    usable = (rates * shifts).max(axis=1) < 700
    bounds = (log_moments[usable] - math.log(dropped)) / rates[usable, 0]
    return min(float(bounds.min()), float(shifts.sum()))


def mixture_loss(mixture: Mixture, direction: Direction, *, spacing: float) -> LossDistribution:
    """The loss of the mixture against the normal at 0 ("remove"), or the other way about ("add").

    The line is cut at many places. Between two cuts the loss lies between its values there; mass is split between the
    two such that both distributions keep theirs, and then once more between neighbours on the grid. Either only
    raises the hockey-stick curve.

    Guarantee:
        Its curve is nowhere below the true one, but for rounding errors of the order of 1e-15.
    """
    ends = np.linspace(-REACH, float(mixture.means.max()) + REACH, _ENDS)
    losses, with_record = _at_ends(mixture, ends, direction)
    if direction == "remove":
        without = scipy.special.ndtr(-ends)
        first, second, ratio = with_record, without, losses
    else:
        # Losses grow as the place falls, and so must the order of the cuts.
        ends, losses, with_record = ends[::-1], losses[::-1], with_record[::-1]
        first, second, ratio = scipy.special.ndtr(ends), with_record, -losses
    ratio = np.maximum.accumulate(ratio)
    mass, other = first[:-1] - first[1:], second[:-1] - second[1:]
    low, high = np.exp(-ratio[:-1]), np.exp(-ratio[1:])
    width = low - high
    with np.errstate(divide="ignore", invalid="ignore"):
        down = np.where(width > 1e-13 * low, (other - mass * high) / width, 0.0)
    mass = np.maximum(mass, 0.0)
    down = np.clip(np.nan_to_num(down), 0.0, mass)
    atoms = np.zeros(len(ratio))
    atoms[0] = max(0.0, 1.0 - first[0] - (mixture.missing if direction == "remove" else 0.0))
    atoms[:-1] += down
    atoms[1:] += mass - down
    # Beyond the last cut nothing is known of the loss.
    infinity = float(first[-1]) + (mixture.missing if direction == "remove" else 0.0)
    return _on_grid(ratio, atoms, infinity, spacing=spacing)


def _at_ends(mixture: Mixture, ends: Array, direction: Direction) -> tuple[Array, Array]:
    """The logarithm of the density ratio at each place, and the mixture's mass beyond it, in the direction of loss."""
    with np.errstate(divide="ignore"):
        log_weights = np.log(mixture.weights)
    losses, masses = np.empty(len(ends)), np.empty(len(ends))
    chunk = max(1, _VALUES_PER_CHUNK // len(mixture.means))
    for start in range(0, len(ends), chunk):
        part = ends[start : start + chunk, None]
        exponents = log_weights + mixture.means * part - mixture.means**2 / 2
        peak = exponents.max(axis=1)
        losses[start : start + chunk] = peak + np.log(np.exp(exponents - peak[:, None]).sum(axis=1))
        beyond = (
            scipy.special.ndtr(mixture.means - part)
            if direction == "remove"
            else scipy.special.ndtr(part - mixture.means)
        )
        masses[start : start + chunk] = beyond @ mixture.weights
    return losses, masses


def _on_grid(losses: Array, atoms: Array, infinity: float, *, spacing: float) -> LossDistribution:
    below = np.floor(losses / spacing).astype(np.int64)
    first, last = int(below.min()), int(below.max()) + 1
    up = atoms * np.clip(np.expm1(-(losses - below * spacing)) / math.expm1(-spacing), 0.0, 1.0)
    masses = np.bincount(below - first, weights=atoms - up, minlength=last - first + 1)
    masses += np.bincount(below - first + 1, weights=up, minlength=last - first + 1)
    return LossDistribution(spacing=spacing, first=first, masses=masses, infinity=min(1.0, infinity))
