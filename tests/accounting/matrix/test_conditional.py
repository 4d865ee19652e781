from __future__ import annotations

import itertools
import math

import dp_accounting as dpa
import numpy as np
import pytest
from scipy.special import ndtr

from sluice._base.errors import InputError
from sluice.accounting import create_accountant
from sluice.accounting.composition import compose
from sluice.accounting.matrix.accounting import accounted_coefficients
from sluice.accounting.matrix.conditional import _epsilon, conditional_epsilon, participation_bounds
from sluice.accounting.matrix.mixture_loss import Mixture, mixture_loss, sum_of_coins
from sluice.accounting.matrix.optimise import optimise_banded, optimise_blt
from sluice.accounting.matrix.strategy import BandedToeplitz, Strategy, identity
from sluice.accounting.matrix.workload import prefix_sums

SMALL = [
    (BandedToeplitz((1.0, 0.8)), 2, 0.3, 1.5, 1e-2),
    (BandedToeplitz((1.0, 0.9, 0.8)), 3, 0.2, 2.0, 1e-2),
    (BandedToeplitz((1.0, 0.5)), 4, 0.1, 1.0, 3e-3),
    (optimise_blt(prefix_sums(5), buffers=1), 5, 0.1, 2.0, 3e-3),
]


def simulated_deltas(
    strategy: Strategy, *, steps: int, rate: float, noise: float, epsilon: float, samples: int = 200_000
) -> list[tuple[float, float]]:
    """Mean and standard error of both divergences of the true pair: all patterns of participation, dense matrix."""
    column = strategy.coefficients(steps)
    matrix = np.array([[column[i - j] if i >= j else 0.0 for j in range(steps)] for i in range(steps)])
    patterns = np.array(list(itertools.product([0, 1], repeat=steps)))
    weights = rate ** patterns.sum(axis=1) * (1 - rate) ** (steps - patterns.sum(axis=1))
    means = patterns @ matrix.T / (noise * np.linalg.norm(column))
    generator = np.random.default_rng(3)
    without = generator.normal(size=(samples, steps))
    with_record = without + means[generator.choice(len(patterns), p=weights, size=samples)]

    def log_ratio(rows: np.ndarray) -> np.ndarray:
        return np.log(np.exp(rows @ means.T - (means**2).sum(axis=1) / 2 + np.log(weights)).sum(axis=1))

    values = (
        np.maximum(0, -np.expm1(epsilon - log_ratio(with_record))),
        np.maximum(0, -np.expm1(epsilon + log_ratio(without))),
    )
    return [(float(v.mean()), float(v.std()) / math.sqrt(samples)) for v in values]


@pytest.mark.parametrize(
    ("steps", "rate", "noise"), [(100, 0.01, 1.0), (1000, 0.02, 3.0), (20, 1.0, 5.0), (1, 0.3, 0.8)]
)
def test_without_correlation_it_is_plain_dp_sgd(steps: int, rate: float, noise: float) -> None:
    found = conditional_epsilon(identity(), steps=steps, sample_rate=rate, noise_multiplier=noise, delta=1e-5)
    accountant = create_accountant("pld")
    accountant.compose(dpa.PoissonSampledDpEvent(rate, dpa.GaussianDpEvent(noise)), steps)
    assert found.epsilon == pytest.approx(accountant.get_epsilon(1e-5), rel=3e-3)
    assert found.tail_probability == 0


@pytest.mark.parametrize(("strategy", "steps", "rate", "noise", "delta"), SMALL)
def test_it_is_never_below_a_simulation(
    strategy: Strategy, steps: int, rate: float, noise: float, delta: float
) -> None:
    found = conditional_epsilon(strategy, steps=steps, sample_rate=rate, noise_multiplier=noise, delta=delta)
    for mean, error in simulated_deltas(strategy, steps=steps, rate=rate, noise=noise, epsilon=found.epsilon):
        assert mean + 5 * error < delta


def test_treating_past_coins_as_fair_would_not_do() -> None:
    """Negative control: without the bounds on the coins the figure falls below the truth."""
    strategy, steps, rate, noise, delta = BandedToeplitz((1.0,) * 6), 6, 0.3, 1.5, 0.05
    moved = accounted_coefficients(strategy, steps=steps, noise_multiplier=noise)
    fair = [
        (sum_of_coins(moved[: row + 1], np.full(row + 1, rate), cells=512, dropped=1e-9), 1) for row in range(steps)
    ]
    wrong = max(_epsilon(fair, direction, delta=delta) for direction in ("remove", "add"))  # type: ignore[arg-type]
    truth = simulated_deltas(strategy, steps=steps, rate=rate, noise=noise, epsilon=wrong)
    assert max(mean - 5 * error for mean, error in truth) > delta
    right = conditional_epsilon(strategy, steps=steps, sample_rate=rate, noise_multiplier=noise, delta=delta).epsilon
    assert all(
        mean + 5 * error < delta
        for mean, error in simulated_deltas(strategy, steps=steps, rate=rate, noise=noise, epsilon=right)
    )


def test_bounds_on_coins_hold_for_exact_posteriors() -> None:
    """Posterior probabilities by enumeration, record there or not; the bounds may fail with the stated probability."""
    strategy, steps, rate, failure = BandedToeplitz((1.0, 0.7, 0.4)), 6, 0.2, 1e-2
    moved = accounted_coefficients(strategy, steps=steps, noise_multiplier=0.8)
    matrix = np.array([[moved[i - j] if i >= j else 0.0 for j in range(steps)] for i in range(steps)])
    bounds = participation_bounds(moved[:3], sample_rate=rate, steps=steps, failure=failure)
    patterns = np.array(list(itertools.product([0, 1], repeat=steps)))
    weights = rate ** patterns.sum(axis=1) * (1 - rate) ** (steps - patterns.sum(axis=1))
    means = patterns @ matrix.T
    generator = np.random.default_rng(5)
    for present in (True, False):
        rows = generator.normal(size=(20_000, steps))
        if present:
            rows = rows + means[generator.choice(len(patterns), p=weights, size=len(rows))]
        for seen in range(1, steps):
            logs = rows[:, :seen] @ means[:, :seen].T - (means[:, :seen] ** 2).sum(axis=1) / 2 + np.log(weights)
            posterior = np.exp(logs) / np.exp(logs).sum(axis=1)[:, None]
            for lag in range(1, min(seen, 2) + 1):
                took_part = posterior @ patterns[:, seen - lag]
                assert (took_part > bounds[lag - 1]).mean() <= failure + 5 * math.sqrt(failure / len(rows))
    assert rate < bounds[0] < bounds[1] < 1


@pytest.mark.parametrize("direction", ["remove", "add"])
def test_mixture_losses_are_those_of_exact_tails(direction: str) -> None:
    mixture = Mixture(means=np.array([0.0, 0.4, 1.0]), weights=np.array([0.7, 0.2, 0.1]))
    losses = compose([(mixture_loss(mixture, direction, spacing=1e-3), 1)], tilt=1.0, max_points=1 << 20)  # type: ignore[arg-type]
    places = np.linspace(-12, 14, 2_000_001)
    without = np.exp(-(places**2) / 2)
    with_record = sum(w * np.exp(-((places - m) ** 2) / 2) for m, w in zip(mixture.means, mixture.weights, strict=True))
    first, second = (with_record, without) if direction == "remove" else (without, with_record)
    for epsilon in (0.01, 0.1, 0.3):
        exact = np.maximum(first - math.exp(epsilon) * second, 0).sum() * (places[1] - places[0])
        exact /= math.sqrt(2 * math.pi)
        assert exact * (1 - 1e-9) <= losses.delta(epsilon) <= 1.001 * exact + 1e-7


def test_sums_of_coins_are_rounded_up_only() -> None:
    shifts, coins = np.linspace(0.5, 0.01, 40), np.linspace(0.3, 0.02, 40)
    exact = sum_of_coins(shifts[:7], coins[:7], cells=512, dropped=1e-9)
    rounded = sum_of_coins(shifts[:7], coins[:7], cells=64, dropped=1e-9)
    assert len(exact.means) == 128
    for place in np.linspace(0, 2.5, 40):
        tails = [float(m.weights[m.means >= place].sum()) + m.missing for m in (exact, rounded)]
        assert tails[0] <= tails[1] + 1e-12
    assert rounded.missing < 1e-8
    many = sum_of_coins(shifts, coins, cells=512, dropped=1e-12)
    assert float(many.means @ many.weights) == pytest.approx(float(shifts @ coins), rel=0.01)
    assert float(many.means @ many.weights) > float(shifts @ coins)


def test_more_noise_and_fewer_records_cost_less() -> None:
    strategy = optimise_banded(prefix_sums(100), bands=4)

    def epsilon(rate: float, noise: float) -> float:
        return conditional_epsilon(strategy, steps=100, sample_rate=rate, noise_multiplier=noise, delta=1e-5).epsilon

    assert epsilon(0.01, 8.0) < epsilon(0.01, 4.0) < epsilon(0.05, 4.0)
    # As noise grows the coins stay fair: the cost comes near that of mixtures at the sampling rate itself.
    far = conditional_epsilon(strategy, steps=100, sample_rate=0.01, noise_multiplier=200.0, delta=1e-5)
    assert max(far.participation_bounds) < 0.0107


def test_one_gaussian_where_everybody_takes_part() -> None:
    strategy = BandedToeplitz((1.0, 0.5))
    found = conditional_epsilon(strategy, steps=3, sample_rate=1.0, noise_multiplier=4.0, delta=1e-4)
    shift = np.linalg.norm([1.0, 1.5, 1.5]) / (4 * strategy.column_norm(3))
    exact = ndtr(shift / 2 - found.epsilon / shift) - math.exp(found.epsilon) * ndtr(-shift / 2 - found.epsilon / shift)
    assert 0.2e-4 < exact < 1e-4


def test_negative_coefficients_are_refused() -> None:
    with pytest.raises(InputError, match="negative coefficients"):
        conditional_epsilon(BandedToeplitz((1.0, -0.2)), steps=5, sample_rate=0.1, noise_multiplier=1.0, delta=1e-5)


def test_what_the_coins_take_of_delta_is_not_there_for_the_rows() -> None:
    strategy = BandedToeplitz((1.0, 0.5))
    few, half, nearly_all = (
        conditional_epsilon(
            strategy, steps=50, sample_rate=0.02, noise_multiplier=3.0, delta=1e-5, tail_share=share
        ).epsilon
        for share in (1e-6, 0.5, 1 - 1e-4)
    )
    assert half < few
    assert half < 0.8 * nearly_all
