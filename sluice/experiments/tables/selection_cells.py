"""The cells of the study of selection: arms, the regimes that they are compared in, and which run each of them is."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import scipy

from sluice._base import validate
from sluice._base.errors import InputError
from sluice.experiments.settings import TrainSettings, settings_from
from sluice.experiments.tables.accuracy_cells import Cell, Plan, PlannedCell
from sluice.experiments.tables.spoiling import Spoiling
from sluice.mechanism.gates import ClippingBiasGate
from sluice.mechanism.selective_release import SelectiveRelease
from sluice.methods import planned_mechanism

METHOD = "dpsr-cg"
CONTROL = "none"
RECORDS = {"digits": 1437, "mnist": 60_000, "fashion-mnist": 60_000, "imdb": 25_000}
"""How many training records the data sets of the study have: public."""

SPOILED = ("digits",)
"""Data sets whose records can be spoiled: plain ones."""

# No gradient of digits is as long as the 11 of its defaults, which are the paper's; the recipes have limits of their own.
DIGITS_LARGE_NORM = 4.0


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One way to select.

    Attributes:
        text: what it is, in a few words.
        overrides: the settings that make it.
        as_strong_as_the_gate: which setting gets the strength that the gate of selective release has at most.
    """

    text: str
    overrides: Mapping[str, Any]
    as_strong_as_the_gate: str | None = None


def _thinning(strength: float) -> Arm:
    return Arm(text=f"thinning, strength {strength:g}", overrides={"gate": "thinning", "strength": strength})


def _twin(strength: float) -> Arm:
    return Arm(text=f"weights instead, strength {strength:g}", overrides={"gate": "none", "tempering": strength})


ARMS: dict[str, Arm] = {
    CONTROL: Arm(text="no gate", overrides={"gate": "none"}),
    "coin": Arm(text="coin", overrides={"gate": "coin"}),
    "gate": Arm(text="clipping-bias gate (DPSR-CG)", overrides={"gate": "clipping-bias"}),
    "thinning": Arm(
        text="thinning, as strong as that gate", overrides={"gate": "thinning"}, as_strong_as_the_gate="strength"
    ),
    "twin": Arm(text="weights instead, as strong", overrides={"gate": "none"}, as_strong_as_the_gate="tempering"),
    "thinning1": _thinning(1.0),
    "thinning2": _thinning(2.0),
    "thinning4": _thinning(4.0),
    "twin1": _twin(1.0),
    "twin2": _twin(2.0),
    "twin4": _twin(4.0),
    "thickening1": _thinning(-1.0),
    "thickening2": _thinning(-2.0),
}


@dataclass(frozen=True, kw_only=True)
class Regime:
    """Circumstances in which selection might help.

    Attributes:
        text: what they are.
        overrides: settings of every arm.
        spoiling: what is done to the training records.
        gate: further settings of the clipping-bias gate.
    """

    text: str
    overrides: Mapping[str, Any] = field(default_factory=dict)
    spoiling: Spoiling | None = None
    gate: Mapping[str, Any] = field(default_factory=dict)


REGIMES: dict[str, Regime] = {
    "plain": Regime(text="as it is"),
    "wrong20": Regime(text="20 % wrong labels", spoiling=Spoiling(wrong_labels=0.2)),
    "wrong40": Regime(text="40 % wrong labels", spoiling=Spoiling(wrong_labels=0.4)),
    "poisoned5": Regime(text="5 % poisoned, with large gradients", spoiling=Spoiling(poisoned=0.05)),
    "batch16": Regime(text="batches of 16", overrides={"batch_size": 16}),
    "batch64": Regime(text="batches of 64", overrides={"batch_size": 64}),
    "noiseless": Regime(
        text="no privacy: hardly any noise",
        overrides={"noise_multiplier": 0.01},
        gate={"gate_noise": 1.0, "reference_noise": 1.0},
    ),
}


def plan_selection(
    *,
    datasets: Sequence[str],
    epsilons: Sequence[float],
    arms: Sequence[str],
    regimes: Sequence[str],
    seeds: Sequence[int],
) -> Plan:
    """Which runs the study needs. No record is read."""
    for name, given, allowed in (("datasets", datasets, RECORDS), ("arms", arms, ARMS), ("regimes", regimes, REGIMES)):
        for word in given:
            validate.one_of(allowed, **{name: word})
        if not given:
            raise InputError(f"{name} is empty: give at least one of {', '.join(allowed)}.")
    for regime in regimes:
        if REGIMES[regime].spoiling is not None and any(dataset not in SPOILED for dataset in datasets):
            raise InputError(
                f"regimes={regime!r} is only allowed for {', '.join(SPOILED)}: other records are not spoiled here."
            )
    if not epsilons or not seeds:
        raise InputError("epsilons and seeds must not be empty: give at least one of each.")
    cells = []
    for regime in regimes:
        for dataset in datasets:
            for epsilon in epsilons:
                for arm in arms:
                    settings = arm_settings(dataset, epsilon, arm, regime)
                    cells += [_cell(settings, arm, regime, seed) for seed in seeds]
    return Plan(cells=tuple(cells), left_out={})


def _cell(settings: TrainSettings, arm: str, regime: str, seed: int) -> PlannedCell:
    cell = Cell(
        dataset=settings.dataset,
        method=METHOD,
        variant=arm if regime == "plain" else f"{arm}-{regime}",
        epsilon=settings.epsilon,
        seed=seed,
    )
    return PlannedCell(cell=cell, settings=replace(settings, seed=seed), spoiling=REGIMES[regime].spoiling)


def arm_settings(dataset: str, epsilon: float, arm: str, regime: str) -> TrainSettings:
    """The best recipe for the data set under a gate, with this arm in the gate's place."""
    chosen, where = ARMS[arm], REGIMES[regime]
    common = {**where.overrides, **chosen.overrides}
    base = _settings(dataset, epsilon, {**common, **(where.gate if arm == "gate" else {})})
    if chosen.as_strong_as_the_gate is None:
        return base
    strength = strength_of_the_gate(arm_settings(dataset, epsilon, "gate", regime))
    return _settings(dataset, epsilon, {**common, chosen.as_strong_as_the_gate: strength})


def _settings(dataset: str, epsilon: float, overrides: Mapping[str, Any]) -> TrainSettings:
    # Noise that is given is not made for an epsilon, which then only picks the recipe.
    given = {name: value for name, value in overrides.items() if name == "noise_multiplier"}
    others = {name: value for name, value in overrides.items() if name not in given}
    found = settings_from({"dataset": dataset, "method": METHOD, "epsilon": epsilon, "evaluate_every": 0, **others})
    if dataset == "digits":
        found = replace(found, large_norm=DIGITS_LARGE_NORM)
    return replace(found, **given)


def strength_of_the_gate(settings: TrainSettings) -> float:
    """How strongly the gate tilts odds where its clip does not bind, to three digits: the hazard of its decision noise."""
    mechanism = planned_mechanism(settings, dataset_size=RECORDS[settings.dataset])
    assert isinstance(mechanism, SelectiveRelease)
    gate = mechanism.gate
    assert isinstance(gate, ClippingBiasGate)
    at = gate.threshold / gate.noise_std
    hazard = math.exp(-at * at / 2) / math.sqrt(2 * math.pi) / float(scipy.special.ndtr(-at))
    return float(f"{gate.metric_bound * hazard / gate.noise_std:.3g}")
