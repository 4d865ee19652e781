"""DPSR-CG as its paper prints it: with the un-noised metric of the last release as the reference.

Source: the DPSR-CG paper, Algorithms 1 and 2, with its noise, batch sizes and learning rates.

Algorithm: that of ``dpsr-cg``, except that the reference is hidden and not noised. Where the printed algorithm does not
say what to do (a vector assigned to a number, an undefined first reference, optimizer state after a rejection) the
reading is the one under which its privacy claim makes sense: the metric counts C for large gradients, and a rejected
attempt leaves no trace.

Accounting: claimed only. The hidden reference is a function of the records that no noise protects and that steers later
releases; no proof covers it, and no epsilon is printed. The paper's own figure is shown as "claimed (paper)". The epsilon
setting picks the row of the paper's noise and releases.
"""

from __future__ import annotations

from typing import Any

from sluice.mechanism.selective_release import SelectiveRelease
from sluice.methods.base import Method
from sluice.methods.reference import nearest
from sluice.methods.selective import selective_mechanism

_ROWS: dict[str, dict[str, Any]] = {
    "mnist": {"lr": 0.1, "scaling_bound": 8.0},
    "fashion-mnist": {"lr": 0.1, "scaling_bound": 6.0},
    "cifar-10": {"lr": 0.1, "scaling_bound": 3.0},
    "imdb": {"lr": 0.02, "scaling_bound": 1.0, "optimizer": "adam", "features": "plain", "model": "bilstm"},
}
_NOISE = {
    "mnist": (2.5, 1.5, 1.35),
    "fashion-mnist": (4.0, 3.0, 2.15),
    "cifar-10": (5.67, 3.5, 3.5),
    "imdb": (2.5, 1.8, 1.35),
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


def defaults(dataset: str, epsilon: float) -> dict[str, Any]:
    """The paper's row for this data set and the nearest of epsilon 1, 2, 3."""
    if dataset not in _ROWS:
        return {"lr": 0.3, "releases": 200, "batch_size": 256, "noise_multiplier": 4.0, "hidden_reference": True}
    return {
        "features": "scattering",
        "model": "scattering-cnn",
        "activation": "tanh",
        **_ROWS[dataset],
        "batch_size": nearest(epsilon, _BATCH[dataset]),
        "releases": nearest(epsilon, _RELEASES[dataset]),
        "noise_multiplier": nearest(epsilon, _NOISE[dataset]),
        "hidden_reference": True,
    }


METHOD = Method(
    name="dpsr-cg-paper",
    summary="selective release as its paper prints it, with a hidden reference",
    proves="nothing: claimed (paper) only",
    mechanism=SelectiveRelease,
    plan=selective_mechanism,
    defaults=defaults,
    gate="clipping-bias",
    target=lambda settings: None,
)
