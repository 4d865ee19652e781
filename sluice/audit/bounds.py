"""From guesses to a lower bound on epsilon: pure arithmetic, each bound by a theorem of its own.

The game: each of m canaries is in the data by a fair coin of its own. From what was released, whether it is in is guessed
for r of them, a number that was fixed before anybody looked, and v of these guesses are right.

| bound | assumes | source |
|---|---|---|
| `one_run` | nothing beside the game | Steinke, Nasr, Jagielski, "Privacy auditing with one (1) training run", NeurIPS 2023 |
| `f_dp` | the trade-off curve is that of a Gaussian | Mahloujifar, Melis, Chaudhuri, "Auditing f-differential privacy in one run", 2024 |
| `clopper_pearson` | trials are independent | two binomial intervals |
| `gaussian_fit` | independent, and the curve is that of a Gaussian | Nasr et al., "Tight auditing", USENIX Security 2023 |
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import scipy

from sluice._base import validate
from sluice._base.errors import InputError
from sluice.audit.curves import Curve, gaussian_curve, gaussian_epsilon

_HALVINGS = 50
_LARGEST_EPSILON = 60.0
_LARGEST_MU = 60.0
#: What lies this many standard deviations below the mean of a binomial law has no mass that would count.
_DEVIATIONS = 12.0
_LEAST_P_VALUE = 1e-12


def one_run(*, canaries: int, guesses: int, correct: int, delta: float, confidence: float = 0.95) -> float:
    """The largest epsilon that so many right guesses rule out at delta.

    Guarantee:
        If the game was played with an (epsilon, delta)-private algorithm, the result exceeds epsilon with probability at
        most ``1 - confidence``, whatever the guesses are based on.
    """
    _require_game(canaries, guesses, correct)
    _require_levels(delta, confidence)
    beta = 1 - confidence
    return _largest(
        lambda epsilon: (
            one_run_p_value(epsilon, canaries=canaries, guesses=guesses, correct=correct, delta=delta) < beta
        ),
        most=_LARGEST_EPSILON,
    )


def one_run_p_value(epsilon: float, *, canaries: int, guesses: int, correct: int, delta: float) -> float:
    """How probable it is, at most, that so many guesses are right where (epsilon, delta)-privacy holds."""
    if correct == 0:
        return 1.0
    right = float(scipy.special.expit(epsilon))
    tail = float(scipy.special.betainc(correct, guesses - correct + 1, right))
    return min(1.0, tail + 2 * canaries * delta * _largest_mean_below(correct, guesses, right))


def _largest_mean_below(correct: int, guesses: int, right: float) -> float:
    """The largest mean of the binomial law's masses at v - i ... v - 1, over all i."""
    deviation = math.sqrt(guesses * right * (1 - right))
    first = max(0, min(correct - 1, math.floor(guesses * right - _DEVIATIONS * (deviation + 1))))
    counts = np.arange(correct - 1, first - 1, -1)
    log_masses = (
        scipy.special.gammaln(guesses + 1)
        - scipy.special.gammaln(counts + 1)
        - scipy.special.gammaln(guesses - counts + 1)
        + scipy.special.xlogy(counts, right)
        + scipy.special.xlog1py(guesses - counts, -right)
    )
    means = np.cumsum(np.exp(log_masses)) / np.arange(1, len(counts) + 1)
    return float(means.max())


def f_dp(*, canaries: int, guesses: int, correct: int, delta: float, confidence: float = 0.95) -> float:
    """Epsilon at delta of the largest Gaussian trade-off curve that so many right guesses rule out.

    Guarantee:
        As for `one_run`, for algorithms whose trade-off curve is that of some Gaussian mechanism.
    """
    _require_levels(delta, confidence)
    mu = f_dp_mu(canaries=canaries, guesses=guesses, correct=correct, confidence=confidence)
    return gaussian_epsilon(mu, delta=delta)


def f_dp_mu(*, canaries: int, guesses: int, correct: int, confidence: float = 0.95) -> float:
    """The largest mu whose curve so many right guesses rule out."""
    _require_game(canaries, guesses, correct)
    beta = 1 - confidence
    return _largest(
        lambda mu: is_refuted(gaussian_curve(mu), canaries=canaries, guesses=guesses, correct=correct, beta=beta),
        most=_LARGEST_MU,
    )


def is_refuted(curve: Curve, *, canaries: int, guesses: int, correct: int, beta: float) -> bool:
    """Whether so many right guesses are less probable than beta under any algorithm with this trade-off curve.

    Args:
        curve: symmetric, and never above the true one.
    """
    right, wrong = beta * correct / canaries, beta * (guesses - correct) / canaries
    most = guesses / canaries
    for count in range(correct - 1, -1, -1):
        if right + wrong > most:
            return True
        at_least = max(wrong, curve(right))
        if at_least == wrong:  # from here on nothing moves
            return False
        right += count / (guesses - count) * (at_least - wrong)
        wrong = at_least
    return right + wrong > most


def f_dp_p_value(curve: Curve, *, canaries: int, guesses: int, correct: int) -> float:
    """How probable it is, at most, that so many guesses are right where this trade-off curve holds."""
    _require_game(canaries, guesses, correct)
    low, high = -700.0, 0.0  # logarithms
    if not is_refuted(curve, canaries=canaries, guesses=guesses, correct=correct, beta=1.0):
        return 1.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        refuted = is_refuted(curve, canaries=canaries, guesses=guesses, correct=correct, beta=math.exp(middle))
        low, high = (low, middle) if refuted else (middle, high)
    return math.exp(high)


def clopper_pearson(
    *, hits: int, with_canary: int, alarms: int, without: int, delta: float, confidence: float = 0.95
) -> float:
    """A lower bound on epsilon from independent trials of one test that was fixed before.

    Args:
        hits: how often the test said "in", of ``with_canary`` trials with the canary.
        alarms: how often it said so, of ``without`` trials without.

    Guarantee:
        If all trials were made with an (epsilon, delta)-private algorithm, the result exceeds epsilon with probability at
        most ``1 - confidence``.
    """
    false_alarms, misses = _error_rates(hits, with_canary, alarms, without, confidence)
    _require_levels(delta, confidence)
    return max(
        _log_ratio(1 - misses - delta, false_alarms),
        _log_ratio(1 - false_alarms - delta, misses),
        0.0,
    )


def gaussian_fit(
    *, hits: int, with_canary: int, alarms: int, without: int, delta: float, confidence: float = 0.95
) -> float:
    """`clopper_pearson` for algorithms whose trade-off curve is that of some Gaussian mechanism."""
    _require_levels(delta, confidence)
    mu = gaussian_fit_mu(hits=hits, with_canary=with_canary, alarms=alarms, without=without, confidence=confidence)
    return gaussian_epsilon(mu, delta=delta)


def gaussian_fit_mu(*, hits: int, with_canary: int, alarms: int, without: int, confidence: float = 0.95) -> float:
    """How many standard deviations apart the two laws are, at least."""
    false_alarms, misses = _error_rates(hits, with_canary, alarms, without, confidence)
    return max(0.0, -float(scipy.special.ndtri(false_alarms)) - float(scipy.special.ndtri(misses)))


def trials_p_value(curve: Curve, *, hits: int, with_canary: int, alarms: int, without: int) -> float:
    """How probable such counts are, at most, where each trial has this trade-off curve; nothing below 1e-12 is told apart.

    Guarantee:
        Under the claim, below any beta with probability at most beta: with less the two error rates exceed their upper bounds,
        and where they do not, a test with the larger rates would still be better than the curve allows.
    """

    def refuted(beta: float) -> bool:
        false_alarms, misses = _error_rates(hits, with_canary, alarms, without, 1 - beta)
        return curve(1 - misses) > false_alarms

    low, high = math.log(_LEAST_P_VALUE), math.log(0.999)
    if not refuted(math.exp(high)):
        return 1.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if refuted(math.exp(middle)) else (middle, high)
    return math.exp(high)


def _error_rates(hits: int, with_canary: int, alarms: int, without: int, confidence: float) -> tuple[float, float]:
    """Upper bounds on both error rates that hold together."""
    validate.positive_integer(with_canary=with_canary, without=without)
    _require_count(with_canary, hits=hits)
    _require_count(without, alarms=alarms)
    validate.open_fraction(confidence=confidence)
    each = (1 - confidence) / 2
    return _upper(alarms, without, each), _upper(with_canary - hits, with_canary, each)


def _upper(count: int, trials: int, beta: float) -> float:
    return 1.0 if count == trials else float(scipy.special.betaincinv(count + 1, trials - count, 1 - beta))


def _log_ratio(power: float, false_alarms: float) -> float:
    return math.log(power / false_alarms) if power > 0 else 0.0


def _largest(holds: Callable[[float], bool], *, most: float) -> float:
    """The largest value, nearly, from below, at which this holds; 0 if it holds nowhere."""
    if not holds(0.0):
        return 0.0
    low, high = 0.0, most
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def _require_game(canaries: int, guesses: int, correct: int) -> None:
    validate.positive_integer(canaries=canaries)
    _require_count(canaries, guesses=guesses)
    _require_count(guesses, correct=correct)


def _require_count(most: int, **values: int) -> None:
    for name, value in values.items():
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= most:
            raise InputError(f"{name}={value!r} is not allowed: it must be an integer from 0 to {most}.")


def _require_levels(delta: float, confidence: float) -> None:
    if delta != 0:
        validate.open_fraction(delta=delta)
    validate.open_fraction(confidence=confidence)


__all__ = [
    "clopper_pearson",
    "f_dp",
    "f_dp_mu",
    "f_dp_p_value",
    "gaussian_fit",
    "gaussian_fit_mu",
    "is_refuted",
    "one_run",
    "one_run_p_value",
    "trials_p_value",
]
