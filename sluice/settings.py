"""The settings of a training run: public, frozen, and complete before anything is read from the data."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, get_type_hints

from sluice import validate
from sluice.errors import InputError

METHODS = ("dpsr-cg", "dpsgd")
GATES = ("clipping-bias", "coin", "none")
FEATURES = ("plain", "scattering", "bag-of-words")
SCALINGS = ("clip", "global", "normalise")
SCHEDULES = ("constant", "linear", "cosine")
OPTIMIZERS = ("sgd", "adam", "adamw")


@dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """Everything that shapes a run. The names are those of the command line's options and of a configuration file.

    Attributes:
        dataset: a name, or the path of a .npz or folder of arrays.
        method: "dpsr-cg" (selective release) or "dpsgd".
        features: what the model sees: "plain" records, "scattering" coefficients, or a "bag-of-words".
        model: a name of ``sluice.models``; activation as it takes it.
        epsilon, delta: the budget. With ``noise_multiplier`` given, epsilon is what results.
        releases: updates that are released.
        batch_size: expected size of a Poisson batch.
        optimizer, lr, momentum, lr_schedule: of the optimizer that applies releases.
        max_grad_norm: the most that a record's weighted gradient measures [C].
        scaling, scaling_bound: the rule from norms to weights; the bound is S for "global", gamma for "normalise".
        gate: "clipping-bias", "coin" or "none"; None takes the method's own.
        beta, clip_range, gate_noise, reference_noise, large_norm, reference_decay, max_attempts: of the
            clipping-bias gate; noise that is None is chosen by calibration.
        coin_probability: of the coin gate; None takes the clipping-bias gate's acceptance at a difference of zero.
        ema_decay: weight of the past in the average of released weights that is published; 0 publishes the last.
        accountant: "pld" or "rdp".
        seed: None for cryptographic noise. A number makes the run repeatable, for experiments only.
        hold_out: share of the training records kept aside to choose settings with; the test set is not read then.
        evaluate_every: releases between two evaluations; 0 evaluates once, at the end.
    """

    dataset: str = "digits"
    method: str = "dpsr-cg"
    features: str = "plain"
    model: str = "linear"
    activation: str | None = None
    epsilon: float = 3.0
    delta: float = 1e-5
    noise_multiplier: float | None = None
    releases: int = 200
    batch_size: int = 256
    optimizer: str = "sgd"
    lr: float = 0.5
    momentum: float = 0.9
    lr_schedule: str = "constant"
    max_grad_norm: float = 1.0
    scaling: str = "global"
    scaling_bound: float = 1.0
    gate: str | None = None
    beta: float = 3.0
    clip_range: float = 2.0
    gate_noise: float | None = None
    reference_noise: float | None = None
    large_norm: float = 11.0
    reference_decay: float = 0.9
    max_attempts: int | None = None
    coin_probability: float | None = None
    ema_decay: float = 0.0
    accountant: str = "pld"
    seed: int | None = None
    hold_out: float = 0.0
    evaluate_every: int = 0

    def __post_init__(self) -> None:
        for field, kind in get_type_hints(TrainSettings).items():
            _require_type(field, getattr(self, field), kind)
        validate.one_of(METHODS, method=self.method)
        validate.one_of(FEATURES, features=self.features)
        validate.one_of(OPTIMIZERS, optimizer=self.optimizer)
        validate.one_of(SCHEDULES, lr_schedule=self.lr_schedule)
        validate.one_of(SCALINGS, scaling=self.scaling)
        validate.one_of(("pld", "rdp"), accountant=self.accountant)
        if self.gate is not None:
            validate.one_of(GATES, gate=self.gate)
        validate.positive(
            epsilon=self.epsilon, lr=self.lr, max_grad_norm=self.max_grad_norm, scaling_bound=self.scaling_bound
        )
        validate.open_fraction(delta=self.delta)
        validate.positive_integer(releases=self.releases, batch_size=self.batch_size)
        for name in ("momentum", "ema_decay", "hold_out"):
            if not 0 <= getattr(self, name) < 1:
                raise InputError(f"{name}={getattr(self, name)} is not allowed: it must be in [0, 1).")
        if self.evaluate_every < 0:
            raise InputError(f"evaluate_every={self.evaluate_every} is not allowed: it must be a whole number >= 0.")
        if self.method == "dpsgd" and self.chosen_gate != "none":
            raise InputError(f"gate={self.gate!r} is not allowed for method='dpsgd', which releases every attempt.")

    @property
    def chosen_gate(self) -> str:
        """The gate, with the method's own filled in."""
        if self.gate is not None:
            return self.gate
        return "clipping-bias" if self.method == "dpsr-cg" else "none"

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


# Chosen on held-out training records (docs/results.md tells how), never on test records.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "digits": {"lr": 0.3, "scaling_bound": 1.0, "releases": 150, "batch_size": 256, "ema_decay": 0.9},
    "mnist": {
        "features": "scattering",
        "model": "scattering-cnn",
        "releases": 1000,
        "batch_size": 1024,
        "lr": 0.1,
        "scaling_bound": 0.3,
        "ema_decay": 0.99,
    },
    "fashion-mnist": {
        "features": "scattering",
        "model": "scattering-cnn",
        "releases": 1000,
        "batch_size": 2048,
        "lr": 0.15,
        "scaling_bound": 0.3,
        "ema_decay": 0.99,
    },
    "cifar-10": {
        "features": "scattering",
        "model": "scattering-cnn",
        "releases": 1000,
        "batch_size": 2048,
        "lr": 0.15,
        "scaling_bound": 1.0,
        "ema_decay": 0.99,
    },
    "imdb": {
        "features": "bag-of-words",
        "model": "bag-of-words",
        "releases": 300,
        "batch_size": 1024,
        "lr": 2.0,
        "scaling_bound": 0.3,
        "ema_decay": 0.95,
    },
}


def default_settings(dataset: str) -> TrainSettings:
    """What a data set is trained with unless told otherwise; the user's own data gets those of ``digits``."""
    return TrainSettings(dataset=dataset, **_DEFAULTS.get(dataset, _DEFAULTS["digits"]))


def settings_from(overrides: Mapping[str, Any], *, file: Path | None = None) -> TrainSettings:
    """The data set's defaults, under the configuration file, under the overrides. Unknown keys are refused."""
    chosen = dict(_read(file)) if file is not None else {}
    chosen.update(overrides)
    known = {field.name for field in fields(TrainSettings)}
    unknown = sorted(set(chosen) - known)
    if unknown:
        raise InputError(f"unknown settings {', '.join(unknown)}: allowed are {', '.join(sorted(known))}.")
    dataset = chosen.get("dataset", "digits")
    _require_type("dataset", dataset, str)
    return replace(default_settings(dataset), **chosen)


def _read(file: Path) -> Mapping[str, Any]:
    try:
        text = file.read_text("utf-8")
    except FileNotFoundError:
        raise InputError(f"config={str(file)!r} does not exist: give the path of a .toml or .json file.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"config={str(file)!r} cannot be read: {error}.") from error
    try:
        data = json.loads(text) if file.suffix == ".json" else tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(
            f"config={str(file)!r} cannot be read: {error}. It must be TOML, or JSON in a .json file."
        ) from error
    if not isinstance(data, dict):
        raise InputError(f"config={str(file)!r} is not allowed: it must hold settings by name.")
    return data


def _require_type(name: str, value: object, kind: Any) -> None:
    # A whole number is a fine float; True is not a fine number.
    allowed = (int, float) if kind in (float, float | None) else kind
    if kind in (float | None, int | None, str | None) and value is None:
        return
    if kind == int | None:
        allowed = int
    if kind == str | None:
        allowed = str
    if isinstance(value, bool) or not isinstance(value, allowed):
        wanted = {float: "a number", int: "a whole number", str: "a text"}
        base = next((plain for plain in wanted if kind in (plain, plain | None)), str)
        raise InputError(f"{name}={value!r} is not allowed: it must be {wanted[base]}.")
