"""What a method is: a name, what it proves, its settings for each data set, and the mechanism that it makes of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from sluice._base.errors import InputError
from sluice.accounting import ACCOUNTANTS
from sluice.mechanism.base import Mechanism
from sluice.mechanism.selective_release import SelectiveRelease
from sluice.methods.recipes import Recipe


class RunSettings(Protocol):
    """What methods read of a run's settings (`sluice.experiments.settings.TrainSettings`, which says what they mean)."""

    @property
    def accountant(self) -> str: ...

    @property
    def activation(self) -> str | None: ...

    @property
    def batch_size(self) -> int: ...

    @property
    def beta(self) -> float: ...

    @property
    def chosen_gate(self) -> str: ...

    @property
    def clip_range(self) -> float: ...

    @property
    def coin_probability(self) -> float | None: ...

    @property
    def dataset(self) -> str: ...

    @property
    def delta(self) -> float: ...

    @property
    def epsilon(self) -> float: ...

    @property
    def features(self) -> str: ...

    @property
    def gate_noise(self) -> float | None: ...

    @property
    def hidden_reference(self) -> bool: ...

    @property
    def large_norm(self) -> float: ...

    @property
    def lr_schedule(self) -> str: ...

    @property
    def max_attempts(self) -> int | None: ...

    @property
    def max_grad_norm(self) -> float: ...

    @property
    def mean_noise(self) -> float | None: ...

    @property
    def method(self) -> str: ...

    @property
    def model(self) -> str: ...

    @property
    def momentum(self) -> float: ...

    @property
    def noise_multiplier(self) -> float | None: ...

    @property
    def optimizer(self) -> str: ...

    @property
    def own_options(self) -> Any: ...

    @property
    def reference_decay(self) -> float: ...

    @property
    def reference_noise(self) -> float | None: ...

    @property
    def releases(self) -> int: ...

    @property
    def scaling(self) -> str: ...

    @property
    def scaling_bound(self) -> float: ...

    @property
    def seed(self) -> int | None: ...

    @property
    def strength(self) -> float | None: ...

    @property
    def tempering(self) -> float | None: ...

    @property
    def used_activation(self) -> str | None: ...


@dataclass(frozen=True, kw_only=True)
class NoOptions:
    """For methods that have no settings of their own."""


@dataclass(frozen=True, kw_only=True)
class Method:
    """One system that ``sluice train --method NAME`` runs.

    Attributes:
        name: what users type.
        summary: what it does, in a few words.
        proves: which epsilon it can prove, in a few words.
        mechanism: the class of its mechanism.
        plan: from settings and the number of records to what the run promises; reads no record.
        defaults: from a data set's name and epsilon to settings. Unknown data sets get small ones.
        options: a frozen dataclass of the settings that only this method has; its docstring says what they mean.
        gate: the gate that it has unless told otherwise.
        unused: settings that it does not read, each with the reason.
        unused_options: from settings to those of its own options that a run with them does not read, with the reason.
        accountants: from settings to the accountants that can prove a run with them.
        refuses: why settings are not this method at all, as a sentence that says what to do, or None if they are.
        target: the proved epsilon that the run may not exceed, or None where the noise is given or nothing is proved.
        claimed_defaults: in place of ``defaults`` where the option ``account`` is "claimed".
        best: from a recipe and epsilon to settings, in place of ``defaults`` where a recipe is known; None for methods that
            are run as they were published.
        counts_attempts: whether it reads max_attempts though it has no gate.
    """

    name: str
    summary: str
    proves: str
    mechanism: type[Mechanism]
    plan: Callable[[RunSettings, int], Mechanism]
    defaults: Callable[[str, float], Mapping[str, Any]]
    options: type = NoOptions
    gate: str = "none"
    unused: Mapping[str, str] = field(default_factory=dict)
    unused_options: Callable[[RunSettings], Mapping[str, str]] = lambda settings: {}
    accountants: Callable[[RunSettings], tuple[str, ...]] = lambda settings: ACCOUNTANTS
    refuses: Callable[[RunSettings], str | None] = lambda settings: None
    target: Callable[[RunSettings], float | None] = lambda settings: (
        settings.epsilon if settings.noise_multiplier is None else None
    )
    claimed_defaults: Callable[[str, float], Mapping[str, Any]] | None = None
    best: Callable[[Recipe, float], Mapping[str, Any]] | None = None
    counts_attempts: bool = False

    @property
    def is_selective(self) -> bool:
        """Whether it is selective release, or plain DP-SGD: Poisson samples at one rate for all records."""
        return issubclass(self.mechanism, SelectiveRelease)

    def require_accountant(self, settings: RunSettings) -> None:
        """Refuse an accountant that cannot prove such a run, before anything is calibrated by it."""
        allowed = self.accountants(settings)
        if settings.accountant not in allowed:
            raise InputError(
                f"accountant={settings.accountant!r} is not allowed for method={self.name!r} with these settings: the "
                f"proof is by {' or '.join(allowed)}. Use that one."
            )
