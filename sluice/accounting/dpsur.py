"""Accounting for DPSUR, whose gate looks at the released weights themselves.

One release of DPSUR: draw a Poisson batch, make the noisy step ``w``, draw a second Poisson batch for validation, and
keep ``w`` when ``clip(loss change, -C_v, C_v) + N(0, (2 C_v sigma_v)^2) < beta C_v``; otherwise forget it and start
again. Four accounts of it are offered, and docs/accounting.md, section 8, derives the last two:

- ``claimed``: its authors' own, a sampled Gaussian for the step and one for the test, nothing for the selection;
- ``claimed (paper)``: the DPSR-CG paper's, the sampling rate inflated by ``rho``, nothing for the test;
- by releases: the released law is ``f(w) a(w) / Z``, with ``a`` the probability of acceptance given ``w``, and the
  bounds here hold for every ``a`` that the gate's own noise and clipping allow;
- by attempts: each of them is charged, accepted or not, up to a public cap on their number. Far smaller in practice.

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
import numpy as np
import scipy

from sluice._base import validate
from sluice._base.errors import InputError
from sluice.accounting import dpa
from sluice.accounting.claims import (
    CLASSICAL_ORDERS,
    ClaimedAccount,
    claimed_sample_rate,
    tail_ratio,
)
from sluice.accounting.dpsur_bound import SelfSelection
from sluice.accounting.events import as_release
from sluice.accounting.selective_rdp import renyi_divergences

DpsurReading = Literal["table", "code"]

#: The test's noise lies on a grid finer than this many standard deviations, so that a tail may begin so much earlier.
_GRID = 2.0**-29
#: The probability with which one release may need more attempts than it is allowed.
_NEXT_TO_NONE = 1e-12
#: A test that accepts less often is a mistake in the settings.
_RAREST_ACCEPTANCE = 1e-3
#: Beyond this the data decide alone and nothing is proved by releases.
_LARGEST_LOG_SPREAD = 300.0
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
    def acceptance_arguments(self) -> tuple[float, float]:
        """The smallest and the largest acceptance are the normal distribution function at these two."""
        std = 2 * self.validation_noise
        return (self.beta - 1) / std - _GRID, (self.beta + 1) / std + _GRID

    @property
    def log_acceptance_min(self) -> float:
        return float(scipy.special.log_ndtr(self.acceptance_arguments[0]))

    @property
    def log_acceptance_max(self) -> float:
        return float(scipy.special.log_ndtr(self.acceptance_arguments[1]))

    @property
    def spread(self) -> float:
        """The largest over the smallest probability of acceptance: what the data can do to the gate, at most."""
        logarithm = self.log_acceptance_max - self.log_acceptance_min
        return math.exp(logarithm) if logarithm < _LARGEST_LOG_SPREAD else math.inf

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
    if math.isinf(mechanism.spread):
        return np.full(len(orders), math.inf)
    selection = _selection(mechanism)
    useful = [order for order in orders if _USEFUL_ORDERS[0] <= order <= _USEFUL_ORDERS[1]]
    centred = np.array([selection.centred_renyi(order) for order in useful])
    bound = dict(zip(useful, np.minimum(conditioning_renyi(mechanism, useful), centred), strict=True))
    return np.array([bound.get(order, math.inf) for order in orders])


@attr.s(frozen=True, kw_only=True, auto_attribs=True)
class DpsurDpEvent(dpa.DpEvent):
    """One release of DPSUR, as its paper prints it. `SelectiveRdpAccountant` reads it, by `provable_renyi`."""

    release: Dpsur


@attr.s(frozen=True, kw_only=True, auto_attribs=True)
class DpsurAttemptDpEvent(dpa.DpEvent):
    """One attempt of DPSUR: the candidate if it is accepted, "rejected" if not. Both sound accountants read it.

    By Renyi divergences a rejected candidate is charged as if it were shown as well
    (`sluice.accounting.dpsur_attempt`).
    """

    attempt: Dpsur


def enough_attempts(mechanism: Dpsur, *, releases: int) -> int:
    """A cap on the attempts of a whole run that is rarely reached: once in a hundred runs in which no candidate changes the loss.

    In practice candidates lower the loss more often than that, and the cap is reached less often.
    """
    validate.positive_integer(releases=releases)
    rate = float(scipy.special.ndtr(mechanism.beta / (2 * mechanism.validation_noise)))
    if rate < _RAREST_ACCEPTANCE:
        raise InputError(
            f"threshold={mechanism.beta} and validation_noise={mechanism.validation_noise} are not allowed together: a "
            f"candidate that leaves the loss as it is would be accepted with probability {rate:.1g}, and the run would hardly "
            "ever end. Raise one of them (DPSUR's authors use -1 and 0.8 to 1.3)."
        )
    return releases + int(scipy.stats.nbinom.ppf(0.99, releases, rate))


def most_attempts_at_once(mechanism: Dpsur) -> int:
    """How many attempts one release of a capped run may make: next to no release needs more, whatever the data."""
    rejection = float(scipy.special.log_ndtr(-mechanism.acceptance_arguments[0]))  # -0.0 where the data decide alone
    return math.ceil(math.log(_NEXT_TO_NONE) / min(rejection, -1e-15))


def give_up_probability(mechanism: Dpsur, *, releases: int, max_attempts: int) -> float:
    """A bound on the probability that ``max_attempts`` do not suffice for ``releases``, whatever the data."""
    validate.positive_integer(releases=releases, max_attempts=max_attempts)
    in_all = float(scipy.stats.binom.cdf(releases - 1, max_attempts, math.exp(mechanism.log_acceptance_min)))
    return min(1.0, in_all + releases * _NEXT_TO_NONE)


def _selection(mechanism: Dpsur) -> SelfSelection:
    return SelfSelection(
        sample_rate=mechanism.sample_rate,
        noise_multiplier=mechanism.noise_multiplier,
        validation_rate=mechanism.validation_rate,
        spread=mechanism.spread,
    )
