from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import linalg, optimize

from sluice._base.errors import InputError
from sluice.accounting.matrix import series
from sluice.accounting.matrix.optimise import optimise_banded, optimise_blt
from sluice.accounting.matrix.strategy import (
    BandedToeplitz,
    BufferedLinearToeplitz,
    Strategy,
    identity,
)
from sluice.accounting.matrix.workload import Workload, momentum_workload, prefix_sums

# jax-privacy 2.0.0, float64: toeplitz.optimize_banded_toeplitz(n, bands, reduction_fn=jnp.mean or jnp.max), then
# toeplitz.loss(coefficients, n, reduction_fn): squared error times squared sensitivity, for prefix sums.
JAX_PRIVACY_BANDED = [
    (64, 4, "mean", 10.501446861055827),
    (64, 4, "largest", 18.92470523518312),
    (64, 8, "mean", 7.09676191688255),
    (64, 8, "largest", 11.72575368897956),
    (256, 8, "mean", 20.681211081439283),
    (256, 8, "largest", 37.78357288429061),
    (1024, 4, "mean", 133.70972511676683),
    (1024, 4, "largest", 262.9756587526254),
    (1024, 16, "mean", 40.23102761296166),
    (1024, 16, "largest", 74.40586593904808),
]

# jax-privacy 2.0.0: buffered_toeplitz.optimize(n=, max_participations=, min_sep=, error=, min_buffers=b, max_buffers=b),
# then toeplitz.minsep_sensitivity_squared times the mean or maximum of toeplitz.per_query_error.
JAX_PRIVACY_BLT = [
    (64, 1, 1, 2, "largest", 5.718498701755318),
    (1024, 1, 1, 3, "largest", 10.742660917536089),
    (1024, 1, 1, 3, "mean", 9.355468991521366),
    (1000, 10, 100, 3, "mean", 148.69001630616995),
    (1000, 10, 100, 3, "largest", 221.54114075745346),
]


def dense(strategy: Strategy, steps: int) -> np.ndarray:
    return linalg.toeplitz(strategy.coefficients(steps), np.zeros(steps))


BLT = BufferedLinearToeplitz(decay=(0.99, 0.7), scale=(0.2, 0.3))
BANDED = BandedToeplitz((1.0, 0.6, 0.3, 0.2))


@pytest.mark.parametrize("strategy", [BLT, BANDED, identity(), BandedToeplitz((1.0, -0.5, 0.9))])
@pytest.mark.parametrize("steps", [1, 2, 3, 17, 64])
def test_inverse_coefficients_are_those_of_the_dense_inverse(strategy: Strategy, steps: int) -> None:
    expected = np.linalg.inv(dense(strategy, steps))[:, 0]
    np.testing.assert_allclose(strategy.inverse_coefficients(steps), expected, atol=1e-12)


@given(st.lists(st.floats(-2, 2), min_size=1, max_size=20), st.lists(st.floats(-2, 2), min_size=1, max_size=20))
def test_series_products_are_those_of_dense_matrices(left: list[float], right: list[float]) -> None:
    size = min(len(left), len(right))
    one, other = np.array(left[:size]), np.array(right[:size])
    matrix = linalg.toeplitz(one, np.zeros(size))
    np.testing.assert_allclose(series.multiply(one, other), matrix @ other, atol=1e-10)
    np.testing.assert_allclose(series.transposed_multiply(one, other), matrix.T @ other, atol=1e-10)


@pytest.mark.parametrize(
    "workload",
    [
        prefix_sums(20),
        momentum_workload(20, 0.9),
        momentum_workload(20, 0.5, np.linspace(1, 0.1, 20)),
        momentum_workload(20, 0.0, np.linspace(0.1, 1, 20)),
    ],
)
@pytest.mark.parametrize("strategy", [BLT, BANDED])
def test_errors_are_those_of_dense_matrices(workload: Workload, strategy: Strategy) -> None:
    errors = ((workload.matrix() @ np.linalg.inv(dense(strategy, 20))) ** 2).sum(axis=1)
    np.testing.assert_allclose(workload.row_errors(strategy.inverse_coefficients(20)), errors, rtol=1e-10)
    found = strategy.error(workload)
    assert found.mean == pytest.approx(math.sqrt(errors.mean()))
    assert found.largest == pytest.approx(math.sqrt(errors.max()))
    filtered = series.multiply(workload.velocity_coefficients, strategy.inverse_coefficients(20))
    assert filtered @ workload.mean_form() @ filtered == pytest.approx(errors.mean())


def test_momentum_is_what_sgd_does() -> None:
    gradients = np.random.default_rng(1).normal(size=12)
    rates = np.linspace(1, 0.2, 12)
    velocity, place, places = 0.0, 0.0, []
    for rate, gradient in zip(rates, gradients, strict=True):
        velocity = 0.9 * velocity + gradient
        place += rate * velocity
        places.append(place)
    np.testing.assert_allclose(momentum_workload(12, 0.9, rates).matrix() @ gradients, places)


@pytest.mark.parametrize(("participations", "separation"), [(1, 1), (2, 3), (3, 2), (3, 4), (9, 4), (12, 1)])
def test_sensitivity_is_the_largest_over_all_patterns_and_signs(participations: int, separation: int) -> None:
    steps = 9
    for strategy in (BLT, BANDED):
        gram = dense(strategy, steps).T @ dense(strategy, steps)
        largest = 0.0
        for pattern in itertools.product([0, 1], repeat=steps):
            steps_in = np.flatnonzero(pattern)
            if 0 < len(steps_in) <= participations and (np.diff(steps_in) >= separation).all():
                largest = max(largest, gram[np.ix_(steps_in, steps_in)].sum())
        found = strategy.sensitivity(steps=steps, participations=participations, separation=separation)
        assert found == pytest.approx(math.sqrt(largest))


def test_sensitivity_of_separate_bands_needs_no_sign() -> None:
    strategy = BandedToeplitz((1.0, -0.5, 0.9))
    norm = strategy.column_norm(9)
    assert strategy.sensitivity(steps=9, participations=3, separation=3) == pytest.approx(math.sqrt(3) * norm)
    with pytest.raises(InputError, match="separation=2"):
        strategy.sensitivity(steps=9, participations=3, separation=2)


@pytest.mark.parametrize(("steps", "bands", "objective", "squared"), JAX_PRIVACY_BANDED)
def test_banded_errors_agree_with_jax_privacy(steps: int, bands: int, objective: str, squared: float) -> None:
    strategy = optimise_banded(prefix_sums(steps), bands=bands, objective=objective)  # type: ignore[arg-type]
    error = strategy.error(prefix_sums(steps))
    assert (getattr(error, objective) * error.sensitivity) ** 2 == pytest.approx(squared, rel=1e-9)
    assert strategy.is_non_negative


@pytest.mark.parametrize(("steps", "participations", "separation", "buffers", "objective", "squared"), JAX_PRIVACY_BLT)
def test_blt_errors_agree_with_jax_privacy(
    steps: int, participations: int, separation: int, buffers: int, objective: str, squared: float
) -> None:
    workload = prefix_sums(steps)
    strategy = optimise_blt(
        workload,
        buffers=buffers,
        objective=objective,  # type: ignore[arg-type]
        participations=participations,
        separation=separation,
    )
    error = strategy.error(workload, participations=participations, separation=separation)
    assert (getattr(error, objective) * error.sensitivity) ** 2 == pytest.approx(squared, rel=3e-6)


def score(strategy: Strategy, workload: Workload, *, participations: int, separation: int) -> float:
    error = strategy.error(workload, participations=participations, separation=separation)
    return error.mean * error.sensitivity


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9, 0.99])
@pytest.mark.parametrize(
    ("steps", "separation"),
    [(10, 1), (10, 2), (50, 1), (50, 5), (200, 20), (200, 100), pytest.param(2000, 200, marks=pytest.mark.slow)],
)
def test_blt_is_found_for_every_momentum_and_beats_what_it_should(steps: int, separation: int, momentum: float) -> None:
    workload = momentum_workload(steps, momentum)
    apart = {"participations": 1 if separation == 1 else steps // separation, "separation": separation}
    independent = score(identity(), workload, **apart)
    found = []
    for buffers in (1, 2, 3, 4):
        strategy = optimise_blt(workload, buffers=buffers, **apart)
        column = strategy.coefficients(steps)
        assert column.min() >= 0
        assert np.diff(column).max() <= 0
        made_for_sums = optimise_blt(prefix_sums(steps), buffers=buffers, **apart)
        found.append(score(strategy, workload, **apart))
        assert found[-1] < 0.9 * independent
        assert found[-1] <= score(made_for_sums, workload, **apart) * (1 + 1e-6)
    assert all(more <= fewer * (1 + 1e-6) for fewer, more in itertools.pairwise(found))
    if separation == 1:
        # The best of all Toeplitz strategies, increasing ones included.
        dense = score(optimise_banded(workload, bands=steps), workload, **apart)
        assert dense * (1 - 1e-9) <= found[-1] < 1.01 * dense


@pytest.mark.parametrize("rates", [np.linspace(1, 0.02, 50), (1 + np.cos(np.linspace(0, 3.1, 50))) / 2])
@pytest.mark.parametrize("separation", [1, 10])
def test_blt_is_found_for_learning_rate_schedules(rates: np.ndarray, separation: int) -> None:
    workload = momentum_workload(50, 0.9, rates)
    apart = {"participations": 1 if separation == 1 else 5, "separation": separation}
    strategy = optimise_blt(workload, buffers=3, **apart)
    constant = optimise_blt(momentum_workload(50, 0.9), buffers=3, **apart)
    assert score(strategy, workload, **apart) <= score(constant, workload, **apart) * (1 + 1e-6)
    assert score(strategy, workload, **apart) < 0.9 * score(identity(), workload, **apart)


@pytest.mark.parametrize("buffers", [1, 2, 3])
def test_blt_is_as_good_as_a_blind_search(buffers: int) -> None:
    """A search that knows no gradient and no bounds but those of the class itself."""
    workload, apart = momentum_workload(30, 0.95), {"participations": 5, "separation": 6}

    def value(point: np.ndarray) -> float:
        decay, scale = np.clip(point[:buffers], 0, 0.999), np.maximum(point[buffers:], 0)
        scale *= min(1.0, (1 - 1e-12) / max(scale.sum(), 1e-12))
        return score(BufferedLinearToeplitz(decay=tuple(decay), scale=tuple(scale)), workload, **apart)

    generator = np.random.default_rng(3)
    blind = min(
        optimize.minimize(value, generator.uniform(0.1, 0.9, 2 * buffers), method="Nelder-Mead").fun for _ in range(6)
    )
    assert score(optimise_blt(workload, buffers=buffers, **apart), workload, **apart) <= blind * (1 + 1e-6)


@pytest.mark.parametrize("steps", [64, 1024])
def test_all_bands_reach_the_known_optimum_of_the_largest_error(steps: int) -> None:
    # Fichtenberger, Henzinger and Upadhyay (2023): the square root of the prefix-sum matrix, sum of squared halves.
    halves = np.cumprod(np.concatenate([[1.0], 1 - 0.5 / np.arange(1, steps)]))
    strategy = optimise_banded(prefix_sums(steps), bands=steps, objective="largest")
    error = strategy.error(prefix_sums(steps))
    assert error.largest * error.sensitivity == pytest.approx((halves**2).sum(), rel=1e-5)


@pytest.mark.parametrize(
    "workload", [prefix_sums(7), momentum_workload(7, 0.9), momentum_workload(7, 0.9, (1, 1, 0.9, 0.7, 0.4, 0.2, 0.1))]
)
def test_optimum_is_that_of_a_blind_dense_search(workload: Workload) -> None:
    def squared(tail: np.ndarray) -> float:
        matrix = linalg.toeplitz(np.concatenate([[1.0], tail, np.zeros(6 - len(tail))]), np.zeros(7))
        error = np.square(workload.matrix() @ np.linalg.inv(matrix)).sum(axis=1).mean()
        return float(error * np.square(matrix[:, 0]).sum())

    blind = optimize.minimize(squared, np.full(2, 0.5), method="Nelder-Mead", options={"xatol": 1e-8, "fatol": 1e-12})
    error = optimise_banded(workload, bands=3).error(workload)
    assert (error.mean * error.sensitivity) ** 2 == pytest.approx(blind.fun, rel=1e-8)


def test_more_bands_and_buffers_are_better() -> None:
    workload = momentum_workload(200, 0.9)
    banded = [optimise_banded(workload, bands=bands).error(workload) for bands in (1, 2, 4, 8, 16, 32)]
    scores = [error.mean * error.sensitivity for error in banded]
    assert scores == sorted(scores, reverse=True)
    assert scores[-1] < 0.3 * scores[0]
    all_bands = optimise_banded(workload, bands=200).error(workload)
    one, two = (optimise_blt(workload, buffers=buffers).error(workload) for buffers in (1, 2))
    best = all_bands.mean * all_bands.sensitivity
    assert best < two.mean * two.sensitivity < 1.001 * best < one.mean * one.sensitivity < 1.02 * best


def test_one_step_and_one_band() -> None:
    assert optimise_banded(prefix_sums(1), bands=1) == identity()
    assert optimise_blt(prefix_sums(2), buffers=1).error(prefix_sums(2)).sensitivity >= 1


def test_descriptions_come_back() -> None:
    for strategy in (BLT, BANDED):
        assert Strategy.from_dict(strategy.to_dict()) == strategy
    workload = momentum_workload(3, 0.5, (1, 0.5, 0.25))
    assert Workload.from_dict(workload.to_dict()) == workload
    with pytest.raises(InputError, match="unknown keys"):
        Strategy.from_dict({**BANDED.to_dict(), "size": 3})


def test_bad_settings_are_refused_with_the_reason() -> None:
    with pytest.raises(InputError, match=r"must be 1\.0"):
        BandedToeplitz((2.0, 1.0))
    with pytest.raises(InputError, match="at least the main diagonal"):
        BandedToeplitz(())
    with pytest.raises(InputError, match="sum must be at most 1"):
        BufferedLinearToeplitz(decay=(0.5, 0.6), scale=(0.6, 0.6))
    with pytest.raises(InputError, match=r"decay=1\.0"):
        BufferedLinearToeplitz(decay=(1.0,), scale=(0.6,))
    with pytest.raises(InputError, match="bands=9"):
        optimise_banded(prefix_sums(8), bands=9)
    with pytest.raises(InputError, match="bands=8"):
        optimise_banded(prefix_sums(8), bands=8, separation=4)
    with pytest.raises(InputError, match="buffers=20"):
        optimise_blt(prefix_sums(8), buffers=20)
    with pytest.raises(InputError, match="learning_rates"):
        optimise_banded(momentum_workload(4, 0.5, (1, 1, 1, 1)), bands=2, objective="largest")
    with pytest.raises(InputError, match="momentum"):
        momentum_workload(4, 1.0)
    with pytest.raises(InputError, match="3 entries"):
        momentum_workload(4, 0.5, (1, 1, 1))
