"""What a run has spent, recomputed from its ledger by a fresh accountant and from nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dp_accounting import ComposedDpEvent

from sluice import validate
from sluice.accounting import create_accountant
from sluice.errors import DataError, InputError
from sluice.ledger_records import LedgerContents, LedgerHeader
from sluice.methods import promise_from_dict
from sluice.promise import Claim, Promise


@dataclass(frozen=True, kw_only=True)
class Spending:
    """What one run, or several together, have spent at ``delta``.

    ``epsilon`` is None exactly where nothing is proved for the mechanism; then there may be ``claims``.
    """

    delta: float
    epsilon: float | None
    claims: tuple[Claim, ...] = ()


def mechanism_of(header: LedgerHeader) -> Promise:
    """What the first line of a ledger promises."""
    try:
        return promise_from_dict(header.mechanism)
    except (InputError, TypeError, OverflowError) as error:
        raise DataError(f"the mechanism in the ledger's first line cannot be read: {error}") from error


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
    promises = [mechanism_of(run.header) for run in runs]
    if len(runs) == 1:
        return _single_spending(promises[0], runs[0], target)
    if not all(promise.provable for promise in promises):
        return Spending(delta=target, epsilon=None)
    return Spending(delta=target, epsilon=_joint_epsilon(promises, runs, target))


def _single_spending(promise: Promise, run: LedgerContents, delta: float) -> Spending:
    epsilon = None
    if promise.provable:
        epsilon = promise.epsilon_after(run.spent, delta=delta, accountant=run.header.accountant)
    has_claims = epsilon is None or promise.claims_beside_proof
    return Spending(
        delta=delta, epsilon=epsilon, claims=promise.claims_after(run.spent, delta=delta) if has_claims else ()
    )


def _joint_epsilon(promises: Sequence[Promise], runs: Sequence[LedgerContents], delta: float) -> float:
    """By one accountant that reads all of them, else by basic composition with an equal share of delta for each."""
    asked = {run.header.accountant for run in runs}
    common = [
        name
        for name in ("pld", "rdp")
        if all(promise.composable and name in promise.accountants for promise in promises)
        and (name == "rdp" or asked == {"pld"})
    ]
    if not common:
        share = delta / len(runs)
        return sum(
            promise.epsilon_after(run.spent, delta=share, accountant=run.header.accountant)
            for promise, run in zip(promises, runs, strict=True)
        )
    events = [promise.event_after(run.spent) for promise, run in zip(promises, runs, strict=True)]
    return float(create_accountant(common[0]).compose(ComposedDpEvent(events)).get_epsilon(delta))


def epsilon_over_releases(
    contents: LedgerContents, *, counts: Sequence[int], delta: float | None = None
) -> list[float | None]:
    """The epsilon (or None) after each of these numbers of releases."""
    mechanism, header = mechanism_of(contents.header), contents.header
    if not mechanism.provable:
        return [None for _ in counts]
    target = header.delta if delta is None else delta
    return [mechanism.epsilon_after(count, delta=target, accountant=header.accountant) for count in counts]


def _common_delta(runs: Sequence[LedgerContents]) -> float:
    deltas = sorted({run.header.delta for run in runs})
    if len(deltas) != 1:
        listed = ", ".join(str(delta) for delta in deltas)
        raise InputError(f"delta is needed: the runs report at different ones ({listed}). Choose one with --delta.")
    return deltas[0]
