"""How well scores tell members from non-members: no attack is judged by anything else."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import scipy
from numpy.typing import ArrayLike, NDArray

from sluice._base import validate
from sluice._base.errors import InputError
from sluice.attacks.scores import Scores, require_scores

RATES = (0.001, 0.01)


@dataclass(frozen=True, kw_only=True, eq=False)
class RocCurve:
    """False and true positives at every threshold: records with equal scores pass it together.

    Attributes:
        false_positives: counts, from none to all non-members; ``true_positives`` belong to them.
    """

    false_positives: NDArray[np.int64]
    true_positives: NDArray[np.int64]

    @property
    def members(self) -> int:
        return int(self.true_positives[-1])

    @property
    def non_members(self) -> int:
        return int(self.false_positives[-1])

    @property
    def false_positive_rates(self) -> Scores:
        return self.false_positives / self.non_members

    @property
    def true_positive_rates(self) -> Scores:
        return self.true_positives / self.members


@dataclass(frozen=True, kw_only=True)
class RateAt:
    """The true positive rate at the largest attained false positive rate that is no larger than the one asked for.

    Attributes:
        low, high: Clopper-Pearson interval of the true positive rate, at 95 %. The threshold counts as given: that it was read off
            the non-members is not in it.
    """

    asked: float
    attained: float
    rate: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class AttackEvaluation:
    """What an attack achieves.

    Attributes:
        best_balanced_accuracy: at the best of all thresholds, chosen with hindsight: an upper bound on what an attacker gets.
        balanced_accuracy: at the attack's own threshold, fixed before; None for attacks that only rank.
        rates: at 0.1 % and 1 % false positives, less those that there are too few non-members for.
    """

    members: int
    non_members: int
    auc: float
    best_balanced_accuracy: float
    balanced_accuracy: float | None
    rates: tuple[RateAt, ...]


def evaluate(scores: ArrayLike, members: ArrayLike, *, threshold: float | None = None) -> AttackEvaluation:
    """Judge scores, of which higher ones mean members.

    Args:
        threshold: what lies strictly above is called a member; None for attacks that only rank.
    """
    curve = roc_curve(scores, members)
    own = None
    if threshold is not None:
        values, inside = np.asarray(scores, dtype=np.float64), np.asarray(members)
        own = float(((values[inside] > threshold).mean() + (values[~inside] <= threshold).mean()) / 2)
    gaps = curve.true_positive_rates - curve.false_positive_rates
    return AttackEvaluation(
        members=curve.members,
        non_members=curve.non_members,
        auc=float(np.trapezoid(curve.true_positive_rates, curve.false_positive_rates)),
        best_balanced_accuracy=float(0.5 + gaps.max() / 2),
        balanced_accuracy=own,
        rates=tuple(true_positive_rate(curve, at=rate) for rate in RATES if curve.non_members * rate >= 1),
    )


def roc_curve(scores: ArrayLike, members: ArrayLike) -> RocCurve:
    """Count positives from the highest score down."""
    values, inside = require_scores(scores=scores)["scores"], np.asarray(members)
    if values.ndim != 1 or inside.dtype != np.bool_ or inside.shape != values.shape:
        raise InputError(
            f"scores {values.shape} and members {inside.shape} are not allowed: give one number and one True or False for "
            "each record."
        )
    if not inside.any() or inside.all():
        raise InputError("members are not allowed: there must be members and non-members.")
    order = np.argsort(-values, kind="stable")
    last_of_equal = np.append(np.flatnonzero(np.diff(values[order])), len(values) - 1)
    positives = np.cumsum(inside[order])[last_of_equal]
    counted = last_of_equal + 1
    return RocCurve(
        false_positives=np.append(0, counted - positives).astype(np.int64),
        true_positives=np.append(0, positives).astype(np.int64),
    )


def true_positive_rate(curve: RocCurve, *, at: float, confidence: float = 0.95) -> RateAt:
    """The true positive rate at a small false positive rate."""
    validate.open_fraction(at=at)
    if curve.non_members * at < 1:
        raise InputError(
            f"at={at} is not allowed for {curve.non_members} non-members: a rate so small can only be measured with at least "
            f"{math.ceil(1 / at)}."
        )
    place = int(np.flatnonzero(curve.false_positives <= at * curve.non_members * (1 + 1e-12))[-1])
    hits = int(curve.true_positives[place])
    low, high = clopper_pearson(hits, curve.members, confidence=confidence)
    return RateAt(
        asked=at,
        attained=float(curve.false_positive_rates[place]),
        rate=float(curve.true_positive_rates[place]),
        low=low,
        high=high,
    )


def clopper_pearson(hits: int, trials: int, *, confidence: float = 0.95) -> tuple[float, float]:
    """An interval that holds the probability of a hit with at least this confidence, whatever it is."""
    validate.open_fraction(confidence=confidence)
    validate.positive_integer(trials=trials)
    if not 0 <= hits <= trials:
        raise InputError(f"hits={hits} is not allowed: it must be from 0 to trials={trials}.")
    tail = (1 - confidence) / 2
    low = float(scipy.special.betaincinv(hits, trials - hits + 1, tail)) if hits else 0.0
    high = float(scipy.special.betaincinv(hits + 1, trials - hits, 1 - tail)) if hits < trials else 1.0
    return low, high


def largest_true_positive_rate(false_positive_rates: ArrayLike, *, epsilon: float, delta: float) -> Scores:
    """What (epsilon, delta) allows at most: TPR <= e^epsilon FPR + delta, and the same for the complements."""
    rates = np.asarray(false_positive_rates, dtype=np.float64)
    limit: Scores = np.minimum(math.exp(epsilon) * rates + delta, 1 - math.exp(-epsilon) * (1 - delta - rates))
    return np.clip(limit, 0.0, 1.0)
