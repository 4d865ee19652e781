"""Which settings nothing reads beside others: who sets one of them is told so."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from sluice._base.errors import InputError
from sluice.experiments.defaults import method_of

if TYPE_CHECKING:
    from sluice.experiments.settings import TrainSettings

_BIAS_GATE_ONLY = ("beta", "clip_range", "gate_noise", "reference_noise", "reference_decay", "hidden_reference")


def require_effect(settings: TrainSettings, overrides: Mapping[str, Any], *, epsilon_names_row: bool) -> None:
    """Refuse overrides that change nothing. Epsilon may name a row of settings with noise of their own."""
    useless = _without_effect(settings, epsilon_names_row=epsilon_names_row)
    for name in overrides:
        if name in useless:
            raise InputError(f"{name}={overrides[name]} has no effect: {useless[name]}. Leave it out.")
    method = method_of(settings.method)
    useless_options = method.unused_options(settings)
    for name, value in overrides.get("options", {}).items():
        if name in useless_options:
            raise InputError(f"option {name}={value} has no effect: {useless_options[name]}. Leave it out.")


def epsilon_has_effect(method: str, dataset: str) -> bool:
    """Whether epsilon shapes a run: where it only picks a row of published settings, the data set must have rows."""
    from sluice.methods.reference import EPSILONS

    rows = [method_of(method).defaults(dataset, epsilon) for epsilon in EPSILONS]
    return "noise_multiplier" not in rows[0] or any(row != rows[0] for row in rows)


def _without_effect(settings: TrainSettings, *, epsilon_names_row: bool) -> dict[str, str]:
    """The settings that nothing reads beside these others, each with the reason."""
    method = method_of(settings.method)
    useless: dict[str, str] = dict(method.unused)
    if settings.chosen_gate != "clipping-bias":
        useless |= dict.fromkeys(_BIAS_GATE_ONLY, "only the gate 'clipping-bias' has it")
    elif settings.hidden_reference:
        useless |= dict.fromkeys(("reference_noise", "reference_decay"), "a hidden reference is the plain last value")
    if settings.chosen_gate == "coin" and settings.coin_probability is None:
        del useless["beta"]  # the coin falls as often as the other gate would accept
    if settings.chosen_gate not in ("clipping-bias", "thinning") and settings.tempering is None:
        useless["large_norm"] = "only the gates 'clipping-bias' and 'thinning' have it, and tempering"
    if settings.chosen_gate in ("none", "thinning") and not method.counts_attempts:
        useless["max_attempts"] = "only gates that decide on whole batches make attempts"
    if settings.chosen_gate != "thinning":
        useless["strength"] = "only the gate 'thinning' has it"
    if settings.chosen_gate != "coin":
        useless["coin_probability"] = "only the gate 'coin' has it"
    if settings.optimizer != "sgd":
        useless["momentum"] = "only the optimizer 'sgd' has it"
    if settings.scaling == "clip":
        useless["scaling_bound"] = "the scaling 'clip' has none"
    if settings.hold_out:
        useless["evaluate_every"] = "held-out records are looked at once, at the end"
    if settings.noise_multiplier is not None and not epsilon_names_row:
        useless["epsilon"] = "noise_multiplier is given, and epsilon is what results"
    if not epsilon_has_effect(settings.method, settings.dataset):
        useless["epsilon"] = "it only picks a row of published settings, and there is none for this data set"
    return useless
