from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import ndtr

from sluice.accounting import loss_distribution as loss_distribution_module
from sluice.accounting.acceptance import Acceptance
from sluice.accounting.composition import GridTooLargeError, best_tilt, compose
from sluice.accounting.events import UNGATED, SelectiveReleaseDpEvent
from sluice.accounting.loss_distribution import (
    DIRECTIONS,
    LossDistribution,
    dominating_losses,
    hockey_stick_bound,
    loss_distribution,
)

U = np.linspace(-13, 16, 20001)
WEIGHTS = np.exp(-U * U / 2) / math.sqrt(2 * math.pi) * (U[1] - U[0])


def release(q, sigma, low=1.0, high=1.0):
    gate = Acceptance(ratio_min=low, ratio_max=high, probability_min=0.1)
    return SelectiveReleaseDpEvent(sampling_probability=q, noise_multiplier=sigma, acceptance=gate)


def stick_at(q, sigma, low, high, weight, direction, epsilon):
    """The hockey-stick divergence of the pair that puts this weight on the larger ratio, by brute force."""
    z = 1 - q + q * (weight * high + (1 - weight) * low)
    total = 0.0
    for share, r in ((weight, high), (1 - weight, low)):
        mix = ((1 - q) + q * r * np.exp(U / sigma - 0.5 / sigma**2)) / z
        gain = mix - math.exp(epsilon) if direction == "remove" else 1 - math.exp(epsilon) * mix
        total += share * float(np.sum(WEIGHTS * np.maximum(gain, 0)))
    return total


SETTINGS = {
    "q": st.sampled_from([1e-3, 0.02, 0.3, 1.0]),
    "sigma": st.floats(0.7, 15.0),
    "low": st.floats(0.05, 1.0),
    "high": st.sampled_from([1.0, 1.6]),
}


@settings(max_examples=40)
@given(direction=st.sampled_from(DIRECTIONS), pieces=st.sampled_from([1, 3, 8]), **SETTINGS)
def test_the_bound_is_above_every_pair_that_the_gate_allows(q, sigma, low, high, direction, pieces):
    epsilons = q * np.array([-0.5, 0.0, 0.1, 0.5, 2.0])
    bound = hockey_stick_bound(release(q, sigma, low, high), direction, epsilons, pieces=pieces)
    for epsilon, limit in zip(epsilons, bound, strict=True):
        for weight in np.linspace(0, 1, 13):
            assert (
                stick_at(q, sigma, low, high, weight, direction, epsilon) <= limit + 5e-7 * q
            )  # the kink costs the sum that much


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_the_bound_becomes_exact_with_more_pieces(direction):
    q, sigma, low = 0.4, 5.0, 0.4
    epsilons = np.array([0.02, 0.1])
    exact = [max(stick_at(q, sigma, low, 1.0, w, direction, e) for w in np.linspace(0, 1, 201)) for e in epsilons]
    gaps = [
        np.max(hockey_stick_bound(release(q, sigma, low), direction, epsilons, pieces=pieces) / exact - 1)
        for pieces in (2, 8, 32, 128)
    ]
    assert gaps[0] > gaps[1] > gaps[2] > gaps[3]
    assert gaps[3] < 2e-4


@settings(max_examples=40)
@given(direction=st.sampled_from(DIRECTIONS), **SETTINGS)
def test_on_a_grid_the_curve_is_convex_complete_and_nowhere_lower(q, sigma, low, high, direction):
    event = release(q, sigma, low, high)
    spacing = 0.05 * q / sigma
    losses = loss_distribution(event, direction, spacing=spacing, upper_tail=1e-10, pieces=6)
    assert np.all(losses.masses >= 0)
    assert losses.masses.sum() + losses.infinity == pytest.approx(1.0, abs=1e-12)
    grid = (losses.first + np.arange(len(losses.masses))) * spacing
    for epsilon in spacing * np.array([-20.3, -3.0, 0.0, 4.5, 30.2]):
        curve = losses.infinity + np.sum(np.maximum(-np.expm1(epsilon - grid), 0) * losses.masses)
        assert curve >= hockey_stick_bound(event, direction, np.array([epsilon]), pieces=6)[0] - 1e-13


def gaussian_delta(mu: float, epsilon: float) -> float:
    return float(ndtr(mu / 2 - epsilon / mu) - math.exp(epsilon) * ndtr(-mu / 2 - epsilon / mu))


def curve_of(losses: LossDistribution, epsilon: float) -> float:
    grid = (losses.first + np.arange(len(losses.masses))) * losses.spacing
    return losses.infinity + float(np.sum(np.maximum(-np.expm1(epsilon - grid), 0) * losses.masses))


def with_masses_cut_off(bounds: np.ndarray, *, spacing: float, first: int) -> LossDistribution:
    """What is not done: monotone values, corners that are not negative, and the rest of the mass at the first point."""
    bounds = np.minimum.accumulate(bounds)
    falls = bounds[:-1] - bounds[1:]
    slopes = falls / math.expm1(spacing)
    corners = np.append(slopes, 0.0)
    corners = np.clip(np.insert(slopes + falls, 0, 1 - bounds[0]) - corners, 0.0, 1 - bounds[-1])
    masses = corners * (1 - bounds[-1]) / corners.sum()
    return LossDistribution(spacing=spacing, first=first, masses=masses, infinity=float(bounds[-1]))


@pytest.mark.parametrize("noise", [0.0, 1e-3, 0.3])
@pytest.mark.parametrize("mu", [0.3, 1.0])
def test_the_hull_of_noisy_upper_bounds_is_nowhere_below_the_true_curve(mu, noise):
    """Cutting negative masses off passes without noise and fails with it, so the noise is enough to tell."""
    rng = np.random.default_rng(3)
    spacing, first = 0.05 * mu, -round(100 / mu)
    epsilons = (first + np.arange(2 * -first)) * spacing
    exact = np.array([gaussian_delta(mu, epsilon) for epsilon in epsilons])
    bounds = exact * (1 + noise * rng.random(len(exact)) ** 4)
    between = np.linspace(epsilons[0] - 1, epsilons[-1] + 1, 1001)
    wanted = np.array([gaussian_delta(mu, epsilon) for epsilon in between])
    hull = dominating_losses(bounds, spacing=spacing, first=first)
    assert np.all(hull.masses >= 0)
    assert hull.masses.sum() + hull.infinity == pytest.approx(1.0, abs=1e-13)
    found = np.array([curve_of(hull, epsilon) for epsilon in between])
    assert np.all(found >= wanted * (1 - 1e-12) - 1e-15)
    at_grid = np.array([curve_of(hull, epsilon) for epsilon in epsilons])
    assert np.all(at_grid <= bounds * (1 + 1e-12) + 1e-15)
    cut = with_masses_cut_off(bounds, spacing=spacing, first=first)
    below = np.array([curve_of(cut, epsilon) for epsilon in between]) < wanted * (1 - 1e-6) - 1e-12
    assert below.any() == (noise > 0)


@pytest.mark.parametrize("spacing", [1e-3, 0.5])
@pytest.mark.parametrize("shape", ["arc", "arcs", "noise"])
def test_long_arcs_above_the_hull_take_a_few_passes_and_leave_the_hull(shape, spacing, monkeypatch):
    """An arc loses only its ends in a pass: thousands of passes, unless the hull is walked along."""
    places = np.arange(3000)
    k = np.exp(np.minimum(places * spacing, 600.0))
    fall = {
        "arc": np.sqrt(1 - places / 3001),
        "arcs": np.sqrt(1 - (places % 1000) / 1001) * 0.3 ** (places // 1000),
        "noise": np.random.default_rng(0).uniform(0.9, 1.0, 3000) / (1 + places / 100),
    }[shape]
    passes = 0
    original = loss_distribution_module._corners

    def counted(values, gaps):
        nonlocal passes
        passes += 1
        return original(values, gaps)

    monkeypatch.setattr(loss_distribution_module, "_corners", counted)
    losses = dominating_losses(fall, spacing=spacing, first=0)
    assert passes < 200
    assert np.all(losses.masses >= 0)
    assert losses.masses.sum() + losses.infinity == pytest.approx(1.0, abs=1e-12)
    monkeypatch.setattr(loss_distribution_module, "_PASSES", 10**9)
    slow = dominating_losses(fall, spacing=spacing, first=0)
    np.testing.assert_allclose(losses.masses, slow.masses, rtol=1e-9, atol=1e-13)
    above = [losses.infinity + float(np.sum(losses.masses[i:] * (1 - k[i] / k[i:]))) for i in range(0, 3000, 7)]
    assert np.all(np.array(above) <= np.minimum.accumulate(fall)[::7] + 1e-12)


def test_a_bound_that_is_not_a_number_counts_as_one():
    bounds = np.array([np.nan, 0.5, np.nan, 0.4, 0.39])
    losses = dominating_losses(bounds, spacing=0.1, first=0)
    known = dominating_losses(np.array([1.0, 0.5, 1.0, 0.4, 0.39]), spacing=0.1, first=0)
    np.testing.assert_array_equal(losses.masses, known.masses)
    assert losses.infinity == known.infinity == 0.39
    assert dominating_losses(np.full(4, np.nan), spacing=0.1, first=0).infinity == 1.0


def test_bounds_above_one_or_rising_are_no_trouble():
    losses = dominating_losses(np.array([1.2, 0.4, 0.9, 0.1, 0.3]), spacing=0.5, first=-1)
    assert np.all(losses.masses >= 0)
    assert losses.infinity == 0.1
    assert losses.masses.sum() + losses.infinity == pytest.approx(1.0)
    nothing = dominating_losses(np.ones(3), spacing=0.5, first=0)
    assert nothing.infinity == 1.0
    assert not nothing.masses.any()


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("q", [1e-6, 0.02, 1.0])
def test_rounding_never_takes_the_bound_below_a_curve_in_higher_precision(q, direction):
    """Down to where float64 ends; and without the allowance for rounding some values do fall below."""
    mpmath = pytest.importorskip("mpmath")
    sigma = 2.0
    epsilons = q * np.linspace(-1.0, 6.0, 29)
    bound = hockey_stick_bound(release(q, sigma), direction, epsilons, pieces=1)
    with mpmath.workdps(60):
        mu, rate = mpmath.mpf(1) / sigma, mpmath.mpf(q)
        for epsilon, limit in zip(epsilons, bound, strict=True):
            k = mpmath.exp(mpmath.mpf(float(epsilon)))
            c = ((k if direction == "remove" else 1 / k) - 1 + rate) / rate
            u = mpmath.log(c) / mu + mu / 2 if c > 0 else -mpmath.inf
            if direction == "remove":
                exact = rate * (mpmath.ncdf(mu - u) - c * mpmath.ncdf(-u))
            else:
                exact = k * rate * (c * mpmath.ncdf(u) - mpmath.ncdf(u - mu))
            assert exact <= limit <= exact * (1 + mpmath.mpf(1e-12)) + 1e-13 * q


def compose_gaussian(mu: float, count: int, tilt: float, spacing_share: float = 0.02, max_points: int = 1 << 20):
    sigma = math.sqrt(count) / mu
    event = SelectiveReleaseDpEvent(sampling_probability=1.0, noise_multiplier=sigma, acceptance=UNGATED)
    losses = loss_distribution(event, "remove", spacing=spacing_share / sigma, upper_tail=1e-250, pieces=1)
    return compose([(losses, count)], tilt=tilt, max_points=max_points)


@pytest.mark.parametrize("count", [1, 7, 400])
@pytest.mark.parametrize("epsilon", [0.3, 3.0, 12.0, 25.0])
def test_composition_is_right_and_never_low_however_small_delta_is(count, epsilon):
    mu = 1.0
    exact = gaussian_delta(mu, epsilon) if epsilon < 5 else None
    if exact is None:
        # Far out, the two tails must be subtracted in logarithms.
        from scipy.special import log_ndtr

        first, second = log_ndtr(mu / 2 - epsilon / mu), epsilon + log_ndtr(-mu / 2 - epsilon / mu)
        exact = math.exp(first + math.log(-math.expm1(second - first)))
    composed = compose_gaussian(mu, count, tilt=max(0.3, epsilon / mu**2 - 0.5))
    assert exact <= composed.delta(epsilon) <= exact * 1.06
    back = composed.epsilon(exact, near=epsilon)
    assert epsilon - 1e-9 <= back <= epsilon * 1.001 + 1e-3


def test_the_tilt_moves_nothing_but_rounding():
    deltas = [compose_gaussian(1.0, 50, tilt).delta(2.0) for tilt in (0.5, 1.5, 3.0)]
    assert max(deltas) / min(deltas) - 1 < 1e-6


def test_a_grid_that_is_too_large_is_refused_before_it_is_made():
    with pytest.raises(GridTooLargeError) as caught:
        compose_gaussian(1.0, 400, tilt=2.0, max_points=100)
    assert caught.value.points > 100


def test_unreachable_delta_is_infinite_and_large_delta_is_zero():
    composed = compose_gaussian(1.0, 10, tilt=1.0)
    assert composed.epsilon(1e-260, near=1.0) == math.inf
    assert composed.epsilon(0.9999, near=1.0) == 0.0
    assert composed.delta(1e6) == pytest.approx(composed.infinity)


def test_a_tilt_is_found_on_the_grid_where_no_order_is_known():
    event = SelectiveReleaseDpEvent(sampling_probability=1.0, noise_multiplier=1.0, acceptance=UNGATED)
    losses = loss_distribution(event, "remove", spacing=0.01, upper_tail=1e-14, pieces=1)
    tilt, bound = best_tilt([(losses, 1)], delta=1e-5)
    assert 4.0 < bound < 5.5
    assert 2.0 < tilt < 6.0


def test_products_of_different_losses_match_direct_convolution():
    events = [release(0.3, 2.0, 0.6), release(0.05, 1.0)]
    losses = [loss_distribution(e, "remove", spacing=0.01, upper_tail=1e-12, pieces=4) for e in events]
    composed = compose([(losses[0], 3), (losses[1], 2)], tilt=4.0, max_points=1 << 18)
    direct = np.ones(1)
    for each, count in ((losses[0], 3), (losses[1], 2)):
        for _ in range(count):
            direct = np.convolve(direct, each.masses)
    grid = (3 * losses[0].first + 2 * losses[1].first + np.arange(len(direct))) * 0.01
    for epsilon in (0.2, 1.0, 2.5):
        exact = float(np.sum(np.maximum(-np.expm1(epsilon - grid), 0) * direct))
        assert composed.delta(epsilon) == pytest.approx(exact, rel=1e-6, abs=1e-11)


def test_mass_at_infinity_composes_and_counts_fully():
    masses = np.array([0.5, 0.49])
    losses = LossDistribution(spacing=0.1, first=0, masses=masses, infinity=0.01)
    composed = compose([(losses, 3)], tilt=1.0, max_points=1 << 10)
    assert composed.delta(50.0) == pytest.approx(1 - 0.99**3, rel=1e-9)
    assert composed.epsilon(0.02, near=0.2) == math.inf


@pytest.mark.parametrize("rate", [1e-6, 0.3, 1.0])
def test_the_curve_is_whole_at_losses_beyond_all_numbers(rate):
    """Where e^-epsilon has no float any more, adding a record is still told apart with probability one."""
    event = release(rate, 2.0)
    found = hockey_stick_bound(event, "add", np.array([-math.inf, -700.0, -695.0, -600.0]), pieces=1)
    assert found == pytest.approx(np.ones(4), abs=1e-12)
    assert (found >= 1 - 1e-15).all()
