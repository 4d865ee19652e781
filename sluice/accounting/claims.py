"""What the DPSR-CG paper *claims* for selective release. Nothing in this module is a guarantee.

The paper replaces the sampling rate ``q`` by ``q_sup = min(q * rho, 1)``, with ``rho > 1`` the largest factor by which
a record could make acceptance easier, and puts ``q_sup`` into the formula of the sampled Gaussian mechanism. That
step is asserted there, not proved, and its direction is wrong for the gate it is used with (docs/accounting.md,
section 11). It is kept here to reproduce the paper's figures, beside the sound accountants, and every name, result
and label says "claimed".

Two readings of ``rho`` exist. ``"printed"`` is the formula in the paper's algorithm, which forgets the threshold
``beta``; ``"table"`` puts the threshold in and reproduces every cell of the paper's table of q_sup.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Literal, get_args

import dp_accounting
import numpy as np
import scipy

from sluice._base import validate
from sluice._base.errors import InputError
from sluice.accounting import dpa
from sluice.accounting.renyi_conversion import epsilon_and_order

CLAIMED_LABEL = "claimed (paper)"

#: The orders used by the paper, by DPSUR and by most accountants of that family.
CLASSICAL_ORDERS: tuple[float, ...] = (
    *(1 + step / 10 for step in range(1, 100)),
    *(float(order) for order in range(11, 64)),
    128.0,
    256.0,
    512.0,
)

Reading = Literal["printed", "table"]


@dataclass(frozen=True, kw_only=True)
class ClaimedAccount:
    """A claimed cost: one event for each accepted update, and one that is charged once (feature statistics, say).

    The arithmetic is Renyi DP at ``CLASSICAL_ORDERS`` with the conversion of Balle et al. and Canonne et al., all of it
    dp-accounting's. Whether the events describe what was run is the claim that nobody has proved.
    """

    update: dpa.DpEvent
    once: dpa.DpEvent = field(default_factory=dpa.NoOpDpEvent)

    def claimed_epsilon(self, *, releases: int, delta: float) -> float:
        """The epsilon that would be claimed after ``releases`` accepted updates. It is not a guarantee.

        Print it as "claimed (paper)", never as "epsilon".
        """
        validate.positive_integer(releases=releases)
        validate.open_fraction(delta=delta)
        return self._epsilon(releases, delta)

    def claimed_releases(self, *, target_epsilon: float, delta: float) -> int:
        """The largest number of accepted updates whose claimed epsilon is at most ``target_epsilon`` (0 if none)."""
        validate.positive(target_epsilon=target_epsilon)
        validate.open_fraction(delta=delta)
        orders = np.array(CLASSICAL_ORDERS)
        room = target_epsilon - np.log1p(-1 / orders) + np.log(delta * orders) / (orders - 1) - self._once_renyi
        # Epsilon is a minimum over orders of something linear in the releases, so the answer is a maximum of quotients.
        count = max(0, math.floor(float(np.max(room / self._update_renyi))))
        while count > 0 and self._epsilon(count, delta) > target_epsilon:
            count -= 1
        while self._epsilon(count + 1, delta) <= target_epsilon:
            count += 1
        return count

    def claimed_updates_performed(self, *, target_epsilon: float, delta: float) -> int:
        """How many updates the authors' own loop makes: it tests the budget too late and overspends by one update."""
        return self.claimed_releases(target_epsilon=target_epsilon, delta=delta) + 1

    @cached_property
    def _update_renyi(self) -> np.ndarray:
        return classical_renyi(self.update)

    @cached_property
    def _once_renyi(self) -> np.ndarray:
        return classical_renyi(self.once)

    def _epsilon(self, releases: int, delta: float) -> float:
        renyi = releases * self._update_renyi + self._once_renyi
        return epsilon_and_order(CLASSICAL_ORDERS, renyi, delta=delta)[0]


def classical_renyi(event: dpa.DpEvent) -> np.ndarray:
    """The Renyi divergence bound of one event at each of ``CLASSICAL_ORDERS``, by dp-accounting."""
    if isinstance(event, dpa.PoissonSampledDpEvent) and isinstance(event.event, dpa.GaussianDpEvent):
        return _remembered(event).copy()
    return _classical_renyi(event)


def _classical_renyi(event: dpa.DpEvent) -> np.ndarray:
    accountant = dp_accounting.rdp.RdpAccountant(list(CLASSICAL_ORDERS))
    try:
        with _without_warnings(), np.errstate(over="raise"):
            accountant.compose(event)
    except ArithmeticError:  # hardly any noise: its square is zero to the computer, or its inverse infinite
        return np.full(len(CLASSICAL_ORDERS), np.inf)
    renyi: np.ndarray = accountant.rdp
    return renyi


# A run asks for the same figures when it is planned, when it ends and for its certificate.
_remembered = lru_cache(maxsize=64)(_classical_renyi)


@contextmanager
def _without_warnings() -> Iterator[None]:
    """The paper's orders include some at which dp-accounting's series does not converge; it says so and skips them."""
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def claimed_inflation(
    *, gate_noise: float, beta: float = 3.0, clip_range: float = 2.0, reading: Reading = "printed"
) -> float:
    """The paper's ``rho`` for the clipping-bias gate, whose noise has standard deviation ``4 * gate_noise``.

    ``Q((x - 1) / (4 sigma_e)) / Q(x / (4 sigma_e))`` with ``Q = 1 - Phi``, where ``x = clip_range`` as printed in the
    algorithm and ``x = clip_range + beta`` in the reading that gives the paper's table.
    """
    validate.positive(gate_noise=gate_noise, clip_range=clip_range)
    validate.finite(beta=beta)
    validate.one_of(get_args(Reading), reading=reading)
    farthest = clip_range + beta if reading == "table" else clip_range
    return tail_ratio(farthest=farthest, shift=1.0, noise_std=4 * gate_noise)


def tail_ratio(*, farthest: float, shift: float, noise_std: float) -> float:
    """``Q((farthest - shift) / noise_std) / Q(farthest / noise_std)``, computed so that far tails do not underflow."""
    return math.exp(
        float(scipy.special.log_ndtr(-(farthest - shift) / noise_std))
        - float(scipy.special.log_ndtr(-farthest / noise_std))
    )


def claimed_sample_rate(*, sample_rate: float, inflation: float) -> float:
    """``q_sup = min(q * rho, 1)``. (The paper's table prints ``1/q`` for the cap, which is no cap at all.)"""
    validate.fraction(sample_rate=sample_rate)
    validate.positive(inflation=inflation)
    return min(sample_rate * inflation, 1.0)


def claimed_account(
    *,
    sample_rate: float,
    noise_multiplier: float,
    gate_noise: float,
    beta: float = 3.0,
    clip_range: float = 2.0,
    reading: Reading = "printed",
    once: dpa.DpEvent | None = None,
) -> ClaimedAccount:
    """What the paper would charge for a selective release: a sampled Gaussian at ``q_sup``, and nothing else."""
    validate.positive(noise_multiplier=noise_multiplier)
    inflation = claimed_inflation(gate_noise=gate_noise, beta=beta, clip_range=clip_range, reading=reading)
    rate = claimed_sample_rate(sample_rate=sample_rate, inflation=inflation)
    update = dpa.PoissonSampledDpEvent(rate, dpa.GaussianDpEvent(noise_multiplier))
    return ClaimedAccount(update=update, once=once or dpa.NoOpDpEvent())


def feature_statistics_event(*, noise_multiplier: float = 8.0) -> dpa.DpEvent:
    """The noisy mean and mean square of each feature channel: two Gaussian releases over the whole data set."""
    validate.positive(noise_multiplier=noise_multiplier)
    return dpa.SelfComposedDpEvent(dpa.GaussianDpEvent(noise_multiplier), 2)


def paper_batch_size(*, batch_size: int, inflation: float) -> int:
    """The smaller batch ``int(B / rho)`` that the paper's code draws, so that ``q_sup`` is about ``B / N`` again."""
    validate.positive_integer(batch_size=batch_size)
    if inflation < 1:
        raise InputError(f"inflation={inflation} is not allowed: rho is at least 1.")
    return int(batch_size / inflation)
