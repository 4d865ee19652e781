"""DPSR-CG: selective release by the clipping bias of a batch, with a public reference.

Source: the DPSR-CG paper, with the repairs that its privacy needs (docs/accounting.md, section 4).

Algorithm: a Poisson batch; its metric, which counts large gradients; it is compared, with noise, with a public reference,
and the attempt is released or forgotten. A release is the scaled sum of gradients with noise, and the metric with noise,
from which the next reference is made. A forgotten attempt leaves no trace.

Accounting: sound, by PLD or RDP with the bound of docs/accounting.md, section 3, which covers the selection.

Other gates: ``--gate thinning`` leaves records out one by one, each by a coin of its own, the more often the larger their
gradients are (``--strength``), at the cost of plain DP-SGD (section 13 there); ``--tempering`` weights records by the same
factors; ``--gate coin`` accepts at random, as a control.
"""

from __future__ import annotations

from typing import Any

from sluice.mechanism.selective_release import SelectiveRelease
from sluice.methods.base import Method
from sluice.methods.reference import nearest
from sluice.methods.selective import selective_mechanism

_NETS: dict[str, dict[str, Any]] = {
    "mnist": {"lr": 0.1, "scaling_bound": 8.0},
    "fashion-mnist": {"lr": 0.1, "scaling_bound": 6.0},
    "cifar-10": {"lr": 0.1, "scaling_bound": 3.0},
    "imdb": {"lr": 0.02, "scaling_bound": 1.0, "optimizer": "adam", "features": "plain", "model": "bilstm"},
}
_BATCH = {
    "mnist": (916, 820, 791),
    "fashion-mnist": (1925, 1876, 1789),
    "cifar-10": (1965, 1905, 1905),
    "imdb": (916, 862, 791),
}
_RELEASES = {
    "mnist": (563, 1034, 1796),
    "fashion-mnist": (786, 1530, 1521),
    "cifar-10": (553, 1262, 2869),
    "imdb": (187, 312, 296),
}

# Chosen on held-out training records of digits (docs/results.md), never on test records.
_SMALL: dict[str, Any] = {"lr": 0.3, "scaling_bound": 1.0, "releases": 200, "batch_size": 256, "ema_decay": 0.9}


def paper_settings(dataset: str, epsilon: float) -> dict[str, Any] | None:
    """The nets and the settings of the paper at the nearest of epsilon 1, 2, 3, but for noise; None for other data sets."""
    if dataset not in _NETS:
        return None
    return {
        "features": "scattering",
        "model": "scattering-cnn",
        "activation": "tanh",
        **_NETS[dataset],
        "batch_size": nearest(epsilon, _BATCH[dataset]),
        "releases": nearest(epsilon, _RELEASES[dataset]),
    }


METHOD = Method(
    name="dpsr-cg",
    summary="selective release by clipping bias, with a public reference",
    proves="epsilon (PLD, RDP), selection included",
    mechanism=SelectiveRelease,
    plan=selective_mechanism,
    defaults=lambda dataset, epsilon: paper_settings(dataset, epsilon) or _SMALL,
    best=lambda recipe, epsilon: recipe.settings(epsilon, gated=True),
    gate="clipping-bias",
)
