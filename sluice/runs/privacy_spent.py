"""What a run costs, recomputed from its ledger by a fresh accountant and from nothing else.

A run is charged for all releases that its mechanism promises, however many were made: why it ended early may depend on
what was released, or on the attempts that it took, and only the cost of the whole covers that (docs/accounting.md,
sections 3.5 and 5). A run without a planned end is charged by stages (section 12.1).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sluice._base import validate
from sluice._base.errors import DataError, InputError
from sluice.accounting import ACCOUNTANTS, create_accountant
from sluice.accounting.dpa import ComposedDpEvent
from sluice.mechanism.base import Claim, Mechanism
from sluice.mechanism.registry import mechanism_from_dict
from sluice.runs.ledger_entries import LedgerContents, LedgerHeader


@dataclass(frozen=True, kw_only=True)
class PrivacySpent:
    """What one run, or several together, cost at ``delta``: all their planned releases, made or not.

    ``epsilon`` is None exactly where nothing is proved for the mechanism; then there may be ``claims``.
    """

    delta: float
    epsilon: float | None
    claims: tuple[Claim, ...] = ()


def mechanism_of(header: LedgerHeader) -> Mechanism:
    """What the first line of a ledger promises."""
    try:
        return mechanism_from_dict(header.mechanism)
    except (InputError, TypeError, OverflowError) as error:
        raise DataError(f"the mechanism in the ledger's first line cannot be read: {error}") from error


def spending(contents: LedgerContents, *, delta: float | None = None) -> PrivacySpent:
    """What a run costs, at its own delta unless another is given.

    Guarantee:
        ``epsilon`` is an upper bound under adding or removing one record (docs/accounting.md) for all that the run
        has released and may yet release, whenever and for whatever reason it stops; None where no proof covers
        the mechanism.
    """
    return joint_spending([contents], delta=delta)


def joint_spending(runs: Sequence[LedgerContents], *, delta: float | None = None) -> PrivacySpent:
    """What several runs on the same records cost together, by adaptive composition.

    Guarantee:
        As for :func:`spending`, for whoever sees all of the runs. One run without a proof leaves all without one.
    """
    target = _common_delta(runs) if delta is None else delta
    validate.open_fraction(delta=target)
    mechanisms = [mechanism_of(run.header) for run in runs]
    if len(runs) == 1:
        return _single_spending(mechanisms[0], runs[0], target)
    if not all(mechanism.provable for mechanism in mechanisms):
        return PrivacySpent(delta=target, epsilon=None)
    return PrivacySpent(delta=target, epsilon=_joint_epsilon(mechanisms, runs, target))


def _single_spending(mechanism: Mechanism, run: LedgerContents, delta: float) -> PrivacySpent:
    epsilon = None
    if mechanism.provable:
        epsilon = mechanism.epsilon_spent(run.spent, delta=delta, accountant=run.header.accountant)
    has_claims = epsilon is None or mechanism.claims_beside_proof
    claims = mechanism.claims_after(mechanism.covered_releases(run.spent), delta=delta) if has_claims else ()
    return PrivacySpent(delta=delta, epsilon=epsilon, claims=claims)


def _joint_epsilon(mechanisms: Sequence[Mechanism], runs: Sequence[LedgerContents], delta: float) -> float:
    """By one accountant that reads all of them, else by basic composition with an equal share of delta for each."""
    asked = {run.header.accountant for run in runs}
    common = [
        name
        for name in ACCOUNTANTS
        if all(mechanism.composable and name in mechanism.accountants for mechanism in mechanisms)
        and (name == "rdp" or asked == {"pld"})
    ]
    if not common:
        share = delta / len(runs)
        return sum(
            mechanism.epsilon_spent(run.spent, delta=share, accountant=run.header.accountant)
            for mechanism, run in zip(mechanisms, runs, strict=True)
        )
    whole = ComposedDpEvent([mechanism.dp_event for mechanism in mechanisms])
    return float(create_accountant(common[0]).compose(whole).get_epsilon(delta))


def epsilon_over_releases(
    contents: LedgerContents, *, counts: Sequence[int], delta: float | None = None
) -> list[float | None]:
    """The epsilon (or None) of a run that was planned to stop after each of these numbers of releases.

    It says nothing about a run with another plan that happened to stop there: that one costs what `spending` says.
    """
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
