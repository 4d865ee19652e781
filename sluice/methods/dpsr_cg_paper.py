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
from sluice.methods.dpsr_cg import paper_settings
from sluice.methods.reference import nearest
from sluice.methods.selective import selective_mechanism

_NOISE = {
    "mnist": (2.5, 1.5, 1.35),
    "fashion-mnist": (4.0, 3.0, 2.15),
    "cifar-10": (5.67, 3.5, 3.5),
    "imdb": (2.5, 1.8, 1.35),
}

_SMALL = {"lr": 0.3, "releases": 200, "batch_size": 256, "noise_multiplier": 4.0}


def defaults(dataset: str, epsilon: float) -> dict[str, Any]:
    """The paper's row for this data set and the nearest of epsilon 1, 2, 3."""
    settings = paper_settings(dataset, epsilon)
    if settings is None:
        return {**_SMALL, "hidden_reference": True}
    return {**settings, "noise_multiplier": nearest(epsilon, _NOISE[dataset]), "hidden_reference": True}


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
