"""Attack nets: they find an overfitted model, find nothing where there is nothing, and see the true gradient."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from sluice._base.errors import InputError
from sluice.attacks.evaluation import evaluate
from sluice.attacks.shadow import fit_shadow, shadow_features
from sluice.attacks.white_box import fit_white_box, last_layer_gradients, last_linear, white_box_features

CLASSES = 4


def logits_of_a_model(generator, members, *, sureness):
    """Sure of members and right on them; unsure of others, and right on three of four."""
    labels = generator.integers(0, CLASSES, len(members))
    right = members | (generator.random(len(members)) < 0.75)
    shown = np.where(right, labels, (labels + 1) % CLASSES)
    margin = np.where(members, sureness, 1.0)[:, None]
    return np.eye(CLASSES)[shown] * margin + 0.3 * generator.normal(size=(len(members), CLASSES)), labels


def test_shadow_attack_finds_an_overfitted_model():
    generator = np.random.default_rng(0)
    members = generator.random(1200) < 0.5
    shadow, target = (logits_of_a_model(generator, members, sureness=3.0) for _ in range(2))
    fitted = fit_shadow(*shadow, members, seed=0, epochs=5)
    found = evaluate(fitted.scores(shadow_features(*target)), members, threshold=0.0)
    assert found.balanced_accuracy > 0.9
    again = fit_shadow(*shadow, members, seed=0, epochs=5)
    np.testing.assert_array_equal(again.scores(shadow_features(*target)), fitted.scores(shadow_features(*target)))


def test_shadow_attack_on_random_labels_is_guessing():
    generator = np.random.default_rng(1)
    logits, labels = logits_of_a_model(generator, np.ones(4000, dtype=bool), sureness=2.0)
    random = generator.random(4000) < 0.5
    fitted = fit_shadow(logits[:2000], labels[:2000], random[:2000], seed=0, epochs=5)
    found = evaluate(fitted.scores(shadow_features(logits[2000:], labels[2000:])), random[2000:], threshold=0.0)
    assert found.balanced_accuracy == pytest.approx(0.5, abs=0.04)  # 3.6 standard errors
    assert found.auc == pytest.approx(0.5, abs=0.05)


def test_closed_form_gradient_is_that_of_autograd():
    torch.manual_seed(0)
    layer, hidden, labels = nn.Linear(6, CLASSES), torch.randn(9, 6), torch.randint(0, CLASSES, (9,))
    features = white_box_features(layer(hidden).detach().numpy(), labels.numpy(), hidden.numpy())
    found = last_layer_gradients(features.error, features.hidden)
    for row in range(9):
        (expected,) = torch.autograd.grad(
            F.cross_entropy(layer(hidden[row : row + 1]), labels[row : row + 1]), layer.weight
        )
        torch.testing.assert_close(found[row], expected, atol=1e-6, rtol=1e-5)


def test_white_box_attack_finds_an_overfitted_model():
    generator = np.random.default_rng(2)
    members = generator.random(1200) < 0.5
    logits, labels = logits_of_a_model(generator, members, sureness=3.0)
    hidden = generator.normal(size=(1200, 5))
    known, attacked = slice(0, 800), slice(800, None)
    fitted = fit_white_box(
        white_box_features(logits[known], labels[known], hidden[known]), members[known], seed=0, epochs=5
    )
    scores = fitted.scores(white_box_features(logits[attacked], labels[attacked], hidden[attacked]).blocks)
    assert evaluate(scores, members[attacked], threshold=0.0).balanced_accuracy > 0.85
    alone = fitted.scores(white_box_features(logits[800:801], labels[800:801], hidden[800:801]).blocks)
    assert alone == pytest.approx(scores[:1], abs=1e-4)  # a score does not depend on the records beside it


def test_last_linear_layer_or_a_clear_refusal():
    net = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 2))
    assert last_linear(net) is net[2]
    with pytest.raises(InputError, match="no linear layer"):
        last_linear(nn.Sequential(nn.Tanh()))


def test_attack_nets_need_members_and_non_members():
    with pytest.raises(InputError, match="members and"):
        fit_shadow(np.zeros((40, 3)), np.zeros(40, dtype=int), np.ones(40, dtype=bool), seed=0)
