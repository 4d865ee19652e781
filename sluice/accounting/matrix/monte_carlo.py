"""Monte Carlo accounting of balls-in-bins batches: a delta that holds with a stated confidence, in both directions.

What chance decides here is only whether the *figure* is right. The probability that it is not is added to delta, which is
sound for the whole process: draw a seed that is independent of the data, certify, then train.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from sluice._base import validate
from sluice._base.errors import InputError
from sluice.accounting.matrix.accounting import LOWEST_NOISE
from sluice.accounting.matrix.bins import BinsPair, Direction
from sluice.accounting.matrix.confidence import expected_excess, upper_mean
from sluice.accounting.matrix.strategy import Strategy
from sluice.accounting.search import smallest_reaching

DEFAULT_SAMPLES = 500_000
SMALLEST_SAMPLES = 1000
LARGEST_SAMPLES = 10_000_000
FAILURE_SHARE = 0.01
_DIRECTIONS: tuple[Direction, Direction] = ("remove", "add")
_PILOT_SAMPLES = 40_000
_PILOT_ERRORS = 2.0
_ATTEMPTS = 12
_MARGIN = 0.004
_LARGEST_EPSILON = 200.0
_LARGEST_NOISE = 1e5
# Cover the precision of roots and error functions, which is far better, and the cancellation in their differences.
_ROUNDING = 1 + 1e-6
_CANCELLATION = 1e-14


@dataclass(frozen=True, kw_only=True)
class MonteCarloDelta:
    """A certified delta of balls-in-bins batches. With the same fields, ``monte_carlo_delta`` gives it again.

    Attributes:
        noise_multiplier: standard deviation of z over ``max_grad_norm`` times the norm of a column of C.
        epsilon: at which epsilon.
        delta: ``max(remove, add) + charge``: the figure to state.
        remove: the confidence bound for the record being there against not.
        add: the one for the record not being there against being there.
        estimates: the two mean values, without confidence: never a guarantee.
        samples: how many values each direction took.
        seed: of the sample.
        failure_probability: with which the two bounds together may be too small.
        charge: what was added to delta for that: the failure probability of this and of all earlier attempts.
    """

    noise_multiplier: float
    epsilon: float
    delta: float
    remove: float
    add: float
    estimates: tuple[float, float]
    samples: int
    seed: int
    failure_probability: float
    charge: float


def monte_carlo_delta(
    strategy: Strategy,
    *,
    steps: int,
    bins: int,
    noise_multiplier: float,
    epsilon: float,
    samples: int = DEFAULT_SAMPLES,
    seed: int | None = None,
    failure_probability: float = 1e-8,
) -> MonteCarloDelta:
    """Certify a delta at this noise and epsilon.

    Args:
        strategy: without negative coefficients.
        steps: how many rows are released.
        bins: how many bins there are; step t takes the whole of bin ``t mod bins``.
        noise_multiplier: standard deviation of z over ``max_grad_norm * strategy.column_norm(steps)``.
        epsilon: at which.
        samples: more make the bound tighter.
        seed: None draws one, which the proof needs; a given one repeats a sample.
        failure_probability: see above; it is added to delta.

    Guarantee:
        Under adding or removing one record, a run of :class:`sluice.randomness.correlated.CorrelatedRelease` on
        :class:`sluice.randomness.grouped_sampling.BallsInBins` batches is (epsilon, delta)-differentially private, including the
        choice of the seed, for gradients chosen adaptively (docs/matrix.md, section 5).
    """
    return certified_delta(
        BinsPair.of(strategy, steps=steps, bins=bins, noise_multiplier=noise_multiplier),
        noise_multiplier=noise_multiplier,
        epsilon=epsilon,
        samples=samples,
        seed=secrets.randbits(63) if seed is None else seed,
        failure_probability=failure_probability,
        charge=failure_probability,
    )


def certified_delta(
    pair: BinsPair,
    *,
    noise_multiplier: float,
    epsilon: float,
    samples: int,
    seed: int,
    failure_probability: float,
    charge: float,
) -> MonteCarloDelta:
    """`monte_carlo_delta` of the pair that belongs to this noise, with its own charge to delta."""
    _require_epsilon(epsilon)
    _check_sampling(samples=samples, failure_probability=failure_probability)
    if charge < failure_probability:
        raise InputError(f"charge={charge} is not allowed: it must be at least failure_probability.")
    bounds, means = [], []
    for direction in _DIRECTIONS:
        values = pair.estimates(direction, epsilon=epsilon, samples=samples, seed=seed)
        largest = pair.largest_value(direction, epsilon)
        bound = upper_mean(values, largest=largest, failure_probability=failure_probability / 2)
        bounds.append(min(1.0, bound * _ROUNDING + _CANCELLATION))
        means.append(float(values.mean()))
    return MonteCarloDelta(
        noise_multiplier=noise_multiplier,
        epsilon=epsilon,
        delta=min(1.0, max(bounds) + charge),
        remove=bounds[0],
        add=bounds[1],
        estimates=(means[0], means[1]),
        samples=samples,
        seed=seed,
        failure_probability=failure_probability,
        charge=charge,
    )


def monte_carlo_epsilon(
    strategy: Strategy,
    *,
    steps: int,
    bins: int,
    noise_multiplier: float,
    delta: float,
    samples: int = DEFAULT_SAMPLES,
    seed: int | None = None,
) -> MonteCarloDelta:
    """Certify an epsilon at this noise and delta: nearly the smallest. Its Guarantee is that of the delta."""
    validate.open_fraction(delta=delta)
    pair = BinsPair.of(strategy, steps=steps, bins=bins, noise_multiplier=noise_multiplier)

    def certify(epsilon: float, check_seed: int, failure: float) -> MonteCarloDelta:
        return certified_delta(
            pair,
            noise_multiplier=noise_multiplier,
            epsilon=epsilon,
            samples=samples,
            seed=check_seed,
            failure_probability=failure,
            charge=FAILURE_SHARE * delta,
        )

    return _pilot_then_certify(
        lambda epsilon: (pair, epsilon),
        certify,
        delta=delta,
        samples=samples,
        seed=seed,
        guess=1.0,
        within=(1e-4, _LARGEST_EPSILON),
        refused=f"no epsilon up to {_LARGEST_EPSILON:g} holds at noise_multiplier={noise_multiplier}: use more noise.",
    )


def calibrate_balls_in_bins(
    strategy: Strategy,
    *,
    steps: int,
    bins: int,
    epsilon: float,
    delta: float,
    samples: int = DEFAULT_SAMPLES,
    seed: int | None = None,
) -> MonteCarloDelta:
    """Certify a noise multiplier for this epsilon and delta: nearly the smallest. Its Guarantee is that of the delta."""
    validate.positive(epsilon=epsilon)
    _require_epsilon(epsilon)
    validate.open_fraction(delta=delta)

    def pair_at(noise_multiplier: float) -> BinsPair:
        return BinsPair.of(strategy, steps=steps, bins=bins, noise_multiplier=noise_multiplier)

    def certify(noise_multiplier: float, check_seed: int, failure: float) -> MonteCarloDelta:
        return certified_delta(
            pair_at(noise_multiplier),
            noise_multiplier=noise_multiplier,
            epsilon=epsilon,
            samples=samples,
            seed=check_seed,
            failure_probability=failure,
            charge=FAILURE_SHARE * delta,
        )

    return _pilot_then_certify(
        lambda noise: (pair_at(noise), epsilon),
        certify,
        delta=delta,
        samples=samples,
        seed=seed,
        guess=math.sqrt(math.ceil(steps / bins)) / min(epsilon, 3.0),
        within=(LOWEST_NOISE, _LARGEST_NOISE),
        refused=f"no noise multiplier up to {_LARGEST_NOISE:g} reaches epsilon={epsilon} at delta={delta}: use a "
        "larger epsilon, or more samples.",
    )


def _pilot_then_certify(
    case: Callable[[float], tuple[BinsPair, float]],
    certify: Callable[[float, int, float], MonteCarloDelta],
    *,
    delta: float,
    samples: int,
    seed: int | None,
    guess: float,
    within: tuple[float, float],
    refused: str,
) -> MonteCarloDelta:
    """Search with one small sample, then certify what was found with fresh ones, a little farther each time.

    The certificates are independent of the search. Attempt k may fail with ``2^-k`` of the failure probability, so
    all of them together with no more than the whole, which is charged whichever of them succeeds.
    """
    failure = FAILURE_SHARE * delta
    _check_sampling(samples=samples, failure_probability=failure)
    seed = secrets.randbits(63) if seed is None else seed
    seeds = [int(word) >> 1 for word in np.random.SeedSequence(seed).generate_state(_ATTEMPTS + 1, np.uint64)]

    def predicted(x: float) -> float:
        pair, epsilon = case(x)
        worst = 0.0
        for direction in _DIRECTIONS:
            values = pair.estimates(direction, epsilon=epsilon, samples=min(_PILOT_SAMPLES, samples), seed=seeds[0])
            largest = pair.largest_value(direction, epsilon)
            excess = expected_excess(
                variance=float(values.var()), largest=largest, samples=samples, failure_probability=failure / 4
            )
            # Certificates that fail cost more time than a little more noise for the chance of the pilot.
            chance = _PILOT_ERRORS * float(values.std()) / math.sqrt(values.size)
            worst = max(worst, min(float(values.mean()) + chance + excess, largest))
        return worst + failure

    found = smallest_reaching(
        predicted, target=delta, guess=guess, slack=0.02, lowest=within[0], highest=within[1], slope=10.0
    )
    if found is None:
        raise InputError(refused)
    x = found.x
    for attempt in range(1, _ATTEMPTS + 1):
        result = certify(x, seeds[attempt], failure / 2**attempt)
        if result.delta <= delta:
            return result
        x *= 1 + _MARGIN * 2 ** (attempt - 1)
    raise InputError(f"samples={samples} is not enough to certify delta={delta}: use more samples.")


def _require_epsilon(epsilon: float) -> None:
    validate.non_negative(epsilon=epsilon)
    if epsilon > _LARGEST_EPSILON:
        raise InputError(
            f"epsilon={epsilon} is not allowed with balls-in-bins batches: it must be at most {_LARGEST_EPSILON:g}."
        )


def _check_sampling(*, samples: int, failure_probability: float) -> None:
    require_samples(samples)
    validate.open_fraction(failure_probability=failure_probability)


def require_samples(samples: int) -> None:
    """Refuse a number of samples that certifies nothing, or takes longer than anybody waits."""
    validate.positive_integer(samples=samples)
    if not SMALLEST_SAMPLES <= samples <= LARGEST_SAMPLES:
        raise InputError(f"samples={samples} is not allowed: it must be from {SMALLEST_SAMPLES} to {LARGEST_SAMPLES}.")
