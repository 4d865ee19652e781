"""What a model's logits say of a record and its label, as numbers that attacks compare."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from sluice._base import validate
from sluice._base.errors import InputError

Scores = NDArray[np.float64]


def log_odds(logits: ArrayLike, labels: ArrayLike) -> Scores:
    """phi = log(p / (1 - p)) of the label's probability p, as z_y - logsumexp of the others: exact, however sure the model is.

    Args:
        logits: ``(records, classes)``; more axes may stand in front, such as one for models.
        labels: ``(records,)``.
    """
    values, index = _checked(logits, labels)
    own = np.take_along_axis(values, index, axis=-1)[..., 0]
    others = values.copy()
    np.put_along_axis(others, index, -np.inf, axis=-1)
    return own - _log_sum_exp(others)


def losses(logits: ArrayLike, labels: ArrayLike) -> Scores:
    """The cross entropy of each record."""
    return np.logaddexp(0.0, -log_odds(logits, labels))


def probabilities_of_label(logits: ArrayLike, labels: ArrayLike, *, temperature: float = 1.0) -> Scores:
    """The probability that the model gives the label of each record."""
    validate.positive(temperature=temperature)
    return np.exp(-losses(np.asarray(logits, dtype=np.float64) / temperature, labels))


def is_right(logits: ArrayLike, labels: ArrayLike) -> NDArray[np.bool_]:
    """Whether the label is the class with the largest logit, the first of equal ones."""
    values, index = _checked(logits, labels)
    right: NDArray[np.bool_] = values.argmax(axis=-1) == index[..., 0]
    return right


def require_scores(**given: Any) -> dict[str, Scores]:
    """Scores as float64; NaN and infinity are refused, since no threshold orders them."""
    found = {}
    for name, value in given.items():
        array = np.asarray(value, dtype=np.float64)
        if not np.isfinite(array).all():
            raise InputError(f"{name} is not allowed: it holds NaN or infinity, which cannot be compared.")
        found[name] = array
    return found


def _checked(logits: ArrayLike, labels: ArrayLike) -> tuple[Scores, NDArray[np.int64]]:
    values = require_scores(logits=logits)["logits"]
    given = np.asarray(labels)
    if values.ndim < 2 or values.shape[-1] < 2 or given.shape != values.shape[-2:-1]:
        raise InputError(
            f"logits {values.shape} and labels {given.shape} are not allowed: they must be (..., records, classes), with two "
            "classes at least, and (records,)."
        )
    if not np.issubdtype(given.dtype, np.integer) or (
        given.size and not 0 <= given.min() <= given.max() < values.shape[-1]
    ):
        raise InputError(f"labels are not allowed: they must be integers from 0 to {values.shape[-1] - 1}.")
    return values, np.broadcast_to(given.astype(np.int64)[..., None], (*values.shape[:-1], 1))


def _log_sum_exp(values: Scores) -> Scores:
    largest = values.max(axis=-1, keepdims=True)
    total: Scores = np.log(np.exp(values - largest).sum(axis=-1)) + largest[..., 0]
    return total
