"""How many guesses to make: planned by simulating the mechanism that is claimed, before anything is looked at.

Choosing the number that looks best afterwards finds leaks where there are none, in a third to a half of all audits.

A bound is planned for the mechanism as it is claimed. A test of the claim has nothing to find there, so it is planned for the
mechanism with half of its noise: a plan for the claimed one makes too many guesses, most of which a leak would not help.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np

from sluice._base import validate
from sluice._base.errors import InputError
from sluice.audit.bounds import f_dp, one_run
from sluice.audit.curves import gaussian_delta

Array = np.ndarray

METHODS = {"one-run": one_run, "f-dp": f_dp}

LIKELIHOOD, LONGER, DISPLACEMENT = "likelihood", "likelihood of four times the length", "weight displacement"
LOSS = "loss"
LENGTHS = {LIKELIHOOD: 1.0, LONGER: 4.0}
"""The likelihood scores: what length each supposes that a canary adds to a sum, over the sensitivity."""

FEWEST_CANARIES = 16

_DRAWS = 5_000_000
_POOL = 200_000
_SMALLEST_POOL = 4_000
_DRAWS_AT_ONCE = 1 << 20
_CANDIDATES = 40
_SMALL_SHARE = 0.1
#: What share of its noise a mechanism is left with that a test of its claim is planned to refute.
_NOISE_LEFT = 0.5


@runtime_checkable
class ReleasesScaledSums(Protocol):
    """A mechanism each of whose releases is a sum of scaled gradients with fresh noise, over a public constant."""

    sample_rate: float
    expected_batch_size: float
    noise_multiplier: float
    releases: int
    scaling: Any


@dataclass(frozen=True, kw_only=True)
class Channel:
    """What reaches an observer of one canary's own coordinate: in units of the sensitivity.

    Attributes:
        sample_rate: how often the canary is in a release, if it is in the data.
        noise_multiplier: standard deviation of the noise.
        releases: how many sums are seen.
    """

    sample_rate: float
    noise_multiplier: float
    releases: int = 1

    def __post_init__(self) -> None:
        validate.fraction(sample_rate=self.sample_rate)
        validate.positive(noise_multiplier=self.noise_multiplier)
        validate.positive_integer(releases=self.releases)

    @classmethod
    def of(cls, mechanism: object) -> Channel | None:
        """That of a mechanism which releases scaled sums; None for any other."""
        if not isinstance(mechanism, ReleasesScaledSums):
            return None
        return cls(
            sample_rate=mechanism.sample_rate,
            noise_multiplier=mechanism.noise_multiplier,
            releases=mechanism.releases,
        )

    @classmethod
    def of_epsilon(cls, epsilon: float, *, delta: float) -> Channel:
        """One Gaussian release with this epsilon: for scores of which no more is known."""
        low, high = 1e-3, 50.0
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if gaussian_delta(epsilon, mu=middle) <= delta else (low, middle)
        return cls(sample_rate=1.0, noise_multiplier=1 / high)

    def evidence(self, sums: Array, *, length: float) -> Array:
        """The log likelihood ratio of each released sum for a canary of this length, over none."""
        with np.errstate(divide="ignore"):
            absent, present = np.log1p(-self.sample_rate), math.log(self.sample_rate)
        found: Array = np.logaddexp(absent, present + length * (sums - length / 2) / self.noise_multiplier**2)
        return found

    def simulated(
        self, count: int, *, members: bool, random: np.random.Generator, noise_left: float = 1.0
    ) -> dict[str, Array]:
        """Scores of so many canaries, all in the data or none; of the noise that the scores suppose, a share is there."""
        scores = {name: np.zeros(count) for name in (*LENGTHS, DISPLACEMENT)}
        at_once = max(1, _DRAWS_AT_ONCE // count)
        for start in range(0, self.releases, at_once):
            shape = (min(at_once, self.releases - start), count)
            sums = random.standard_normal(shape) * (self.noise_multiplier * noise_left)
            if members:
                sums += random.random(shape) < self.sample_rate
            for name, length in LENGTHS.items():
                scores[name] += self.evidence(sums, length=length).sum(axis=0)
            scores[DISPLACEMENT] += sums.sum(axis=0)
        return scores


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How many guesses to make with each score, for each bound. Fixed before anything is looked at, and public.

    Attributes:
        guesses: by score, then by method.
        test_guesses: the same for the test of a claim.
        confidence: of each bound, and of the test, all scores together.
    """

    guesses: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    test_guesses: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    confidence: float = 0.95

    def share(self, score: str) -> float:
        """What part of the error probability a score may use: most of it the first, so that the others cost little."""
        first = next(iter(self.guesses))
        return 1 - _SMALL_SHARE * (len(self.guesses) - 1) if score == first else _SMALL_SHARE

    def confidence_of(self, score: str) -> float:
        """Of the bound by one of the scores, so that the best of them has the confidence that is asked for."""
        return 1 - (1 - self.confidence) * self.share(score)

    @classmethod
    def fixed(cls, guesses: int, *, score: str = "scores", confidence: float = 0.95) -> Plan:
        """The same number for both bounds and the test, whatever the mechanism."""
        validate.positive_integer(guesses=guesses)
        same = {score: dict.fromkeys(METHODS, guesses)}
        return cls(guesses=same, test_guesses=same, confidence=confidence)

    def only(self, score: str) -> Plan:
        """The same numbers for one of the scores, which may use all of the error probability."""
        return Plan(
            guesses={score: self.guesses[score]},
            test_guesses={score: self.test_guesses[score]},
            confidence=self.confidence,
        )


def plan_guesses(
    mechanism: Channel | object,
    *,
    canaries: int,
    scores: tuple[str, ...] = (LIKELIHOOD, LONGER, DISPLACEMENT),
    delta: float = 1e-5,
    confidence: float = 0.95,
    seed: int = 0,
) -> Plan:
    """The numbers of guesses that give the best bounds, on average, for the mechanism as it is claimed, and the best tests.

    Args:
        mechanism: one that releases scaled sums, or what reaches an observer of it.

    Scores that come from elsewhere are planned as if they were log likelihood ratios.

    Guarantee:
        A function of public values alone; whichever numbers come out, the bounds hold.
    """
    channel = mechanism if isinstance(mechanism, Channel) else Channel.of(mechanism)
    if channel is None:
        raise InputError(
            f"mechanism={mechanism!r} is not allowed: its releases are no scaled sums. Give Channel.of_epsilon(epsilon, delta=...)."
        )
    require_canaries(canaries)
    validate.open_fraction(delta=delta, confidence=confidence)
    random = np.random.default_rng(seed)
    shares = Plan(guesses={score: {} for score in scores}, confidence=confidence)

    def planned(noise_left: float) -> dict[str, dict[str, int]]:
        right = _shares_right(channel, canaries, random, noise_left)
        return {
            score: {
                method: _best(method, right.get(score, right[LIKELIHOOD]), canaries, delta, shares.confidence_of(score))
                for method in METHODS
            }
            for score in scores
        }

    return Plan(guesses=planned(1.0), test_guesses=planned(_NOISE_LEFT), confidence=confidence)


def _shares_right(
    channel: Channel, canaries: int, random: np.random.Generator, noise_left: float
) -> dict[str, dict[int, float]]:
    """By score: for each candidate number of guesses, what share of them is right on average."""
    pool = min(_POOL, max(_SMALLEST_POOL, _DRAWS // (2 * channel.releases)))
    inside, outside = (
        channel.simulated(pool, members=members, random=random, noise_left=noise_left) for members in (True, False)
    )
    return {score: _expected_right(inside[score], outside[score], canaries) for score in inside}


def _expected_right(inside: Array, outside: Array, canaries: int) -> dict[int, float]:
    """For each candidate number of guesses, what share of them is right on average."""
    order = np.argsort(np.concatenate([inside, outside]), kind="stable")
    is_member = (order < len(inside)).astype(float)
    members_above = np.concatenate([[0.0], np.cumsum(is_member[::-1])])
    others_below = np.concatenate([[0.0], np.cumsum(1 - is_member)])
    counts = np.unique(np.geomspace(min(10, canaries), canaries, _CANDIDATES).astype(int) // 2 * 2)
    found = {}
    for count in counts[counts > 0]:
        taken = max(1, round(len(order) * count / canaries / 2))
        taken = min(taken, len(order) // 2)
        found[int(count)] = float(members_above[taken] + others_below[taken]) / (2 * taken)
    return found


def _best(method: str, right: Mapping[int, float], canaries: int, delta: float, confidence: float) -> int:
    def bound(guesses: int, deviations: float) -> float:
        share = right[guesses]
        correct = share * guesses + deviations * math.sqrt(guesses * share * (1 - share))
        return METHODS[method](
            canaries=canaries,
            guesses=guesses,
            correct=min(guesses, math.floor(correct)),
            delta=delta,
            confidence=confidence,
        )

    def value(guesses: int) -> tuple[float, float]:
        # Around the expected number, lest the rounding of few wrong guesses decides.
        mean = sum(bound(guesses, deviations) for deviations in (-1.0, 0.0, 1.0)) / 3
        # Where no number is expected to show anything, the one whose right guesses stand out most.
        return mean, (right[guesses] - 0.5) * math.sqrt(guesses)

    return max(right, key=value)


def require_canaries(canaries: int) -> None:
    """Refuse so few that no guesses could show anything."""
    if not isinstance(canaries, int) or isinstance(canaries, bool) or canaries < FEWEST_CANARIES:
        raise InputError(
            f"canaries={canaries!r} is not allowed: it must be an integer >= {FEWEST_CANARIES}; a thousand is usual."
        )


__all__ = ["Channel", "Plan", "plan_guesses", "require_canaries"]
