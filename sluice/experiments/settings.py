"""The settings of a training run: public, frozen, and complete before anything is read from the data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, get_args, get_type_hints

from sluice._base import codec, validate
from sluice._base.errors import InputError
from sluice.experiments.defaults import default_values, matched, method_of
from sluice.experiments.effects import require_effect
from sluice.experiments.objective_settings import LOSSES, predicts_numbers, require_objective
from sluice.experiments.settings_files import settings_in
from sluice.features.catalog import blocks_of, has_rows
from sluice.models import activation_of, model_names

DATA, BUDGET, OPTIMISATION, GATE, RUN = "Data and model", "Budget", "Optimisation", "Scaling and gate", "Run"
"""The groups that settings are shown in."""


def _setting(default: Any, group: str, text: str, *, choices: tuple[str, ...] = (), **metadata: Any) -> Any:
    """A field with what help says of it; the words that it may be are named there and enforced."""
    if choices:
        text += f": {', '.join(choices[:-1])} or {choices[-1]}."
    return field(default=default, metadata={"group": group, "help": text, "choices": choices, **metadata})


@dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """Everything that shapes a run. The names are those of the command line's options and of a configuration file.

    What each field means is its metadata, which ``sluice train --help`` shows. ``options`` are the settings that only this
    method has, by name; those left out get the method's defaults.
    """

    dataset: str = _setting(
        "digits",
        DATA,
        "digits, mnist, fashion-mnist, cifar-10, imdb, or your own: a .npz, .csv or .parquet file, or a folder.",
    )
    classes: int | None = _setting(
        None,
        DATA,
        "How many classes your own data can have; if not given, the highest label tells, and becomes public by that.",
        **codec.ADDED_IF_GIVEN,
    )
    class_names: str | None = _setting(
        None,
        DATA,
        "What the classes of your own data are called, with commas between, in the order of their numbers; public. Labels "
        "that are strings need it.",
        **codec.ADDED_IF_GIVEN,
    )
    target: str | None = _setting(
        None, DATA, "Column of your own table that is to be predicted.", **codec.ADDED_IF_GIVEN
    )
    loss: str | None = _setting(
        None,
        DATA,
        "What training makes small, cross-entropy of classes if not given; the others are for your own data with numbers to "
        "predict, or counts",
        choices=LOSSES,
        **codec.ADDED_IF_GIVEN,
    )
    target_range: str | None = _setting(
        None,
        DATA,
        "LOW,HIGH: bounds of the numbers to predict, which are clipped to them in training; public, so not to be taken "
        "from private records.",
        **codec.ADDED_IF_GIVEN,
    )
    method: str = _setting("dpsr-cg", BUDGET, "dpsr-cg (selective release), dpsgd, ...: see sluice methods.")
    features: str = _setting(
        "plain", DATA, "What the model sees, such as scattering, or blocks joined by +: see sluice features list."
    )
    model: str = _setting("linear", DATA, f"One of {', '.join(model_names())}.")
    activation: str | None = _setting(None, DATA, "tanh, relu, tempered-sigmoid[:s,T,o]; for nets.")
    epsilon: float = _setting(3.0, BUDGET, "Budget that noise is calibrated to.")
    delta: float = _setting(1e-5, BUDGET, "Probability with which epsilon may fail.")
    noise_multiplier: float | None = _setting(None, BUDGET, "Noise, if not calibrated: epsilon is what results.")
    releases: int = _setting(200, BUDGET, "Updates to release.")
    batch_size: int = _setting(256, BUDGET, "Expected size of a Poisson batch; 0: all records, each time.")
    mean_noise: float | None = _setting(
        None,
        BUDGET,
        "Release the mean of the rows of features with this noise multiplier before training, and subtract it.",
        **codec.ADDED_IF_GIVEN,
    )
    optimizer: str = _setting("sgd", OPTIMISATION, "What applies releases", choices=("sgd", "adam", "adamw"))
    lr: float = _setting(0.5, OPTIMISATION, "Learning rate.")
    momentum: float = _setting(0.9, OPTIMISATION, "Of sgd.")
    weight_decay: float | None = _setting(
        None, OPTIMISATION, "Of the optimizer; if not given, what PyTorch does by default.", **codec.ADDED_IF_GIVEN
    )
    lr_schedule: str = _setting(
        "constant",
        OPTIMISATION,
        "Learning rate over the releases (step: a tenth in the second half)",
        choices=("constant", "linear", "cosine", "step"),
    )
    max_grad_norm: float = _setting(1.0, GATE, "Maximum norm of a record's weighted gradient [C].")
    scaling: str = _setting("global", GATE, "From gradient norms to weights", choices=("clip", "global", "normalise"))
    scaling_bound: float = _setting(1.0, GATE, "S of global scaling, gamma of normalise.")
    gate: str | None = _setting(
        None,
        GATE,
        "What decides on release, by default the method's own",
        choices=("clipping-bias", "thinning", "coin", "none"),
    )
    strength: float | None = _setting(
        None,
        GATE,
        "Of the gate thinning: by how much the logarithm of a record's odds falls where its gradient counts fully; 1 if not "
        "given, negative to prefer large gradients.",
        **codec.ADDED_IF_GIVEN,
    )
    tempering: float | None = _setting(
        None,
        GATE,
        "Weight records by what they would be kept with at this strength, instead of leaving any out.",
        **codec.ADDED_IF_GIVEN,
    )
    beta: float = _setting(3.0, GATE, "Threshold of the gate.")
    clip_range: float = _setting(2.0, GATE, "Clip of the gate's difference.")
    gate_noise: float | None = _setting(None, GATE, "Noise of the decision; calibrated if not given.")
    reference_noise: float | None = _setting(None, GATE, "Noise of the public reference; calibrated if not given.")
    large_norm: float = _setting(11.0, GATE, "Gradient norm from which a record counts fully.")
    reference_decay: float = _setting(0.9, GATE, "Weight of the past in the public reference.")
    max_attempts: int | None = _setting(None, GATE, "Give up on a release after this many; dpsur: on the run.")
    hidden_reference: bool = _setting(
        False,
        GATE,
        "Compare with the un-noised metric of the last release, as the DPSR-CG paper does: no epsilon is proved, so "
        "--noise-multiplier has to be given.",
        otherwise="public-reference",
    )
    coin_probability: float | None = _setting(
        None, GATE, "Of the coin gate; if not given, the clipping-bias gate's at a difference of zero."
    )
    ema_decay: float = _setting(
        0.0, OPTIMISATION, "Weight of the past in the average of released weights that is published; 0: the last."
    )
    shrinkage: float | None = _setting(
        None,
        OPTIMISATION,
        "Shrink the published weights of a linear model by this many standard deviations of the noise in them.",
        **codec.ADDED_IF_GIVEN,
    )
    accountant: str = _setting("pld", BUDGET, "What proves epsilon, the tighter first", choices=("pld", "rdp"))
    seed: int | None = _setting(None, RUN, "Repeatable noise, for experiments only; cryptographic if not given.")
    hold_out: float = _setting(
        0.0,
        DATA,
        "Keep about this share of the training records aside, each by a hash of what it holds, to choose settings with; "
        "the test set is not read then.",
    )
    evaluate_every: int | None = _setting(
        None, RUN, "Releases between two looks at the test set; 0: only at the end; ten in all if not given."
    )
    canaries: int | None = _setting(
        None,
        RUN,
        "Train so many quiet canaries with the records, and audit the run by them (docs/audit.md); none if not given.",
        **codec.ADDED_IF_GIVEN,
    )
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, kind in get_type_hints(TrainSettings).items():
            if name == "options":
                continue
            # An integer is a fine float; stored as one, it is written (and hashed) in one way only.
            object.__setattr__(self, name, _typed(name, getattr(self, name), kind))
        for name, allowed in CHOICES.items():
            if getattr(self, name) is not None:
                validate.one_of(allowed, **{name: getattr(self, name)})
        validate.positive(
            epsilon=self.epsilon,
            lr=self.lr,
            max_grad_norm=self.max_grad_norm,
            scaling_bound=self.scaling_bound,
            clip_range=self.clip_range,
            large_norm=self.large_norm,
        )
        validate.finite(beta=self.beta)
        validate.open_fraction(delta=self.delta)
        validate.positive_integer(releases=self.releases)
        self._require_batches()
        blocks_of(self.features)
        require_objective(
            self.loss,
            target_range=self.target_range,
            model=self.model,
            of_classes={"classes": self.classes, "class_names": self.class_names},
        )
        for name in ("noise_multiplier", "gate_noise", "mean_noise", "shrinkage"):
            if getattr(self, name) is not None:
                validate.positive(**{name: getattr(self, name)})
        if self.reference_noise is not None:
            validate.positive_or_infinite(reference_noise=self.reference_noise)
        if self.weight_decay is not None:
            validate.non_negative(weight_decay=self.weight_decay)
        if self.max_attempts is not None:
            validate.positive_integer(max_attempts=self.max_attempts)
        if self.classes is not None:
            validate.positive_integer(classes=self.classes)
        if self.canaries is not None:
            from sluice.audit.guesses import require_canaries

            require_canaries(self.canaries)
        if (self.strength, self.tempering) != (None, None):
            from sluice.mechanism.thinning import require_strength

            require_strength(strength=self.strength or 0.0, tempering=self.tempering or 0.0)
        if self.coin_probability is not None:
            validate.fraction(coin_probability=self.coin_probability)
        for name in ("momentum", "ema_decay", "hold_out", "reference_decay"):
            if not 0 <= getattr(self, name) < 1:
                raise InputError(f"{name}={getattr(self, name)} is not allowed: it must be in [0, 1).")
        if self.evaluate_every is not None and self.evaluate_every < 0:
            raise InputError(f"evaluate_every={self.evaluate_every} is not allowed: it must be an integer >= 0.")
        if self.seed is not None and not 0 <= self.seed < 2**63:
            raise InputError(f"seed={self.seed} is not allowed: it must be an integer from 0 to 2^63 - 1.")
        if method_of(self.method).gate == "none" and self.chosen_gate != "none":
            raise InputError(f"gate={self.gate!r} is not allowed for method={self.method!r}, which has no such gate.")
        if self.hidden_reference and self.chosen_gate == "clipping-bias" and self.noise_multiplier is None:
            raise InputError(
                "hidden_reference=True needs noise_multiplier: nothing is proved for a hidden reference, so no noise can "
                "be calibrated to an epsilon."
            )
        if self.mean_noise is not None and not (self.has_rows and method_of(self.method).is_selective):
            raise InputError(
                f"mean_noise={self.mean_noise} is not allowed with features={self.features!r} and method={self.method!r}: only "
                "rows of images, under methods that sample each record alike, are centred. Leave it out."
            )
        if self.tempering is not None and not method_of(self.method).is_selective:
            raise InputError(
                f"tempering={self.tempering} is not allowed for method={self.method!r}: only methods that sample each record "
                "alike have it. Leave it out."
            )
        if self.batch_size == 0 and (self.chosen_gate == "thinning" or self.tempering is not None):
            raise InputError(
                "batch_size=0 is not allowed with gate='thinning' or tempering: odds of being in every batch stay what they are, "
                "and nobody would be left out. Give a batch size below the number of records."
            )
        if self.shrinkage is not None and not self.noise_of_weights_is_known:
            raise InputError(
                f"shrinkage={self.shrinkage} is not allowed here: the noise in each weight is only known for softmax and "
                "weighted-words with sgd, a constant learning rate, no average or weight decay, and methods that sample each record alike."
            )
        object.__setattr__(self, "options", asdict(self.own_options))

    def _require_batches(self) -> None:
        if self.batch_size == 0 and method_of(self.method).is_selective:
            return
        if self.batch_size < 1:
            whole = "" if self.batch_size else ": whole data sets are for methods that sample each record alike"
            raise InputError(f"batch_size={self.batch_size} is not allowed for method={self.method!r}{whole}.")

    @property
    def predicts_numbers(self) -> bool:
        """Whether a record's target is a number, not a class."""
        return predicts_numbers(self.loss)

    @property
    def has_rows(self) -> bool:
        """Whether the model sees rows of norm 1."""
        return has_rows(self.features)

    @property
    def noise_of_weights_is_known(self) -> bool:
        """Whether the noise that training leaves in each weight is one public number."""
        return (
            self.model in ("softmax", "weighted-words")
            and (self.optimizer, self.lr_schedule, self.ema_decay, self.weight_decay) == ("sgd", "constant", 0.0, None)
            and method_of(self.method).is_selective
        )

    @property
    def own_options(self) -> Any:
        """The settings that only this method has, as its own class of them."""
        kinds = get_type_hints(method_of(self.method).options)
        if not isinstance(self.options, Mapping):
            raise InputError(f"options={self.options!r} is not allowed: it must hold the method's settings by name.")
        unknown = sorted(str(name) for name in self.options if name not in kinds)
        if unknown:
            allowed = f"it has {', '.join(sorted(kinds))}" if kinds else "it has none"
            raise InputError(f"method={self.method!r} has no option {', '.join(unknown)}: {allowed}.")
        typed = {name: _typed(name, value, kinds[name]) for name, value in self.options.items()}
        return method_of(self.method).options(**typed)

    @property
    def chosen_gate(self) -> str:
        """The gate, with the method's own filled in."""
        if self.gate is not None:
            return self.gate
        return method_of(self.method).gate

    @property
    def used_activation(self) -> str | None:
        """The activation that the model is made with; None for one that has none."""
        if self.model not in model_names():
            return self.activation  # the registry says what is wrong with the model
        used = activation_of(self.model, self.activation)
        return None if used is None else str(used)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for strict JSON; `settings_of` gives equal settings back."""
        data: dict[str, Any] = codec.encode(self)
        return data


CHOICES: dict[str, tuple[str, ...]] = {
    field.name: field.metadata["choices"] for field in fields(TrainSettings) if field.metadata.get("choices")
}
"""The settings that are one of a few words."""


def default_settings(
    dataset: str, *, method: str = "dpsr-cg", epsilon: float = 3.0, recipe: str | None = None
) -> TrainSettings:
    """What a method trains a data set with unless told otherwise; the user's own data gets small settings."""
    chosen = {"dataset": dataset, "method": method, "epsilon": epsilon}
    return TrainSettings(**default_values(chosen, recipe=recipe))


def settings_from(
    overrides: Mapping[str, Any], *, file: Path | None = None, recipe: str | None = None
) -> TrainSettings:
    """The data set's defaults, under the configuration file, under the overrides.

    Args:
        recipe: which defaults: "best", the best that are known for method and data set, or "paper", the nets and settings that
            the method was published with; the best that there are if not given.

    Unknown keys are refused, and so are overrides that would have no effect. A model brings the features that it is
    made for, and features the model, unless both are given.
    """
    chosen = dict(settings_in(file)) if file is not None else {}
    chosen.update(overrides)
    _require_known(chosen)
    kinds = get_type_hints(TrainSettings)
    chosen = {name: value if name == "options" else _typed(name, value, kinds[name]) for name, value in chosen.items()}
    chosen = {"dataset": "digits", "method": "dpsr-cg", "epsilon": 3.0, **chosen}
    options = chosen.get("options", {})
    defaults = default_values(chosen, recipe=recipe)
    chosen = matched(chosen, defaults)
    if chosen.get("model") in model_names() and activation_of(chosen["model"]) is None:
        defaults.pop("activation", None)
    if isinstance(options, Mapping):
        chosen["options"] = {**defaults.get("options", {}), **options}
    settings = TrainSettings(**{**defaults, **chosen})
    require_effect(settings, overrides, epsilon_names_row="noise_multiplier" in defaults)
    method = method_of(settings.method)
    method.require_accountant(settings)
    refusal = method.refuses(settings)
    if refusal is not None:
        raise InputError(refusal)
    return settings


def settings_of(config: Mapping[str, Any], *, where: str) -> TrainSettings:
    """The settings that a run folder keeps as its configuration: all of them, since defaults may change."""
    _require_known(config)
    settings: TrainSettings = codec.decode(TrainSettings, config, what=where)
    return settings


def _require_known(chosen: Mapping[str, Any]) -> None:
    unknown = [name if name.isprintable() else repr(name) for name in sorted(set(chosen) - _NAMES)]
    if unknown:
        raise InputError(f"unknown settings {', '.join(unknown)}: allowed are {', '.join(sorted(_NAMES))}.")


def _typed(name: str, value: Any, kind: Any) -> Any:
    """The value as its setting wants it: an integer is a fine float, True is not a fine number."""
    value = codec.decode(kind, value, what=name)
    wants_float = float in (kind, *get_args(kind))
    return float(value) if wants_float and value is not None else value


_NAMES = {field.name for field in fields(TrainSettings)}
