"""DPSGD: every attempt is released.

Source: Abadi et al., "Deep Learning with Differential Privacy", CCS 2016.

Algorithm: a Poisson batch; each record's gradient clipped to length C; the sum with Gaussian noise of standard deviation
sigma C, divided by the expected batch size; a step of the optimizer.

Accounting: sound. Each release is the Poisson-sampled Gaussian mechanism, composed by PLD or RDP (docs/accounting.md,
section 3). The settings are those of the DPSR-CG paper's table: nets on plain records, with ReLU. Small data sets and the
user's own get a net with one hidden layer.
"""

from __future__ import annotations

from sluice.mechanism.selective_release import SelectiveRelease
from sluice.methods.base import Method
from sluice.methods.reference import pixel_settings
from sluice.methods.selective import selective_mechanism

RELEASES = {
    "mnist": (678, 1207, 1931),
    "fashion-mnist": (785, 716, 1520),
    "cifar-10": (270, 641, 517),
    "imdb": (104, 311, 296),
}
"""Releases at epsilon 1, 2, 3."""

METHOD = Method(
    name="dpsgd",
    summary="clipped gradients with noise: every attempt is released",
    proves="epsilon (PLD, RDP)",
    mechanism=SelectiveRelease,
    plan=selective_mechanism,
    defaults=lambda dataset, epsilon: pixel_settings(dataset, epsilon, activation="relu", releases=RELEASES),
    best=lambda recipe, epsilon: recipe.settings(epsilon, gated=False),
)
