from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from scipy import stats
from scipy.special import ndtr

from sluice._base.errors import InputError
from sluice.accounting.matrix.bins import BinsPair
from sluice.accounting.matrix.confidence import upper_mean
from sluice.accounting.matrix.monte_carlo import (
    calibrate_balls_in_bins,
    certified_delta,
    monte_carlo_delta,
    monte_carlo_epsilon,
)
from sluice.accounting.matrix.optimise import optimise_banded, optimise_blt
from sluice.accounting.matrix.strategy import BandedToeplitz, Strategy, identity
from sluice.accounting.matrix.workload import prefix_sums

BLT = optimise_blt(prefix_sums(60), buffers=2, participations=6, separation=10)
TWO_BINS = [
    (identity(), 2, 1.0, 0.5),
    (BandedToeplitz((1.0, 0.5)), 2, 1.2, 0.8),
    (BandedToeplitz((1.0, 0.5, 0.25, 0.2)), 4, 2.0, 0.3),
    (BandedToeplitz((1.0, 0.9, 0.8, 0.7)), 4, 1.5, 2.0),
    (identity(), 4, 0.9, 1.0),
]


def exact_two_bins(strategy: Strategy, *, steps: int, noise_multiplier: float, epsilon: float) -> tuple[float, float]:
    """Both divergences by integration over the plane of the two means, which are made from the dense matrix."""
    column = strategy.coefficients(steps)
    matrix = np.array([[column[i - j] if i >= j else 0.0 for j in range(steps)] for i in range(steps)])
    means = np.stack([matrix[:, first::2].sum(axis=1) for first in (0, 1)], axis=1)
    means /= noise_multiplier * np.linalg.norm(column)
    places = np.linalg.cholesky(means.T @ means)
    axis = np.linspace(-8, 8 + float(np.abs(places).max()), 1601)
    x, y = np.meshgrid(axis, axis, indexing="ij")
    without = np.exp(-(x**2 + y**2) / 2) / (2 * np.pi)
    with_record = sum(np.exp(-((x - a) ** 2 + (y - b) ** 2) / 2) / (4 * np.pi) for a, b in places)
    cell = (axis[1] - axis[0]) ** 2
    remove = np.maximum(with_record - math.exp(epsilon) * without, 0).sum() * cell
    add = np.maximum(without - math.exp(epsilon) * with_record, 0).sum() * cell
    return float(remove), float(add)


@pytest.mark.parametrize(("strategy", "steps", "noise", "epsilon"), TWO_BINS)
def test_two_bins_agree_with_exact_integration(strategy: Strategy, steps: int, noise: float, epsilon: float) -> None:
    exact = exact_two_bins(strategy, steps=steps, noise_multiplier=noise, epsilon=epsilon)
    pair = BinsPair.of(strategy, steps=steps, bins=2, noise_multiplier=noise)
    remove = pair.estimates("remove", epsilon=epsilon, samples=100_000, seed=1)
    add = pair.estimates("add", epsilon=epsilon, samples=100_000, seed=1)
    for values, truth in zip((remove, add), exact, strict=True):
        # The grid of releases, which is accounted for, adds up to two in a thousand.
        assert values.mean() == pytest.approx(truth, rel=2e-3, abs=5 * values.std() / math.sqrt(values.size))


@pytest.mark.parametrize(("strategy", "steps", "noise", "epsilon"), TWO_BINS)
def test_two_bins_are_certified(strategy: Strategy, steps: int, noise: float, epsilon: float) -> None:
    exact = exact_two_bins(strategy, steps=steps, noise_multiplier=noise, epsilon=epsilon)
    found = monte_carlo_delta(
        strategy, steps=steps, bins=2, noise_multiplier=noise, epsilon=epsilon, samples=50_000, seed=3
    )
    assert found.remove >= exact[0]
    assert found.add >= exact[1]
    assert max(exact) <= found.delta <= 1.15 * max(exact)


def test_each_value_keeps_to_its_proved_bound() -> None:
    for strategy, bins, noise in ((BLT, 10, 3.0), (identity(), 10, 1.5), (BLT, 10, 12.0), (identity(), 60, 1.0)):
        pair = BinsPair.of(strategy, steps=60, bins=bins, noise_multiplier=noise)
        for direction in ("remove", "add"):
            for epsilon in (0.2, 1.0, 3.0):
                values = pair.estimates(direction, epsilon=epsilon, samples=20_000, seed=2)  # type: ignore[arg-type]
                assert values.max() <= pair.largest_value(direction, epsilon) * (1 + 1e-9)  # type: ignore[arg-type]


@pytest.mark.parametrize("steps", [1, 5])
def test_one_bin_is_the_gaussian_mechanism(steps: int) -> None:
    shift, epsilon = math.sqrt(steps) / 2.0, 1.0
    exact = ndtr(shift / 2 - epsilon / shift) - math.exp(epsilon) * ndtr(-shift / 2 - epsilon / shift)
    found = monte_carlo_delta(
        identity(), steps=steps, bins=1, noise_multiplier=2.0, epsilon=epsilon, samples=100_000, seed=1
    )
    assert found.estimates == pytest.approx((exact, exact), rel=0.01)
    assert found.add == pytest.approx(exact, rel=1e-3)
    assert exact <= found.remove <= found.delta <= 1.05 * exact


def test_one_epoch_agrees_with_a_plain_simulation() -> None:
    """The textbook estimate, from the definition of the pair: slow, without confidence, but nothing clever."""
    steps, bins, noise, epsilon = 12, 6, 2.5, 0.5
    strategy = optimise_banded(prefix_sums(steps), bands=6)
    column = strategy.coefficients(steps)
    matrix = np.array([[column[i - j] if i >= j else 0.0 for j in range(steps)] for i in range(steps)])
    means = np.stack([matrix[:, first::bins].sum(axis=1) for first in range(bins)]) / (noise * np.linalg.norm(column))
    generator = np.random.default_rng(7)

    def log_ratio(rows: np.ndarray) -> np.ndarray:
        return np.log(np.exp(rows @ means.T - (means**2).sum(axis=1) / 2).mean(axis=1))

    noise_rows = generator.normal(size=(400_000, steps))
    with_record = noise_rows + means[generator.integers(bins, size=len(noise_rows))]
    plain = (
        np.maximum(0, -np.expm1(epsilon - log_ratio(with_record))),
        np.maximum(0, -np.expm1(epsilon + log_ratio(noise_rows))),
    )
    pair = BinsPair.of(strategy, steps=steps, bins=bins, noise_multiplier=noise)
    for direction, values in zip(("remove", "add"), plain, strict=True):
        found = pair.estimates(direction, epsilon=epsilon, samples=100_000, seed=5)  # type: ignore[arg-type]
        error = math.hypot(values.std() / math.sqrt(values.size), found.std() / math.sqrt(found.size))
        assert abs(found.mean() - values.mean()) < 5 * error + 2e-3 * values.mean()


def test_estimates_agree_with_jax_privacy() -> None:
    # jax-privacy 2.0.0: experimental.monte_carlo.sample_generation.get_privacy_loss_sample(BallsInBinsSampling(
    # iterations=60, cycle_length=10), 4 * norm, c_col, seed=1, num_samples=200_000), positive_sample True and False, then
    # the mean of max(0, 1 - exp(1 - loss)) and its standard error.
    theirs = {"remove": (2.362129e-3, 5.12e-5), "add": (2.339807e-3, 5.07e-5)}
    strategy = BandedToeplitz((1.0, 0.5, 0.375, 0.3125, 0.25, 0.2, 0.15, 0.1))
    pair = BinsPair.of(strategy, steps=60, bins=10, noise_multiplier=4.0)
    for direction, (mean, error) in theirs.items():
        found = pair.estimates(direction, epsilon=1.0, samples=50_000, seed=1)  # type: ignore[arg-type]
        assert abs(found.mean() - mean) < 4 * math.hypot(error, found.std() / math.sqrt(found.size))


def test_one_direction_or_no_confidence_would_not_do() -> None:
    """Negative controls: each shortcut under-reports where the whole procedure does not."""
    strategy, noise, epsilon = identity(), 0.9, 1.0
    exact = exact_two_bins(strategy, steps=2, noise_multiplier=noise, epsilon=epsilon)
    one_direction, no_confidence, certified = 0, 0, 0
    for seed in range(60):
        found = monte_carlo_delta(
            strategy, steps=2, bins=2, noise_multiplier=noise, epsilon=epsilon, samples=1000, seed=seed
        )
        one_direction += found.add < max(exact)
        no_confidence += max(found.estimates) < max(exact)
        certified += found.delta >= max(exact)
    assert one_direction == 60
    assert no_confidence > 10
    assert certified == 60


def test_confidence_bounds_fail_no_more_often_than_stated() -> None:
    generator = np.random.default_rng(11)
    for probability, height in ((0.01, 1.0), (0.2, 0.5), (0.9, 1.0)):
        fails = sum(
            upper_mean(height * (generator.random(800) < probability), largest=height, failure_probability=0.05)
            < height * probability
            for _ in range(1500)
        )
        assert stats.binom.sf(fails - 1, 1500, 0.05) > 1e-4


def test_confidence_bounds_are_nearly_those_of_exact_binomials() -> None:
    values = np.zeros(100_000)
    values[::500] = 1.0
    exact = stats.beta.ppf(1 - 1e-7, 201, 100_000 - 200)
    assert exact <= upper_mean(values, largest=1.0, failure_probability=1e-7) <= 1.15 * exact
    assert upper_mean(np.zeros(10), largest=0.3, failure_probability=0.1) == 0.3
    assert 0 < upper_mean(np.zeros(1000), largest=0.3, failure_probability=0.1) < 0.01
    with pytest.raises(InputError, match="must be in"):
        upper_mean(np.ones(1000), largest=0.3, failure_probability=0.1)


def test_calibration_meets_its_target_and_can_be_repeated() -> None:
    settings = {"steps": 60, "bins": 10}
    found = calibrate_balls_in_bins(BLT, **settings, epsilon=1.0, delta=1e-5, samples=60_000, seed=4)
    assert 0.8e-5 < found.delta <= 1e-5
    again = certified_delta(
        BinsPair.of(BLT, **settings, noise_multiplier=found.noise_multiplier),
        noise_multiplier=found.noise_multiplier,
        epsilon=1.0,
        samples=found.samples,
        seed=found.seed,
        failure_probability=found.failure_probability,
        charge=found.charge,
    )
    assert again == found
    assert found.charge >= found.failure_probability
    epsilon = monte_carlo_epsilon(
        BLT, **settings, noise_multiplier=found.noise_multiplier, delta=1e-5, samples=60_000, seed=5
    )
    assert epsilon.epsilon == pytest.approx(1.0, rel=0.03)
    assert epsilon.delta <= 1e-5
    other = monte_carlo_delta(
        BLT, **settings, noise_multiplier=found.noise_multiplier, epsilon=1.0, samples=1000, seed=None
    )
    assert other.seed != dataclasses.replace(found).seed


def test_a_record_in_a_uniform_bin_is_better_off_than_in_a_known_one() -> None:
    noise = 3.0
    pair = BinsPair.of(BLT, steps=60, bins=10, noise_multiplier=noise)
    shift = math.sqrt(float(pair.gram[0, 0]))
    known = ndtr(shift / 2 - 1 / shift) - math.e * ndtr(-shift / 2 - 1 / shift)
    found = monte_carlo_delta(BLT, steps=60, bins=10, noise_multiplier=noise, epsilon=1.0, samples=20_000, seed=1)
    assert found.delta < 0.7 * known


def test_bad_settings_are_refused_with_the_reason() -> None:
    def certify(strategy: Strategy = BLT, *, steps: int = 60, bins: int = 10, samples: int = 1000) -> None:
        monte_carlo_delta(strategy, steps=steps, bins=bins, noise_multiplier=1.0, epsilon=1.0, samples=samples, seed=1)

    with pytest.raises(InputError, match="negative coefficients"):
        certify(BandedToeplitz((1.0, -0.1)))
    with pytest.raises(InputError, match="never be used"):
        certify(bins=61)
    with pytest.raises(InputError, match="from 1000 to"):
        certify(samples=10)
    with pytest.raises(InputError, match="more noise"):
        monte_carlo_epsilon(BLT, steps=60, bins=10, noise_multiplier=0.01, delta=1e-5, samples=1000, seed=1)
