"""Accounting for DPSUR, whose gate looks at the released weights themselves.

One release of DPSUR: draw a Poisson batch, make the noisy step ``w``, draw a second Poisson batch for validation, and
keep ``w`` when ``clip(loss change, -C_v, C_v) + N(0, (2 C_v sigma_v)^2) < beta C_v``; otherwise forget it and start
again. Three accounts of it are offered, and docs/accounting.md, section 8, derives the third:

- ``claimed``: its authors' own, a sampled Gaussian for the step and one for the test, nothing for the selection;
- ``claimed (paper)``: the DPSR-CG paper's, the sampling rate inflated by ``rho``, nothing for the test;
- ``provable``: the released law is ``f(w) a(w) / Z``, with ``a`` the probability of acceptance given ``w``, and the
  bounds here hold for every ``a`` that the gate's own noise and clipping allow.

The bounds are for the algorithm as its paper prints it: both losses on the *same* fresh validation batch, the step
divided by a public constant, and the optimizer's state restored on rejection. The published code compares with a
stored, un-noised loss of an older batch and keeps the momentum of rejected steps; nothing per release covers that.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal, get_args

import attr
import dp_accounting as dpa
import numpy as np
from dp_accounting import rdp
from scipy.special import log_ndtr

from sluice import validate
from sluice.accounting.dpsur_bound import SelfSelection
from sluice.accounting.events import as_release
from sluice.accounting.paper import (
    CLASSICAL_ORDERS,
    ClaimedAccount,
    claimed_sample_rate,
    classical_renyi,
    tail_ratio,
)
from sluice.accounting.selective_rdp import renyi_divergences
from sluice.errors import InputError

DpsurReading = Literal["table", "code"]

#: Orders outside are left out, which only loosens the bound: the best one is far inside.
_USEFUL_ORDERS = (1.1, 512.0)


@dataclass(frozen=True, kw_only=True)
class Dpsur:
    """One release of DPSUR. Every field is public.

    Attributes:
        sample_rate: rate of the training batch.
        noise_multiplier: noise of the step [sigma_t].
        validation_rate: rate of the validation batch, drawn from the training set.
        validation_noise: noise of the test [sigma_v], whose standard deviation is ``2 * C_v * sigma_v``.
        beta: threshold of the test in units of the loss clip ``C_v``.
    """

    sample_rate: float
    noise_multiplier: float
    validation_rate: float
    validation_noise: float
    beta: float = -1.0

    def __post_init__(self) -> None:
        validate.fraction(sample_rate=self.sample_rate, validation_rate=self.validation_rate)
        validate.positive(noise_multiplier=self.noise_multiplier, validation_noise=self.validation_noise)
        validate.finite(beta=self.beta)

    @property
    def log_acceptance_min(self) -> float:
        return float(log_ndtr((self.beta - 1) / (2 * self.validation_noise)))

    @property
    def log_acceptance_max(self) -> float:
        return float(log_ndtr((self.beta + 1) / (2 * self.validation_noise)))

    @property
    def spread(self) -> float:
        """The largest over the smallest probability of acceptance: what the data can do to the gate, at most."""
        return math.exp(self.log_acceptance_max - self.log_acceptance_min)

    @property
    def step_event(self) -> dpa.DpEvent:
        return dpa.PoissonSampledDpEvent(self.sample_rate, dpa.GaussianDpEvent(self.noise_multiplier))

    @property
    def full_batch(self) -> Dpsur:
        """The same release with every record in every batch: what the noise alone protects, without sampling."""
        return replace(self, sample_rate=1.0, validation_rate=1.0)

    @property
    def test_event(self) -> dpa.DpEvent:
        return dpa.PoissonSampledDpEvent(self.validation_rate, dpa.GaussianDpEvent(self.validation_noise))


def claimed_dpsur_inflation(*, validation_noise: float, beta: float = -1.0, reading: DpsurReading = "table") -> float:
    """The DPSR-CG paper's ``rho`` for DPSUR's gate, with the whole clip range as the shift of one record.

    ``"table"`` reproduces the paper's table, ``0.5 / (1 - Phi(1 / sigma_v))`` at beta = -1; ``"code"`` is what its
    ablation is run with, which forgets beta.
    """
    validate.positive(validation_noise=validation_noise)
    validate.finite(beta=beta)
    validate.one_of(get_args(DpsurReading), reading=reading)
    farthest = 1 - beta if reading == "table" else 1.0
    return tail_ratio(farthest=farthest, shift=2.0, noise_std=2 * validation_noise)


def claimed_dpsur_account(mechanism: Dpsur, *, once: dpa.DpEvent | None = None) -> ClaimedAccount:
    """What DPSUR's authors charge for an accepted update. A claim: the selection itself is charged nothing."""
    update = dpa.ComposedDpEvent([mechanism.step_event, mechanism.test_event])
    return ClaimedAccount(update=update, once=once or dpa.NoOpDpEvent())


def paper_dpsur_account(
    mechanism: Dpsur, *, reading: DpsurReading = "table", once: dpa.DpEvent | None = None
) -> ClaimedAccount:
    """What the DPSR-CG paper charges DPSUR for an accepted update. A claim: ``q * rho`` in place of ``q``."""
    inflation = claimed_dpsur_inflation(
        validation_noise=mechanism.validation_noise, beta=mechanism.beta, reading=reading
    )
    rate = claimed_sample_rate(sample_rate=mechanism.sample_rate, inflation=inflation)
    update = dpa.PoissonSampledDpEvent(rate, dpa.GaussianDpEvent(mechanism.noise_multiplier))
    return ClaimedAccount(update=update, once=once or dpa.NoOpDpEvent())


def conditioning_renyi(mechanism: Dpsur, orders: Sequence[float] = CLASSICAL_ORDERS) -> np.ndarray:
    """Renyi bound of one release at each order, by conditioning on acceptance: simple, and huge.

    Guarantee:
        At least the divergence between the released laws of any two data sets that differ in one record, in both
        directions (docs/accounting.md, section 8.2).
    """
    step = as_release(mechanism.step_event)
    assert step is not None
    return _selection(mechanism).conditioning_renyi(np.array(orders), renyi_divergences(step, np.array(orders)))


@lru_cache(maxsize=64)
def provable_renyi(mechanism: Dpsur, orders: tuple[float, ...] = CLASSICAL_ORDERS) -> np.ndarray:
    """Renyi bound of one release at each order: the smaller of the two bounds of section 8, order by order.

    Guarantee:
        At least the divergence between the released laws of any two data sets that differ in one record, in both
        directions (docs/accounting.md, sections 8.2 and 8.3).
    """
    selection = _selection(mechanism)
    useful = [order for order in orders if _USEFUL_ORDERS[0] <= order <= _USEFUL_ORDERS[1]]
    centred = np.array([selection.centred_renyi(order) for order in useful])
    bound = dict(zip(useful, np.minimum(conditioning_renyi(mechanism, useful), centred), strict=True))
    return np.array([bound.get(order, math.inf) for order in orders])


@attr.s(frozen=True, kw_only=True, auto_attribs=True)
class DpsurDpEvent(dpa.DpEvent):
    """One release of DPSUR, as its paper prints it. `SelectiveRdpAccountant` reads it, by `provable_renyi`."""

    release: Dpsur


def provable_epsilon(
    mechanism: Dpsur,
    *,
    releases: int,
    delta: float,
    max_attempts: int | None = None,
    once: dpa.DpEvent | None = None,
) -> float:
    """An epsilon that holds for DPSUR as its paper prints it. It is far above what its authors claim.

    Guarantee:
        (epsilon, delta)-DP under adding or removing one record, for an observer who sees the accepted weights and
        nothing of the rejected attempts: not their number, not their timing.

    Args:
        max_attempts: the cap on attempts of one release, if there is one; giving up is charged to delta and epsilon.
        once: what was released besides, such as feature statistics.
    """
    validate.positive_integer(releases=releases)
    validate.open_fraction(delta=delta)
    given_up = _probability_of_giving_up(mechanism, max_attempts=max_attempts)
    delta_left = delta - releases * given_up
    if delta_left <= 0:
        raise InputError(
            f"max_attempts={max_attempts} is not allowed: giving up alone costs more than delta={delta} over "
            f"{releases} releases. Allow more attempts."
        )
    renyi = releases * provable_renyi(mechanism) + classical_renyi(once or dpa.NoOpDpEvent())
    # What is published is "gave up" or, with probability at least 1 - given_up, exactly what it would have been.
    cap_cost = -releases * math.log1p(-given_up)
    return float(rdp.compute_epsilon(CLASSICAL_ORDERS, renyi, delta_left)[0]) + cap_cost


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
    accountant = rdp.RdpAccountant()
    accountant.compose(dpa.dp_event.RepeatAndSelectDpEvent(step, mean=mean_attempts, shape=1), releases)
    return float(accountant.get_epsilon(delta))


@dataclass(frozen=True, kw_only=True)
class DpsurComparison:
    """Every figure there is for one DPSUR run. Only ``provable`` and ``provable_full_batch`` hold."""

    claimed_authors: float
    claimed_paper_table: float
    claimed_paper_code: float
    plain_dpsgd: float
    provable: float
    provable_by_conditioning: float
    provable_full_batch: float
    repeat_and_select: float

    @property
    def verdict(self) -> str:
        """One plain sentence on what can be proved."""
        factor = self.provable / self.claimed_authors
        return (
            f"provable epsilon {self.provable:.3g}, {factor:.3g} times the {self.claimed_authors:.3g} that DPSUR "
            f"claims" + (": too large to mean much." if self.provable > 10 else ".")
        )


def compare_dpsur(mechanism: Dpsur, *, releases: int, delta: float, once: dpa.DpEvent | None = None) -> DpsurComparison:
    """Put the claims for a DPSUR run beside what can be proved of it."""
    provable = provable_epsilon(mechanism, releases=releases, delta=delta, once=once)
    once = once or dpa.NoOpDpEvent()
    conditioning = releases * conditioning_renyi(mechanism) + classical_renyi(once)
    return DpsurComparison(
        claimed_authors=claimed_dpsur_account(mechanism, once=once).claimed_epsilon(releases=releases, delta=delta),
        claimed_paper_table=paper_dpsur_account(mechanism, once=once).claimed_epsilon(releases=releases, delta=delta),
        claimed_paper_code=paper_dpsur_account(mechanism, reading="code", once=once).claimed_epsilon(
            releases=releases, delta=delta
        ),
        plain_dpsgd=ClaimedAccount(update=mechanism.step_event, once=once).claimed_epsilon(
            releases=releases, delta=delta
        ),
        provable=provable,
        provable_by_conditioning=float(rdp.compute_epsilon(CLASSICAL_ORDERS, conditioning, delta)[0]),
        provable_full_batch=provable_epsilon(mechanism.full_batch, releases=releases, delta=delta, once=once),
        repeat_and_select=repeat_and_select_epsilon(
            sample_rate=mechanism.sample_rate,
            noise_multiplier=mechanism.noise_multiplier,
            releases=releases,
            delta=delta,
            mean_attempts=math.exp(-mechanism.log_acceptance_min),
        ),
    )


def _selection(mechanism: Dpsur) -> SelfSelection:
    return SelfSelection(
        sample_rate=mechanism.sample_rate,
        noise_multiplier=mechanism.noise_multiplier,
        validation_rate=mechanism.validation_rate,
        spread=mechanism.spread,
    )


def _probability_of_giving_up(mechanism: Dpsur, *, max_attempts: int | None) -> float:
    if max_attempts is None:
        return 0.0
    validate.positive_integer(max_attempts=max_attempts)
    return math.exp(max_attempts * math.log1p(-math.exp(mechanism.log_acceptance_min)))
