"""RMIA (Zarifzadeh et al. 2024): is a record likelier under the target, against the average, than records of the population?"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from sluice._base import validate
from sluice._base.errors import InputError
from sluice.attacks.evaluation import evaluate
from sluice.attacks.lira import VARIANTS
from sluice.attacks.references import References
from sluice.attacks.scores import Scores, require_scores

PUBLISHED_SLOPE = 0.3
"""The authors' a for CIFAR-10, for so few shadow models that none can be attacked by the others."""

MODELS_TO_CHOOSE_SLOPE = 4

_OFFLINE_SLOPES = tuple(number / 10 for number in range(11))


def rmia_scores(
    references: References,
    *,
    variant: str = "offline",
    gamma: float = 2.0,
    offline_slope: float | None = None,
    population: ArrayLike | None = None,
) -> Scores:
    """The share of the population that a record beats by a factor gamma; records that beat equally many go by their own ratio.

    Without that second criterion, scores saturate at 1 for the surest records, and the rate of true positives at few false ones
    becomes 0.

    Args:
        references: probabilities of the label (`sluice.attacks.scores.probabilities_of_label`).
        variant: "online" takes the average over models with and without the record; "offline" estimates it from those without, as
            ``((1 + a) p_out + 1 - a) / 2``.
        offline_slope: that a; if not given, the one of 0, 0.1, ..., 1 with which one shadow model is attacked best by the others.
        population: ratios (`likelihood_ratios`) of records that stand for the population; by default those attacked.
    """
    validate.positive(gamma=gamma)
    ratios = likelihood_ratios(references, variant=variant, offline_slope=offline_slope)
    drawn = np.sort(ratios if population is None else require_scores(population=population)["population"])
    if drawn.ndim != 1 or drawn.size == 0:
        raise InputError("population is not allowed: it must hold at least one ratio, in a row.")
    beaten = np.searchsorted(drawn, ratios / gamma, side="right") / len(drawn)
    return beaten + ratios / (1.0 + ratios) / (2 * len(drawn))


def likelihood_ratios(
    references: References, *, variant: str = "offline", offline_slope: float | None = None
) -> Scores:
    """Each record's probability under the target, divided by that under an average model."""
    validate.one_of(VARIANTS, variant=variant)
    if references.target.min() < 0 or references.shadows.min() < 0 or references.shadows.max() > 1:
        raise InputError("references are not allowed: RMIA compares probabilities, from 0 to 1.")
    p_out = references.means("OUT")
    if variant == "online":
        references.require("IN", 1)
        average = (p_out + references.means("IN")) / 2
    else:
        slope = chosen_offline_slope(references) if offline_slope is None else offline_slope
        if not 0 <= slope <= 1:
            raise InputError(f"offline_slope={slope} is not allowed: it must be from 0 to 1.")
        average = ((1 + slope) * p_out + 1 - slope) / 2
    ratios: Scores = references.target / np.maximum(average, np.finfo(np.float64).tiny)
    return ratios


def chosen_offline_slope(references: References) -> float:
    """The a with which the first shadow model is attacked best by the others: the target's own members play no role."""
    if references.models < 2 or references.inside[1:].all(axis=0).any():
        raise InputError(
            f"offline_slope has to be given for {references.models} shadow models: they are too few to attack one of them "
            "by the others."
        )
    inside, others = references.inside[0], references.without_shadow(0)
    if inside.all() or not inside.any():
        raise InputError("offline_slope has to be given: the first shadow model has no members, or no non-members.")

    def auc(slope: float) -> float:
        ratios = likelihood_ratios(others, offline_slope=slope)
        return evaluate(ratios, inside).auc

    return max(_OFFLINE_SLOPES, key=auc)
