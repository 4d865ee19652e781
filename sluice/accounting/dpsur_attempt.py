"""What one attempt of DPSUR costs when every attempt is charged, whether it is accepted or not.

An attempt shows the candidate if it is accepted and "rejected" if not. With ``x`` the density ratio of the step,
``a`` the probability of acceptance and ``H``, ``G`` the hockey-stick curves of the step alone (removing and adding the
record), the curve of an attempt is at most the larger of two mixtures of ``H`` (or of ``G``) at shifted arguments: one
for an observer who bets on some candidates, one for an observer who bets on "rejected" as well. The proof is in
docs/accounting.md, section 8.4, and the names here are its symbols.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import scipy

from sluice.accounting.dpsur import Dpsur
from sluice.accounting.events import UNGATED, SelectiveReleaseDpEvent
from sluice.accounting.loss_distribution import (
    LARGEST_LOSS,
    Direction,
    LossDistribution,
    dominating_losses,
    hockey_stick_bound,
    loss_range,
)
from sluice.accounting.selective_rdp import renyi_divergences

Array = np.ndarray

# Relative, and added to the logarithm of a moment near 1: more than floating point can lose.
_ROUNDING = 1e-14


def attempt_bound(attempt: Dpsur, direction: Direction, epsilons: Array) -> Array:
    """An upper bound of the hockey-stick divergence of one attempt at each epsilon.

    Guarantee:
        Holds for every data set, record and history, and is attained: no bound that knows only the noise, the rates and
        the clip of the loss is smaller.
    """
    epsilons = np.asarray(epsilons, dtype=float)
    largest = np.maximum(*(_curve(bet, attempt, direction, epsilons) for bet in _bets(attempt, direction)))
    bound: Array = np.clip(largest, 0.0, 1.0)
    return bound


def attempt_losses(attempt: Dpsur, direction: Direction, *, spacing: float, upper_tail: float) -> LossDistribution:
    """The worst-case loss of one attempt on a grid.

    Guarantee:
        Its hockey-stick curve is nowhere below that of `attempt_bound`, so composing it never under-reports.
    """
    low, high = attempt_range(attempt, direction, upper_tail=upper_tail)
    first, last = (int(end / spacing) for end in np.clip((low - spacing, high + spacing), -LARGEST_LOSS, LARGEST_LOSS))
    bounds = attempt_bound(attempt, direction, np.arange(first, last + 1) * spacing)
    return dominating_losses(bounds, spacing=spacing, first=first)


def attempt_range(attempt: Dpsur, direction: Direction, *, upper_tail: float) -> tuple[float, float]:
    """The losses between which a grid has to reach."""
    low, high = loss_range(step_release(attempt), direction, upper_tail=upper_tail)
    harder, easier = _log_acceptance_ratios(attempt)
    tilt = max(easier, -harder)
    least, most = attempt.acceptance_arguments
    may_be_rejected = float(scipy.special.log_ndtr(-least)) > math.log(upper_tail)
    rejection = float(scipy.special.log_ndtr(-least) - scipy.special.log_ndtr(-most)) if may_be_rejected else 0.0
    low, high = min(low - tilt, -rejection), max(high + tilt, rejection)
    return max(low, -LARGEST_LOSS), min(high, LARGEST_LOSS)


def attempt_renyi(attempt: Dpsur, orders: Array) -> Array:
    """Renyi bound of one attempt at each order, with the candidate shown whether accepted or not.

    Guarantee:
        At least the divergence between the laws of (candidate, accepted or not) under any two data sets that differ in
        one record, in both directions.
    """
    if math.isinf(attempt.spread):  # the data decide alone
        return np.full(len(orders), math.inf)
    # Logarithms of both sides of each coin: a side so rare that the other rounds to 1 counts at large orders.
    least, most = (scipy.special.log_ndtr([end, -end]) for end in attempt.acceptance_arguments)
    tested, untested = math.log(attempt.validation_rate), _log_untested(attempt)
    decision = np.zeros(len(orders))
    for without, drawn in ((least, most), (most, least)):
        with_record = np.logaddexp(untested + without, tested + drawn)
        for first, second in ((with_record, without), (without, with_record)):
            decision = np.maximum(decision, _coin_renyi(first, second, orders))
    return renyi_divergences(step_release(attempt), orders) + decision


def _coin_renyi(first: Array, second: Array, orders: Array) -> Array:
    """The divergence of one coin from another, given the logarithms of the probabilities of their two sides."""
    moment = np.logaddexp(*(orders * p + (1 - orders) * r for p, r in zip(first, second, strict=True)))
    divergence: Array = (np.maximum(moment, 0.0) + _ROUNDING) / (orders - 1)
    return divergence


def step_release(attempt: Dpsur) -> SelectiveReleaseDpEvent:
    """The step alone, released as it is."""
    return SelectiveReleaseDpEvent(
        sampling_probability=attempt.sample_rate, noise_multiplier=attempt.noise_multiplier, acceptance=UNGATED
    )


@dataclass(frozen=True, kw_only=True)
class _Bet:
    """A curve ``constant - rejected * k + sum of weight * H(k e^shift)``."""

    parts: tuple[tuple[float, float], ...]
    constant: float = 0.0
    rejected: float = 0.0


def _bets(attempt: Dpsur, direction: Direction) -> tuple[_Bet, _Bet]:
    """On candidates alone, and on candidates and "rejected"."""
    least, most = math.exp(attempt.log_acceptance_min), math.exp(attempt.log_acceptance_max)
    tested, untested = attempt.validation_rate, _log_untested(attempt)
    harder, easier = _log_acceptance_ratios(attempt)
    if direction == "remove":
        kept = most * math.exp(harder)
        return (
            _Bet(parts=(((1 - tested) * least + tested * most, -easier), ((1 - tested) * (most - least), -untested))),
            _Bet(parts=((kept, -harder),), constant=1 - kept, rejected=1 - most),
        )
    return (
        _Bet(parts=((most, harder),)),
        _Bet(parts=((least, easier), (most - least, untested)), constant=1 - most, rejected=1 - most),
    )


def _log_acceptance_ratios(attempt: Dpsur) -> tuple[float, float]:
    """``log s_lo`` and ``log s_hi``: the range of ``a'(w) / a(w)``."""
    spread = attempt.log_acceptance_max - attempt.log_acceptance_min
    tested, untested = math.log(attempt.validation_rate), _log_untested(attempt)
    return float(np.logaddexp(untested, tested - spread)), float(np.logaddexp(untested, tested + spread))


def _log_untested(attempt: Dpsur) -> float:
    return math.log1p(-attempt.validation_rate) if attempt.validation_rate < 1 else -math.inf


def _curve(bet: _Bet, attempt: Dpsur, direction: Direction, epsilons: Array) -> Array:
    """The bet's curve at each epsilon, and a little more than rounding can have lowered it."""
    lost = bet.rejected * np.exp(np.minimum(epsilons, LARGEST_LOSS))
    value: Array = bet.constant - lost + _ROUNDING * (bet.constant + lost)
    for weight, shift in bet.parts:
        value = value + weight * (1 + _ROUNDING) * hockey_stick_bound(
            step_release(attempt), direction, epsilons + shift, pieces=1
        )
    return value
