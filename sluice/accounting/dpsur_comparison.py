"""Every figure that there is for a DPSUR run, side by side: what is claimed, what is proved, and yardsticks."""

from __future__ import annotations

import math
from dataclasses import dataclass

import dp_accounting

from sluice._base import validate
from sluice._base.errors import InputError
from sluice._base.rounding import rounded_up
from sluice.accounting import dpa
from sluice.accounting.claims import CLASSICAL_ORDERS, ClaimedAccount, classical_renyi
from sluice.accounting.dpsur import (
    Dpsur,
    DpsurAttemptDpEvent,
    claimed_dpsur_account,
    conditioning_renyi,
    enough_attempts,
    give_up_probability,
    paper_dpsur_account,
    provable_renyi,
)
from sluice.accounting.pld_accountant import SelectivePLDAccountant
from sluice.accounting.renyi_conversion import epsilon_and_order


def epsilon_by_releases(
    mechanism: Dpsur,
    *,
    releases: int,
    delta: float,
    max_attempts: int | None = None,
    once: dpa.DpEvent | None = None,
) -> float:
    """An epsilon that holds for DPSUR as its paper prints it, by the law of what is released. It is large.

    Guarantee:
        (epsilon, delta)-DP under adding or removing one record, for an observer who sees the accepted weights and
        nothing of the rejected attempts: not their number, not their timing. Infinite where the cap on attempts may be
        reached with a probability above delta.

    Args:
        max_attempts: the cap on attempts of the whole run, if there is one; it is charged to delta and epsilon.
        once: what was released besides, such as feature statistics.
    """
    validate.positive_integer(releases=releases)
    validate.open_fraction(delta=delta)
    given_up = 0.0
    if max_attempts is not None:
        given_up = give_up_probability(mechanism, releases=releases, max_attempts=max_attempts)
    if given_up >= delta:
        return math.inf
    renyi = releases * provable_renyi(mechanism) + classical_renyi(once or dpa.NoOpDpEvent())
    return epsilon_and_order(CLASSICAL_ORDERS, renyi, delta=delta - given_up)[0] - math.log1p(-given_up)


def epsilon_by_attempts(mechanism: Dpsur, *, max_attempts: int, delta: float, once: dpa.DpEvent | None = None) -> float:
    """An epsilon that holds for DPSUR as its paper prints it, if the run ends after ``max_attempts`` attempts at the latest.

    Guarantee:
        (epsilon, delta)-DP under adding or removing one record, for an observer who sees the accepted weights and which
        attempts were accepted.
    """
    validate.positive_integer(max_attempts=max_attempts)
    accountant = SelectivePLDAccountant()
    accountant.compose(DpsurAttemptDpEvent(attempt=mechanism), max_attempts)
    accountant.compose(once or dpa.NoOpDpEvent())
    return accountant.get_epsilon(delta)


def repeat_and_select_epsilon(
    *, sample_rate: float, noise_multiplier: float, releases: int, delta: float, mean_attempts: float
) -> float:
    """dp-accounting's generic bound for "repeat a geometric number of times and keep the best", for comparison.

    It is an upper bound for that mechanism, whose number of trials does not depend on the data. Neither DPSUR nor the
    clipping-bias gate stops that way, so this figure is a yardstick and not an account of either.
    """
    validate.fraction(sample_rate=sample_rate)
    validate.positive(noise_multiplier=noise_multiplier)
    validate.positive_integer(releases=releases)
    validate.open_fraction(delta=delta)
    if not 1 <= mean_attempts < math.inf:
        raise InputError(f"mean_attempts={mean_attempts} is not allowed: it must be a finite number >= 1.")
    step = dpa.PoissonSampledDpEvent(sample_rate, dpa.GaussianDpEvent(noise_multiplier))
    accountant = dp_accounting.rdp.RdpAccountant()
    accountant.compose(dpa.RepeatAndSelectDpEvent(step, mean=mean_attempts, shape=1), releases)
    return float(accountant.get_epsilon(delta))


@dataclass(frozen=True, kw_only=True)
class DpsurComparison:
    """Every figure there is for one DPSUR run. Those that start with ``proved`` hold, and no others."""

    max_attempts: int
    claimed_authors: float
    claimed_paper_table: float
    claimed_paper_code: float
    plain_dpsgd: float
    proved_by_attempts: float
    proved_by_releases: float
    proved_by_conditioning: float
    proved_full_batch: float
    repeat_and_select: float

    @property
    def verdict(self) -> str:
        """One plain sentence on what can be proved."""
        factor = self.proved_by_attempts / self.claimed_authors
        return (
            f"with at most {self.max_attempts} attempts, epsilon {rounded_up(self.proved_by_attempts)} is proved, {factor:.3g} times "
            f"the {self.claimed_authors:.3g} that DPSUR claims; without a cap on attempts, {rounded_up(self.proved_by_releases)}."
        )


def compare_dpsur(
    mechanism: Dpsur, *, releases: int, delta: float, max_attempts: int | None = None, once: dpa.DpEvent | None = None
) -> DpsurComparison:
    """Put the claims for a DPSUR run beside what can be proved of it, with `enough_attempts` where no cap is given."""
    cap = enough_attempts(mechanism, releases=releases) if max_attempts is None else max_attempts
    once = once or dpa.NoOpDpEvent()
    conditioning = releases * conditioning_renyi(mechanism) + classical_renyi(once)

    def claimed(account: ClaimedAccount) -> float:
        return account.claimed_epsilon(releases=releases, delta=delta)

    return DpsurComparison(
        max_attempts=cap,
        claimed_authors=claimed(claimed_dpsur_account(mechanism, once=once)),
        claimed_paper_table=claimed(paper_dpsur_account(mechanism, once=once)),
        claimed_paper_code=claimed(paper_dpsur_account(mechanism, reading="code", once=once)),
        plain_dpsgd=claimed(ClaimedAccount(update=mechanism.step_event, once=once)),
        proved_by_attempts=epsilon_by_attempts(mechanism, max_attempts=cap, delta=delta, once=once),
        proved_by_releases=epsilon_by_releases(mechanism, releases=releases, delta=delta, once=once),
        proved_by_conditioning=epsilon_and_order(CLASSICAL_ORDERS, conditioning, delta=delta)[0],
        proved_full_batch=epsilon_by_releases(mechanism.full_batch, releases=releases, delta=delta, once=once),
        repeat_and_select=repeat_and_select_epsilon(
            sample_rate=mechanism.sample_rate,
            noise_multiplier=mechanism.noise_multiplier,
            releases=releases,
            delta=delta,
            mean_attempts=math.exp(-mechanism.log_acceptance_min),
        ),
    )
