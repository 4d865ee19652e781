"""The best recipes that are known for the paper's data sets: linear models on features that cost no privacy.

A number of a recipe is a smooth function of epsilon: given at a few values, and between them a power of epsilon. All were
chosen on held-out training records (docs/results.md tells how), never on test records.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

EPSILONS = (0.5, 1.0, 2.0, 3.0, 8.0)
"""Where recipes give their numbers; below and beyond, the nearest one holds."""

Curve = float | tuple[float, float, float, float, float]
"""One number for every epsilon, or one for each of ``EPSILONS``."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How a linear model is trained on rows of norm 1.

    Attributes:
        features: from each of these epsilons on, the features that the model sees.
        model: which model.
        batch_size: the expected size of a batch; 0 for all records each time.
        gated_batch_size: the same for methods with a gate: where every batch is the whole data set, none can be selected.
        releases: how many updates.
        clip: the maximum norm of a record's gradient.
        lr: the learning rate, for gradients that are divided by the expected batch size.
        momentum: of gradient descent.
        mean_noise: noise multiplier of the release of the mean; None for no such release.
        shrinkage: how many standard deviations of their noise published weights are shrunk by; None for not at all.
    """

    features: Mapping[float, str]
    model: str = "softmax"
    batch_size: int
    gated_batch_size: int | None = None
    releases: Curve
    clip: Curve
    lr: Curve
    momentum: float = 0.9
    mean_noise: Curve | None = None
    shrinkage: Curve | None = None

    def settings(self, epsilon: float, *, gated: bool) -> dict[str, Any]:
        """The settings at this epsilon.

        A gate wants the scaling of its paper: `C / max(norm, S)` with C = 1 is clipping at S but for a factor 1 / S, which
        the learning rate takes back. Its metric counts gradients up to the longest that a row of norm 1 can have.
        """
        clip, lr = at(self.clip, epsilon), at(self.lr, epsilon)
        settings: dict[str, Any] = {
            "features": self.features[max(each for each in self.features if each <= max(epsilon, min(self.features)))],
            "model": self.model,
            "batch_size": self.batch_size,
            "releases": round(at(self.releases, epsilon)),
            "momentum": self.momentum,
        }
        if self.mean_noise is not None:
            settings["mean_noise"] = at(self.mean_noise, epsilon)
        if self.shrinkage is not None:
            settings["shrinkage"] = at(self.shrinkage, epsilon)
        if not gated:
            return settings | {"scaling": "clip", "max_grad_norm": clip, "lr": lr}
        if self.gated_batch_size is not None:
            settings["batch_size"] = self.gated_batch_size
        return settings | {"scaling": "global", "scaling_bound": clip, "lr": lr * clip, "large_norm": math.sqrt(2.0)}


def at(curve: Curve, epsilon: float) -> float:
    """The value at an epsilon: between two given ones the logarithm is linear in that of epsilon; three digits are kept."""
    if not isinstance(curve, tuple):
        return float(curve)
    if epsilon <= EPSILONS[0]:
        return curve[0]
    for left, right, low, high in zip(EPSILONS, EPSILONS[1:], curve, curve[1:], strict=False):
        if epsilon <= right:
            share = math.log(epsilon / left) / math.log(right / left)
            return float(f"{math.exp((1 - share) * math.log(low) + share * math.log(high)):.3g}")
    return curve[-1]


_STROKES = "stroke-net:deskew", "stroke-net:deskew,views"
_MORE_STROKES = "classes=2000,training_steps=2500,seed=1"

RECIPES: dict[str, Recipe] = {
    "mnist": Recipe(
        features={0.0: " + ".join([*_STROKES, *(f"{each},{_MORE_STROKES}" for each in _STROKES)])},
        batch_size=8192,
        releases=400,
        clip=(0.1, 0.1, 0.1, 0.1, 0.2),
        lr=(40, 60, 80, 80, 100),
    ),
    "fashion-mnist": Recipe(
        features={0.0: "silhouette-net:layer=map + 2*patches:ridge=0.0003"},
        batch_size=4096,
        releases=150,
        clip=(0.2, 0.2, 0.2, 0.3, 0.3),
        lr=(40, 60, 80, 80, 100),
        mean_noise=26.4,
    ),
    "cifar-10": Recipe(
        features={0.0: "patches", 1.5: "patches:ridge=0.0003"},
        batch_size=0,
        gated_batch_size=25_000,
        releases=(40, 40, 60, 60, 60),
        clip=(0.35, 0.35, 0.35, 0.35, 0.5),
        lr=(60, 120, 180, 220, 220),
        mean_noise=30.0,
    ),
    "imdb": Recipe(
        features={0.0: "weighted-words:pairs=0.4", 1.5: "weighted-words:vocabulary=8000,pairs=0.4"},
        model="weighted-words",
        batch_size=0,
        gated_batch_size=12_500,
        releases=(40, 40, 40, 40, 60),
        clip=0.707,
        lr=(20, 45, 110, 140, 110),
        momentum=0.0,
        shrinkage=0.8,
    ),
}


_GAUSSIAN_MU = (0.140, 0.268, 0.502, 0.719, 1.666)
"""What a Gaussian mechanism with epsilon at delta 1e-5 has for the distance of its outputs in standard deviations."""

_OWN_RELEASES, _OWN_CLIP, _OWN_LOGIT_NOISE = 60, 0.3, 0.7


def recipe_for_rows(features: str, *, records: int) -> Recipe:
    """A recipe for data that none was searched for: rows of norm 1 made by these features, and this many records.

    The noise in a score is about lr T C / ((1 - momentum) mu N) whatever the width of the rows, so the learning rate is chosen to
    make it the same for any number of records and any epsilon, as far as steps do not become too long for so few.
    """
    first, second, third, fourth, fifth = (
        min(60.0, _OWN_LOGIT_NOISE * 0.1 * mu * records / (_OWN_RELEASES * _OWN_CLIP)) for mu in _GAUSSIAN_MU
    )
    return Recipe(
        features={0.0: features},
        batch_size=0,
        gated_batch_size=max(1, records // 4),
        releases=_OWN_RELEASES,
        clip=_OWN_CLIP,
        lr=(first, second, third, fourth, fifth),
    )


__all__ = ["EPSILONS", "RECIPES", "Recipe", "at", "recipe_for_rows"]
