"""A gate of somebody's own, as far as a ledger keeps it: what it states, so that anyone can account for the run again."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from sluice._base.codec import is_readable, readable
from sluice._base.errors import InputError
from sluice.accounting.acceptance import Acceptance
from sluice.mechanism.attempt import Attempt, DecisionNoise, ReferenceState
from sluice.mechanism.gates import Gate


@readable
@dataclass(frozen=True, kw_only=True)
class StatedGate(Gate):
    """What is known of a gate of somebody's own once its run is over: what it stated, enough to account for it."""

    kind: ClassVar[str] = "stated"

    stated: Acceptance = field(metadata={"key": "acceptance"})
    reference_noise: float | None
    max_attempts: int | None
    stated_provable: bool = field(metadata={"key": "provable"})

    @property
    def acceptance(self) -> Acceptance:
        return self.stated

    @property
    def provable(self) -> bool:
        return self.stated_provable

    def _refuse(self) -> InputError:
        return InputError(
            "this gate was read from a description and cannot decide: give make_private the gate object itself."
        )

    def measure(self, norms: Any) -> Any:
        raise self._refuse()

    def first_reference(self) -> ReferenceState:
        raise self._refuse()

    def begin(self, reference: ReferenceState, noise: DecisionNoise, *, attempts_left: int | None = None) -> Attempt:
        raise self._refuse()

    def next_reference(self, reference: ReferenceState, raw_metric: float, noise: DecisionNoise) -> ReferenceState:
        raise self._refuse()


def stated(gate: Gate) -> Gate:
    """The gate as a ledger keeps it: itself, or what it states where its class is not one of Sluice's own."""
    return gate if is_readable(type(gate)) else _statement(gate, provable=gate.provable)


def as_if_provable(gate: Gate) -> Gate:
    """The gate; or, where nothing is proved for it, one that states the same and whose epsilon is a claim about it."""
    return gate if gate.provable else _statement(gate, provable=True)


def _statement(gate: Gate, *, provable: bool) -> StatedGate:
    return StatedGate(
        stated=gate.acceptance,
        reference_noise=gate.reference_noise,
        max_attempts=gate.max_attempts,
        stated_provable=provable,
    )
