"""The sound accountant behind Opacus's words, for training loops that are not Sluice's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from sluice._base import codec, validate
from sluice._base.errors import InputError
from sluice.accounting import ACCOUNTANTS, create_accountant
from sluice.accounting.calibration import gated_event
from sluice.accounting.events import UNGATED, SelectiveReleaseDpEvent
from sluice.accounting.gate_terms import AccountedGate, require_provable

_FORMAT = 1


class SelectiveAccountant:
    """Counts releases as Opacus's accountants count steps, and reports a sound epsilon for them.

    Call ``step`` once for each *released* update; rejected attempts are free as long as they leave no trace. Without a
    gate it accounts for plain DP-SGD.

    Args:
        gate: the gate that decides, with all its noises set; None for plain DP-SGD. One that nothing is proved for, such as
            one with a hidden reference, is refused.
        accountant: "pld" or "rdp".

    Guarantee:
        ``get_epsilon`` is an upper bound under adding or removing one record (docs/accounting.md), provided that
        batches are Poisson samples with the given rate and the gate is as described. Reading it changes nothing.
    """

    def __init__(self, *, gate: AccountedGate | None = None, accountant: str = "pld") -> None:
        validate.one_of(ACCOUNTANTS, accountant=accountant)
        if gate is not None:
            require_provable(gate)
        self._accountant = accountant
        self._gate = gate
        self._steps: list[tuple[SelectiveReleaseDpEvent, int]] = []

    @classmethod
    def mechanism(cls) -> str:
        return "selective"

    def __len__(self) -> int:
        """The number of steps, that is, of released updates."""
        return sum(count for _, count in self._steps)

    @property
    def history(self) -> list[tuple[float, float, int]]:
        """``(noise_multiplier, sample_rate, steps)`` of each stretch of equal steps."""
        return [(event.noise_multiplier, event.sampling_probability, count) for event, count in self._steps]

    def step(self, *, noise_multiplier: float, sample_rate: float) -> None:
        """Charge one released update."""
        if self._gate is None:
            event = SelectiveReleaseDpEvent(
                sampling_probability=sample_rate, noise_multiplier=noise_multiplier, acceptance=UNGATED
            )
        else:
            event = gated_event(sample_rate=sample_rate, noise_multiplier=noise_multiplier, gate=self._gate)
        if self._steps and self._steps[-1][0] == event:
            self._steps[-1] = (event, self._steps[-1][1] + 1)
        else:
            self._steps.append((event, 1))

    def get_epsilon(self, delta: float) -> float:
        """The epsilon spent so far at this delta."""
        fresh = create_accountant(self._accountant)
        for event, count in self._steps:
            fresh.compose(event, count)
        return float(fresh.get_epsilon(delta))

    def get_optimizer_hook_fn(self, sample_rate: float) -> Callable[[Any], None]:
        """A hook for Opacus's ``DPOptimizer.attach_step_hook``: one step for each update that it makes."""
        validate.fraction(sample_rate=sample_rate)

        def charge(optimizer: Any) -> None:
            # Opacus accumulates gradients over virtual batches; the effective rate is a multiple of the physical one.
            self.step(
                noise_multiplier=optimizer.noise_multiplier, sample_rate=sample_rate * optimizer.accumulated_iterations
            )

        return charge

    def state_dict(self, destination: dict[str, Any] | None = None) -> dict[str, Any]:
        state = {} if destination is None else destination
        state["format"] = _FORMAT
        state["mechanism"] = self.mechanism()
        state["accountant"] = self._accountant
        state["steps"] = [{"event": event.to_dict(), "count": count} for event, count in self._steps]
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over the steps of a saved accountant; its gate is part of each step."""
        codec.require_keys(state_dict, what="accountant state", required=("format", "mechanism", "accountant", "steps"))
        if state_dict["format"] != _FORMAT or state_dict["mechanism"] != self.mechanism():
            raise InputError(
                f"accountant state of format={state_dict['format']!r}, mechanism={state_dict['mechanism']!r} is not "
                f"allowed: it must be format {_FORMAT} of '{self.mechanism()}'."
            )
        validate.one_of(ACCOUNTANTS, accountant=state_dict["accountant"])
        steps = []
        for entry in state_dict["steps"]:
            codec.require_keys(entry, what="step", required=("event", "count"))
            validate.positive_integer(count=entry["count"])
            steps.append((SelectiveReleaseDpEvent.from_dict(entry["event"]), entry["count"]))
        self._accountant, self._steps = state_dict["accountant"], steps


def register_with_opacus() -> None:
    """Make ``opacus.accountants.create_accountant("selective")`` give a ``SelectiveAccountant``."""
    try:
        from opacus.accountants.registry import register_accountant
    except ImportError as error:
        raise InputError("Opacus is not installed: run `pip install 'sluice[opacus]'`.") from error
    register_accountant(SelectiveAccountant.mechanism(), SelectiveAccountant, force=True)
