"""What accounting and calibration need of a gate; the gates themselves are in `sluice.mechanism.gates`."""

from __future__ import annotations

from typing import Protocol, Self, TypeGuard, runtime_checkable

from sluice._base.errors import InputError
from sluice.accounting.acceptance import Acceptance


class AccountedGate(Protocol):
    """Any gate whose noises are set."""

    @property
    def provable(self) -> bool: ...

    @property
    def acceptance(self) -> Acceptance: ...

    @property
    def reference_noise(self) -> float | None: ...

    @property
    def max_attempts(self) -> int | None: ...


class TunableGate(AccountedGate, Protocol):
    """A gate that leaves the choice of its noises to calibration wherever they are None."""

    @property
    def gate_noise(self) -> float | None: ...

    @property
    def reference_decay(self) -> float: ...

    def with_noise(self, *, gate_noise: float, reference_noise: float) -> Self: ...


@runtime_checkable
class ClaimedGate(Protocol):
    """A gate for which the DPSR-CG paper claims figures: a threshold and a clip, in units of the metric bound."""

    @property
    def beta(self) -> float: ...

    @property
    def clip_range(self) -> float: ...

    @property
    def gate_noise(self) -> float | None: ...


def is_tunable(gate: object) -> TypeGuard[TunableGate]:
    wanted = ("gate_noise", "reference_noise", "reference_decay", "with_noise")
    return gate is not None and all(hasattr(gate, name) for name in wanted)


def require_provable(gate: AccountedGate) -> None:
    """Refuse a gate whose ``acceptance`` does not cover what it does: whatever is computed from that is no epsilon."""
    if not getattr(gate, "provable", False):
        raise InputError(
            "gate.provable=False is not allowed here: no epsilon is proved for a gate that compares with a hidden reference, and "
            "figures claimed for it are refuted (docs/accounting.md, section 4). Use a public one (hidden_reference=False), or "
            "claimed_account, whose figures are claims."
        )
