"""What a run has spent, recomputed from its ledger by a fresh accountant and from nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

from dp_accounting import ComposedDpEvent, DpEvent, GaussianDpEvent, PrivacyAccountant

from sluice import validate
from sluice.accounting.paper import CLAIMED_LABEL, Reading, claimed_account
from sluice.accounting.pld_accountant import SelectivePLDAccountant
from sluice.accounting.rdp_accountant import SelectiveRdpAccountant
from sluice.errors import DataError, InputError
from sluice.gate import ClippingBiasGate
from sluice.ledger_records import LedgerContents, LedgerHeader
from sluice.mechanism import Mechanism

_ACCOUNTANTS = {"pld": SelectivePLDAccountant, "rdp": SelectiveRdpAccountant}


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A figure that somebody claims for such a run and nobody has proved. It is never called epsilon."""

    label: str
    reading: str
    value: float


@dataclass(frozen=True, kw_only=True)
class Spending:
    """What one run, or several together, have spent at ``delta``.

    ``epsilon`` is None exactly where nothing is proved for the mechanism; then there may be ``claims``.
    """

    delta: float
    epsilon: float | None
    claims: tuple[Claim, ...] = ()


def mechanism_of(header: LedgerHeader) -> Mechanism:
    """The mechanism that the first line of a ledger describes."""
    try:
        return Mechanism.from_dict(header.mechanism)
    except (InputError, TypeError, OverflowError) as error:
        raise DataError(f"the mechanism in the ledger's first line cannot be read: {error}") from error


def event_of(contents: LedgerContents) -> DpEvent:
    """The event of all that was spent, releases that a crash made count included."""
    return mechanism_of(contents.header).event_after(contents.spent)


def spending(contents: LedgerContents, *, delta: float | None = None) -> Spending:
    """What a run has spent, at its own delta unless another is given.

    Guarantee:
        ``epsilon`` is an upper bound under adding or removing one record (docs/accounting.md) for what the ledger
        says was released, or None where the gate is not covered by a proof.
    """
    return joint_spending([contents], delta=delta)


def joint_spending(runs: Sequence[LedgerContents], *, delta: float | None = None) -> Spending:
    """What several runs on the same records have spent together, by adaptive composition.

    Guarantee:
        As for :func:`spending`, for whoever sees all of the runs. One run without a proof leaves all without one.
    """
    target = _common_delta(runs) if delta is None else delta
    validate.open_fraction(delta=target)
    if not all(mechanism_of(run.header).provable for run in runs):
        return Spending(delta=target, epsilon=None, claims=_claims(runs[0], target) if len(runs) == 1 else ())
    kinds = {run.header.accountant for run in runs}
    event = ComposedDpEvent([event_of(run) for run in runs])
    return Spending(delta=target, epsilon=_epsilon(event, "pld" if kinds == {"pld"} else "rdp", target))


def epsilon_over_releases(
    contents: LedgerContents, *, counts: Sequence[int], delta: float | None = None
) -> list[float | None]:
    """The epsilon (or None) after each of these numbers of releases."""
    mechanism, header = mechanism_of(contents.header), contents.header
    if not mechanism.provable:
        return [None for _ in counts]
    target = header.delta if delta is None else delta
    return [_epsilon(mechanism.event_after(count), header.accountant, target) for count in counts]


def _epsilon(event: DpEvent, accountant: str, delta: float) -> float:
    fresh: PrivacyAccountant = _ACCOUNTANTS[accountant]()
    return float(fresh.compose(event).get_epsilon(delta))


def _common_delta(runs: Sequence[LedgerContents]) -> float:
    deltas = sorted({run.header.delta for run in runs})
    if len(deltas) != 1:
        listed = ", ".join(str(delta) for delta in deltas)
        raise InputError(f"delta is needed: the runs report at different ones ({listed}). Choose one with --delta.")
    return deltas[0]


def _claims(contents: LedgerContents, delta: float) -> tuple[Claim, ...]:
    mechanism = mechanism_of(contents.header)
    gate = mechanism.gate
    if not isinstance(gate, ClippingBiasGate) or gate.gate_noise is None or not contents.spent:
        return ()
    claims = []
    for reading in get_args(Reading):
        account = claimed_account(
            sample_rate=mechanism.sample_rate,
            noise_multiplier=mechanism.noise_multiplier,
            gate_noise=gate.gate_noise,
            beta=gate.beta,
            clip_range=gate.clip_range,
            reading=reading,
            once=ComposedDpEvent([GaussianDpEvent(multiplier) for multiplier in mechanism.preparation]),
        )
        value = account.claimed_epsilon(releases=contents.spent, delta=delta)
        claims.append(Claim(label=CLAIMED_LABEL, reading=reading, value=value))
    return tuple(claims)
