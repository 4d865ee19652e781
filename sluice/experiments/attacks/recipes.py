"""What the models of an attack are trained with: nets on pixels, without augmentation, as in the paper's tables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from sluice._base import validate
from sluice.experiments.settings import TrainSettings, settings_from

ORDINARY = "non-private"
SHADOW_METHODS = ("same", "ordinary")
_PIXELS = ("mnist", "fashion-mnist", "cifar-10")
_SHADOW_SEEDS = 1000

#: As the paper's attacks train shadow models, for long: attacks live on the gap between the accuracies on members and on others.
_ORDINARY_NET: Mapping[str, Any] = {
    "optimizer": "sgd",
    "lr": 0.01,
    "momentum": 0.9,
    "weight_decay": 5e-4,
    "lr_schedule": "step",
    "batch_size": 128,
    "releases": 100,
}


def target_settings(
    dataset: str, *, method: str, epsilon: float | None, seed: int, changes: Mapping[str, Any] | None = None
) -> TrainSettings:
    """The settings of a target: the method's published ones for a net on pixels, or ordinary training.

    Args:
        epsilon: None for methods that none shapes.
        changes: settings that differ.
    """
    chosen: dict[str, Any] = {"dataset": dataset, "method": method, "seed": seed, "evaluate_every": 0}
    if epsilon is not None and method != ORDINARY:
        chosen["epsilon"] = epsilon
    if dataset in _PIXELS:
        chosen["model"] = "pixel-cnn"
    elif dataset == "digits":
        chosen["model"] = "mlp"
    if method == ORDINARY and dataset in _PIXELS:
        chosen |= _ORDINARY_NET
    chosen |= changes or {}
    if dataset in _PIXELS and chosen["model"] != "scattering-cnn":
        chosen.setdefault("features", "plain")  # published defaults would put another net on scattering features
    return settings_from(chosen, recipe="paper")


def shadow_settings(target: TrainSettings, *, kind: str, seed: int, number: int = 0) -> TrainSettings:
    """The settings of a shadow model: the target's own, or ordinary training of the same model.

    Its seed is another one, made of that of the attack and its number: the attacker has not drawn the target's noise.
    """
    validate.one_of(SHADOW_METHODS, shadow_method=kind)
    own_seed = _SHADOW_SEEDS * (seed + 1) + number
    if kind == "same" or target.method == ORDINARY:
        return replace(target, seed=own_seed, evaluate_every=0)
    same = {"model": target.model, "features": target.features, "activation": target.activation}
    given = {name: value for name, value in same.items() if value is not None}
    return target_settings(target.dataset, method=ORDINARY, epsilon=None, seed=own_seed, changes=given)
