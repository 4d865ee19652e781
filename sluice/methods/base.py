"""What a method is: a name, what it proves, its settings for each data set, and the promise that it makes of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from sluice._base.errors import InputError
from sluice.mechanism.base import Promise

if TYPE_CHECKING:
    from sluice.experiments.settings import TrainSettings


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
        promise: the class of its mechanism.
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
        counts_attempts: whether it reads max_attempts though it has no gate.
    """

    name: str
    summary: str
    proves: str
    promise: type[Promise]
    plan: Callable[[TrainSettings, int], Promise]
    defaults: Callable[[str, float], Mapping[str, Any]]
    options: type = NoOptions
    gate: str = "none"
    unused: Mapping[str, str] = field(default_factory=dict)
    unused_options: Callable[[TrainSettings], Mapping[str, str]] = lambda settings: {}
    accountants: Callable[[TrainSettings], tuple[str, ...]] = lambda settings: ("pld", "rdp")
    refuses: Callable[[TrainSettings], str | None] = lambda settings: None
    target: Callable[[TrainSettings], float | None] = lambda settings: (
        settings.epsilon if settings.noise_multiplier is None else None
    )
    claimed_defaults: Callable[[str, float], Mapping[str, Any]] | None = None
    counts_attempts: bool = False

    def require_accountant(self, settings: TrainSettings) -> None:
        """Refuse an accountant that cannot prove such a run, before anything is calibrated by it."""
        allowed = self.accountants(settings)
        if settings.accountant not in allowed:
            raise InputError(
                f"accountant={settings.accountant!r} is not allowed for method={self.name!r} with these settings: the "
                f"proof is by {' or '.join(allowed)}. Use that one."
            )
