"""LiRA (Carlini et al. 2022): is what the target says of a record typical of models that were trained on it?"""

from __future__ import annotations

import numpy as np

from sluice._base import validate
from sluice.attacks.references import References
from sluice.attacks.scores import Scores

VARIANTS = ("online", "offline")
VARIANCES = ("auto", "pooled", "per-record")
MODELS_FOR_PER_RECORD = 64

_SMALLEST_DEVIATION = 1e-6


def lira_scores(references: References, *, variant: str = "online", variance: str = "auto") -> Scores:
    """The log likelihood ratio of membership for each record, under normal distributions fitted to shadow models.

    For several queries of a record, take the mean of the scores that each query gives.

    Args:
        references: log odds (`sluice.attacks.scores.log_odds`) by target and shadow models.
        variant: "online" compares models with and without the record. "offline" needs only those without: the score is how many
            standard deviations the target lies above them, which orders records as the tail probability does and never
            saturates; a target that is unusually *unsure* counts as a non-member.
        variance: "per-record"; "pooled", one for all records, IN and OUT apart, from residuals around each record's own mean; or
            "auto": pooled below 64 shadow models, where so few tell little about the spread of one record.
    """
    validate.one_of(VARIANTS, variant=variant)
    validate.one_of(VARIANCES, variance=variance)
    if variance == "auto":
        variance = "pooled" if references.models < MODELS_FOR_PER_RECORD else "per-record"
    mean_out, deviation_out = _normal(references, "OUT", variance)
    if variant == "offline":
        return (references.target - mean_out) / deviation_out
    mean_in, deviation_in = _normal(references, "IN", variance)
    inside = _log_density(references.target, mean_in, deviation_in)
    return inside - _log_density(references.target, mean_out, deviation_out)


def _normal(references: References, side: str, variance: str) -> tuple[Scores, Scores]:
    references.require(side, 2 if variance == "per-record" else 1)
    squares, freedom = references.squared_residuals(side)
    if variance == "pooled":
        squares, freedom = squares.sum(keepdims=True), np.maximum(freedom.sum(keepdims=True), 1)
    return references.means(side), np.maximum(np.sqrt(squares / freedom), _SMALLEST_DEVIATION)


def _log_density(values: Scores, mean: Scores, deviation: Scores) -> Scores:
    density: Scores = -0.5 * ((values - mean) / deviation) ** 2 - np.log(deviation)
    return density
