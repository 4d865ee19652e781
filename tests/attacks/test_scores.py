"""What logits say of a record."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from sluice._base.errors import InputError
from sluice.attacks.scores import is_right, log_odds, losses, probabilities_of_label
from sluice.attacks.thresholds import gap_scores, loss_scores


def test_agree_with_torch():
    generator = np.random.default_rng(0)
    logits, labels = generator.normal(size=(50, 7)) * 3, generator.integers(0, 7, 50)
    expected = F.cross_entropy(torch.tensor(logits), torch.tensor(labels), reduction="none").numpy()
    p = np.exp(-expected)
    np.testing.assert_allclose(losses(logits, labels), expected)
    np.testing.assert_allclose(log_odds(logits, labels), np.log(p / (1 - p)))
    np.testing.assert_allclose(probabilities_of_label(logits, labels), p)
    np.testing.assert_allclose(log_odds(np.stack([logits, 2 * logits]), labels)[0], log_odds(logits, labels))
    assert is_right(logits, labels).sum() == (logits.argmax(1) == labels).sum()


def test_log_odds_stay_exact_where_probabilities_round_to_one():
    logits = np.array([[100.0, 0.0], [200.0, 0.0], [-300.0, 500.0]], dtype=np.float32)
    assert log_odds(logits, [0, 0, 0]).tolist() == [100.0, 200.0, -800.0]
    assert losses(logits, [0, 0, 0])[2] == 800.0


def test_gap_attack_has_the_accuracy_of_the_gap():
    logits, labels = np.eye(4)[[0, 1, 2, 0]], np.array([0, 1, 0, 0])
    assert gap_scores(logits, labels).tolist() == [1.0, 1.0, -1.0, 1.0]
    assert loss_scores(logits, labels).argmin() == 2


@pytest.mark.parametrize(
    ("logits", "labels"),
    [([[0.0, np.nan]], [0]), ([[0.0, 1.0]], [2]), ([[0.0, 1.0]], [0, 1]), ([[0.0]], [0]), ([[0.0, 1.0]], [0.5])],
)
def test_refuses_bad_input(logits, labels):
    with pytest.raises(InputError, match="not allowed"):
        log_odds(logits, labels)
