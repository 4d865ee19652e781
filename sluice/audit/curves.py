"""Trade-off curves: how often an attack of a given power must raise a false alarm, if a claim is true."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
import scipy

from sluice._base import validate
from sluice._base.errors import InputError
from sluice.accounting import create_accountant
from sluice.mechanism.base import Mechanism

Curve = Callable[[float], float]
"""From the power of a test to the least false-alarm rate that it can have: ``sup {x : 1 - f(x) <= y}``."""

_NORMAL = NormalDist()
_LARGEST_EPSILON = 700.0
_LARGEST_MU = 60.0

#: At which multiples of the claimed epsilon the profile of a mechanism is computed.
_SHARES = (0.0, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.25, 1.5, 2.0)


def gaussian_curve(mu: float) -> Curve:
    """The curve of two normal laws, mu standard deviations apart."""

    def least(power: float) -> float:
        if power <= 0.0 or power >= 1.0:
            return min(max(power, 0.0), 1.0)
        return 0.5 * math.erfc((mu - _NORMAL.inv_cdf(power)) / math.sqrt(2.0))

    return least


def profile_curve(profile: Sequence[tuple[float, float]]) -> Curve:
    """The curve of a mechanism that is (epsilon, delta)-private for each of these pairs, in both directions.

    Guarantee:
        Never above the true curve, whichever pairs are left out: fewer pairs make a test weaker, never wrong.
    """
    pairs = [(math.exp(min(epsilon, _LARGEST_EPSILON)), delta) for epsilon, delta in profile]

    def least(power: float) -> float:
        found = max(max((power - delta) / k, 1.0 - delta - k * (1.0 - power)) for k, delta in pairs)
        return min(max(found, 0.0), 1.0)

    return least


@dataclass(frozen=True, kw_only=True)
class Claim:
    """What is claimed of a run, and put to the test.

    Attributes:
        epsilon: at ``delta``.
        profile: pairs (epsilon, delta) that the claim implies, the named one among them.
        proved: whether a sound accountant says so; if not it is what somebody claims.
    """

    epsilon: float
    delta: float
    profile: tuple[tuple[float, float], ...]
    proved: bool

    @classmethod
    def of_epsilon(cls, epsilon: float, *, delta: float) -> Claim:
        """The bare claim of one epsilon at one delta."""
        if not (isinstance(epsilon, int | float) and epsilon >= 0):
            raise InputError(f"claimed_epsilon={epsilon!r} is not allowed: it must be a number >= 0.")
        validate.open_fraction(delta=delta)
        epsilon = float(epsilon)
        return cls(epsilon=epsilon, delta=delta, profile=((epsilon, delta),), proved=False)

    @classmethod
    def of_mechanism(cls, mechanism: Mechanism, *, delta: float, accountant: str) -> Claim:
        """What a mechanism's own accountant says of all of its planned releases, at many epsilons.

        Where nothing is proved it is what the accountant would say if the reference were public.
        """
        judged = mechanism.as_claimed
        epsilon = judged.epsilon_after(judged.releases, delta=delta, accountant=accountant)
        pairs = [(epsilon, delta)]
        fresh = create_accountant(accountant)
        # Where events do not compose, the one pair is a weaker test, and a valid one.
        if math.isfinite(epsilon) and judged.composable and fresh.supports(judged.dp_event):
            composed = fresh.compose(judged.dp_event)
            pairs += [(share * epsilon, composed.get_delta(share * epsilon)) for share in _SHARES if share != 1.0]
        return cls(epsilon=epsilon, delta=delta, profile=tuple(sorted(pairs)), proved=mechanism.provable)

    @property
    def curve(self) -> Curve:
        return profile_curve(self.profile)


def gaussian_delta(epsilon: float, *, mu: float) -> float:
    """Delta at epsilon of two normal laws, mu standard deviations apart."""
    if mu <= 0:
        return 0.0
    tail = scipy.special.log_ndtr(-epsilon / mu - mu / 2)
    return float(scipy.special.ndtr(-epsilon / mu + mu / 2) - np.exp(epsilon + tail))


def gaussian_epsilon(mu: float, *, delta: float) -> float:
    """Epsilon at delta of two normal laws, mu standard deviations apart, rounded down."""
    if gaussian_delta(0.0, mu=mu) <= delta:
        return 0.0
    low, high = 0.0, 1.0
    while gaussian_delta(high, mu=mu) > delta:
        low, high = high, 2 * high
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if gaussian_delta(middle, mu=mu) > delta else (low, middle)
    return low


__all__ = ["Claim", "Curve", "gaussian_curve", "gaussian_delta", "gaussian_epsilon", "profile_curve"]
