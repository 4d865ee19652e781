"""Attacks that need no other model: the loss of a record, and the gap attack as a control."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from sluice.attacks.scores import Scores, is_right, losses


def loss_scores(logits: ArrayLike, labels: ArrayLike) -> Scores:
    """The smaller the loss, the likelier a member (Yeom et al. 2018)."""
    return -losses(logits, labels)


def gap_scores(logits: ArrayLike, labels: ArrayLike) -> Scores:
    """Member if the model is right. Its accuracy is exactly 1/2 + (train accuracy - test accuracy) / 2.

    What is above 0 says member. An attack that does no better has found the generalisation gap and nothing else.
    """
    return np.where(is_right(logits, labels), 1.0, -1.0)
