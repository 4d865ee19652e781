"""Whatever a user sets is refused, or has an effect: on what is promised, or on what is trained."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sluice._base.errors import InputError
from sluice.data import DataSplits
from sluice.experiments.preparing import prepare
from sluice.experiments.run import Training
from sluice.experiments.settings import TrainSettings, settings_from
from sluice.methods import METHODS, method_of, planned_mechanism

# Noise is given, so that nothing has to be calibrated; what is about budgets is tested beside it.
BASE: dict[str, dict[str, Any]] = {
    name: {"releases": 3, "seed": 3, "noise_multiplier": 2.0, "accountant": "rdp"} for name in METHODS
}
BASE["matrix"]["options"] = {"bands": 2}
for name in ("dpagd", "non-private"):
    BASE[name] = {"releases": 3, "seed": 3}

CHANGES: dict[str, Any] = {
    "activation": "relu",
    "batch_size": 100,
    "beta": 1.0,
    "canaries": 20,
    "clip_range": 1.0,
    "coin_probability": 0.6,
    "delta": 1e-6,
    "ema_decay": 0.5,
    "epsilon": 1.0,
    "features": "scattering",
    "gate": "coin",
    "gate_noise": 3.0,
    "hidden_reference": True,
    "hold_out": 0.3,
    "large_norm": 5.0,
    "lr": 0.01,
    "lr_schedule": "linear",
    "max_attempts": 1000,
    "max_grad_norm": 0.5,
    "mean_noise": 20.0,
    "model": "mlp",
    "momentum": 0.1,
    "noise_multiplier": 3.0,
    "optimizer": "adam",
    "reference_decay": 0.1,
    "reference_noise": 3.0,
    "releases": 4,
    "scaling": "normalise",
    "scaling_bound": 0.2,
    "seed": 4,
    "shrinkage": 0.5,
    "strength": 2.0,
    "tempering": 2.0,
    "weight_decay": 0.1,
}
# What these change is neither promised nor trained: the report, or how often it is looked at.
OTHERS = {"dataset", "classes", "class_names", "target", "method", "accountant", "evaluate_every", "options"}
# Only numbers of one's own have them (tests/experiments/test_objective.py).
OF_NUMBERS = {"loss", "target_range"}
OPTIONS = {
    "dpsur": {"account": "claimed", "validation_batch_size": 99, "validation_noise": 2.0, "loss_clip": 0.1, "threshold": 1.0},
    "dpis": {"rate_cap": 2.0, "norm_noise": 9.0, "count_noise": 9.0, "norm_decay": 0.5, "clip_rate": 0.5, "clip_target": 0.2},
    "dpagd": {
        "selection_share": 0.4, "gamma": 0.3, "candidates": 5, "first_reach": 0.1, "refresh_every": 1, "reach_growth": 0.9,
        "loss_clip": 1.0, "gradient_rate": 0.5, "loss_rate": 0.5,
    },
    "matrix": {"batches": "poisson", "bands": 1, "buffers": 2, "workload": "prefix", "samples": 1000},
}  # fmt: skip


def planned(settings: TrainSettings) -> dict[str, Any]:
    return planned_mechanism(settings, dataset_size=1437).to_dict()


def weights(settings: TrainSettings, digits: DataSplits, path: Path) -> bytes:
    splits = digits if settings.features == "plain" else prepare(settings, show_progress=False)
    Training(settings=settings, splits=splits).start(path)
    return (path / "public" / "model.safetensors").read_bytes()


def test_all_settings_are_tried():
    assert set(TrainSettings.__dataclass_fields__) == set(CHANGES) | OTHERS | OF_NUMBERS


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_a_setting_is_refused_or_has_an_effect(method, digits, tmp_path):
    base = settings_from({"method": method, **BASE[method]})
    plain = planned(base), weights(base, digits, tmp_path / "base")
    idle = []
    for name, value in CHANGES.items():
        try:
            changed = settings_from({"method": method, **BASE[method], name: value})
            if changed == base or planned(changed) != plain[0]:
                continue
            outcome = weights(changed, digits, tmp_path / name)
        except InputError:
            continue
        if outcome == plain[1]:
            idle.append(name)
    # Delta is what the budget is stated at: with noise that is given it only moves the figures that are reported.
    assert set(idle) <= {"delta"}


@pytest.mark.parametrize(("method", "name"), [(method, name) for method in OPTIONS for name in OPTIONS[method]])
def test_an_option_is_refused_or_has_an_effect(method, name):
    # By its own choice of accountant: the proof of some batches knows one only.
    plain = {"method": method, **BASE[method], "accountant": settings_from({"method": method}).accountant}
    with_option = {**plain, "options": {**plain.get("options", {}), name: OPTIONS[method][name]}}
    if name in ("buffers", "samples"):
        with pytest.raises(InputError, match=f"option {name}=.* has no effect"):
            settings_from(with_option)
        return
    base, changed = settings_from(plain), settings_from(with_option)
    if name == "account":  # it decides what noise is calibrated to, and whether there is a budget
        assert method_of(method).target(replace(base, noise_multiplier=None)) == 3.0
        assert method_of(method).target(replace(changed, noise_multiplier=None)) is None
        return
    assert planned(changed) != planned(base)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"method": "matrix", "options": {"buffers": 2}}, "option buffers=2 has no effect: only the strategy 'blt'"),
        (
            {"method": "matrix", "options": {"samples": 1000}},
            "option samples=1000 has no effect: only batches 'balls-in-bins'",
        ),
        (
            {"method": "matrix", "options": {"strategy": "blt", "batches": "poisson", "bands": 2}},
            "option bands=2 has no effect: only a banded strategy",
        ),
        ({"method": "dpis", "options": {"clip_rate": 0.0, "clip_target": 0.3}}, "option clip_target=0.3 has no effect"),
        ({"method": "dpsr-cg-paper", "epsilon": 1.0}, "epsilon=1.0 has no effect: it only picks a row"),
        ({"method": "dpsr-cg-paper", "reference_noise": 1.0}, "reference_noise=1.0 has no effect: a hidden reference"),
        ({"hold_out": 0.2, "evaluate_every": 5}, "evaluate_every=5 has no effect: held-out records"),
        ({"gate": "coin", "beta": 2.0, "coin_probability": 0.5}, "beta=2.0 has no effect"),
        ({"strength": 2.0}, "strength=2.0 has no effect: only the gate 'thinning'"),
        ({"gate": "thinning", "beta": 2.0}, "beta=2.0 has no effect"),
        ({"gate": "thinning", "max_attempts": 9}, "max_attempts=9 has no effect"),
        ({"gate": "none", "large_norm": 2.0}, "large_norm=2.0 has no effect"),
        ({"gate": "thinning", "batch_size": 0}, "batch_size=0 is not allowed with gate='thinning'"),
        (
            {"gate": "none", "tempering": 1.0, "batch_size": 0},
            "batch_size=0 is not allowed with gate='thinning' or tempering",
        ),
        ({"gate": "none", "tempering": 11.0}, "tempering=11.0 is not allowed"),
        ({"method": "dpis", "tempering": 1.0}, "tempering=1.0 is not allowed for method='dpis'"),
    ],
    ids=str,
)
def test_what_has_no_effect_is_refused_with_the_reason(given, message):
    with pytest.raises(InputError, match=message):
        settings_from(given)


def test_what_has_an_effect_is_not_refused():
    settings = {"gate": "coin", "noise_multiplier": 2.0}
    assert planned(settings_from({**settings, "beta": 1.0})) != planned(settings_from(settings))
    assert settings_from({"method": "dpsr-cg-paper", "dataset": "mnist", "epsilon": 1.0}).noise_multiplier == 2.5
    for given in ({"gate": "thinning"}, {"gate": "none", "tempering": 1.0}):
        settings = {**given, "noise_multiplier": 2.0}
        assert planned(settings_from({**settings, "large_norm": 2.0})) != planned(settings_from(settings))
    options = {"batches": "balls-in-bins", "strategy": "blt", "buffers": 2, "samples": 1000}
    assert settings_from({"method": "matrix", "options": options}).options["buffers"] == 2
