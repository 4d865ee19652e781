"""Gates as plain data: what a ledger keeps of them, so that anyone can account for the run again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from sluice._base import codec as serial
from sluice._base import validate
from sluice._base.errors import InputError
from sluice.accounting.acceptance import Acceptance
from sluice.mechanism.attempt import Attempt, DecisionNoise, ReferenceState
from sluice.mechanism.gates import ClippingBiasGate, CoinGate, Gate

_KINDS: dict[str, type[ClippingBiasGate] | type[CoinGate]] = {"clipping-bias": ClippingBiasGate, "coin": CoinGate}
# Fields that gates of earlier versions do not have; their defaults say what those did.
_LATER = ("metric_error",)
_STATED = ("acceptance", "reference_noise", "max_attempts", "provable")


@dataclass(frozen=True, kw_only=True)
class StatedGate(Gate):
    """What is known of a gate of somebody's own once its run is over: what it stated, enough to account for it."""

    stated: Acceptance
    reference_noise: float | None
    max_attempts: int | None
    stated_provable: bool

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


def gate_to_dict(gate: Gate) -> dict[str, Any]:
    """Plain data for strict JSON. A gate of an unknown class is described by what it states."""
    for kind, known in _KINDS.items():
        if type(gate) is known:
            return {"gate": kind, **{key: _encoded(value) for key, value in asdict(gate).items()}}
    return {
        "gate": "stated",
        "acceptance": asdict(gate.acceptance),
        "reference_noise": _encoded(gate.reference_noise),
        "max_attempts": gate.max_attempts,
        "provable": gate.provable,
    }


def gate_from_dict(data: Mapping[str, Any]) -> Gate:
    """The inverse of ``gate_to_dict``; unknown gates and keys are refused."""
    if not isinstance(data, Mapping) or "gate" not in data:
        raise InputError(f"gate={data!r} is not allowed: it must be an object with a key 'gate'.")
    kind = data["gate"]
    if kind == "stated":
        serial.require_keys(data, what="gate", required=("gate", *_STATED))
        acceptance = data["acceptance"]
        serial.require_keys(acceptance, what="acceptance", required=[field.name for field in fields(Acceptance)])
        return StatedGate(
            stated=Acceptance(**acceptance),
            reference_noise=serial.decode_float(data["reference_noise"]),
            max_attempts=data["max_attempts"],
            stated_provable=bool(data["provable"]),
        )
    validate.one_of((*_KINDS, "stated"), gate=kind)
    known = _KINDS[kind]
    names = [field.name for field in fields(known)]
    required = [name for name in names if name not in _LATER]
    serial.require_keys(data, what="gate", required=("gate", *required), optional=_LATER)
    return known(**{name: serial.decode_float(data[name]) for name in names if name in data})


def _encoded(value: Any) -> Any:
    return serial.encode_float(value) if isinstance(value, float) else value
