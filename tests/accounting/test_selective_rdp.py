from __future__ import annotations

import math
from itertools import pairwise

import mpmath as mp
import numpy as np
import pytest
from dp_accounting import rdp
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.integrate import quad
from scipy.special import logsumexp

from sluice.accounting.acceptance import Acceptance
from sluice.accounting.events import UNGATED, SelectiveReleaseDpEvent
from sluice.accounting.selective_rdp import DEFAULT_ORDERS, renyi_divergences
from sluice.accounting.tilted_moments import log_moments
from sluice.mechanism.gates import ClippingBiasGate

INTEGERS = np.array([2.0, 3.0, 5.0, 11.0, 30.0, 64.0])


def release(q, sigma, acceptance=UNGATED, reference=math.inf):
    return SelectiveReleaseDpEvent(
        sampling_probability=q,
        noise_multiplier=sigma,
        acceptance=acceptance,
        reference_noise_multiplier=reference,
    )


@settings(max_examples=60)
@given(log_q=st.floats(math.log(1e-3), 0.0), log_sigma=st.floats(math.log(0.3), math.log(30)))
def test_without_a_gate_it_is_the_sampled_gaussian_of_dp_accounting(log_q, log_sigma):
    q, sigma = math.exp(log_q), math.exp(log_sigma)
    theirs = rdp.rdp_privacy_accountant._compute_rdp_poisson_subsampled_gaussian(q, sigma, INTEGERS)
    ours = renyi_divergences(release(q, sigma), INTEGERS)
    # Their sum of terms near 1 loses digits where the divergence itself is tiny.
    np.testing.assert_allclose(ours, theirs, rtol=1e-9, atol=3e-15)
    assert np.all(ours >= theirs - 3e-15)


@pytest.mark.parametrize(("q", "sigma"), [(1e-6, 3.0), (1e-6, 0.5), (1e-4, 1.0), (0.3, 2.0), (0.999, 5.0)])
def test_second_order_has_a_closed_form_and_keeps_its_digits(q, sigma):
    exact = math.log1p(q * q * math.expm1(1 / sigma**2))
    assert renyi_divergences(release(q, sigma), np.array([2.0]))[0] == pytest.approx(exact, rel=2e-10)


@pytest.mark.parametrize("power", [1.02, 1.5, 4.7, -0.02, -0.5, -3.7, -20.0])
@pytest.mark.parametrize(("q", "sigma"), [(0.01, 1.0), (0.3, 0.5), (0.97, 2.0)])
def test_moments_of_any_power_match_adaptive_quadrature(q, sigma, power):
    mu = 1 / sigma

    def integrand(u):
        mix = (1 - q) + q * math.exp(mu * u - mu * mu / 2)
        return math.exp(power * math.log(mix) - u * u / 2) / math.sqrt(2 * math.pi)

    edges = np.linspace(min(0, power * mu) - 12, max(2, power) * mu + 12, 40)
    exact = sum(quad(integrand, a, b, epsabs=0, epsrel=1e-12)[0] for a, b in pairwise(edges))
    value = log_moments(rate=q, mu=mu, powers=np.array([power]))[0]
    assert math.expm1(value) == pytest.approx(exact - 1, rel=1e-7, abs=1e-13)


@pytest.mark.parametrize("power", [3.0, 50.0, -2.0, -40.0])
def test_the_closed_form_for_huge_work_is_an_upper_bound(power, monkeypatch):
    powers = np.array([power])
    exact = log_moments(rate=0.2, mu=1.3, powers=powers)
    monkeypatch.setattr("sluice.accounting.tilted_moments._POINTS_PER_POWER", 0)
    assert log_moments(rate=0.2, mu=1.3, powers=powers)[0] >= exact[0] * (1 - 1e-14)


@settings(max_examples=20)
@given(
    q=st.sampled_from([1e-4, 0.02, 0.4, 1.0]),
    sigma=st.floats(0.5, 20.0),
    low=st.floats(0.05, 1.0),
    high=st.sampled_from([1.0, 1.5]),
)
def test_the_maximum_over_the_gate_is_not_below_any_point_of_a_fine_grid(q, sigma, low, high):
    orders = np.array([1.3, 2.0, 6.0, 25.0])
    bound = renyi_divergences(release(q, sigma, Acceptance(ratio_min=low, ratio_max=high, probability_min=0.1)), orders)
    u = np.linspace(-14, 14 + 26 / sigma, 6001)
    log_weights = -u * u / 2 + math.log((u[1] - u[0]) / math.sqrt(2 * math.pi))
    rest = math.log1p(-q) if q < 1 else -math.inf
    log_mixes = [np.logaddexp(rest, math.log(q * r) + u / sigma - 0.5 / sigma**2) for r in (high, low)]
    for weight in np.linspace(0, 1, 21):
        z = 1 - q + q * (weight * high + (1 - weight) * low)
        for order, limit in zip(orders, bound, strict=True):
            for power in (order, 1 - order):
                logs = [logsumexp(power * (log_mix - math.log(z)) + log_weights) for log_mix in log_mixes]
                moment = logsumexp(logs, b=[weight, 1 - weight])
                assert moment / (order - 1) <= limit * (1 + 1e-7) + 1e-11


def test_the_maximum_is_attained():
    """A bound that were merely large would pass the grid test; this one is its maximum."""
    q, sigma, low, order = 0.5, 10.0, 0.3, 6.0
    event = release(q, sigma, Acceptance(ratio_min=low, ratio_max=1.0, probability_min=0.1))
    bound = renyi_divergences(event, np.array([order]))[0]
    powers = np.array([order])
    best = 0.0
    for weight in np.linspace(0, 1, 2001):
        z = 1 - q + q * (weight + (1 - weight) * low)
        total = 0.0
        for share, r in ((weight, 1.0), (1 - weight, low)):
            s = 1 - q + q * r
            total += share * math.exp(
                order * math.log(s / z) + log_moments(rate=q * r / s, mu=1 / sigma, powers=powers)[0]
            )
        best = max(best, math.log(total) / (order - 1))
    assert bound == pytest.approx(best, rel=1e-6)


@pytest.mark.parametrize(
    ("n", "b", "sigma", "t", "gate_noise", "reference", "plain", "selective"),
    [
        (60000, 1024, 2.0, 2000, 1.0, 10.0, "1.772", "1.818"),
        (60000, 1024, 2.0, 2000, 1.0, math.inf, "1.772", "1.772"),
        (60000, 1024, 2.0, 2000, 0.6, 10.0, "1.772", "1.852"),
        (50000, 2048, 5.67, 553, 2.0, 20.0, None, "0.728"),
        (50000, 8192, 9.0, 300, 3.0, 20.0, None, "1.516"),
    ],
)
def test_published_renyi_figures(n, b, sigma, t, gate_noise, reference, plain, selective):
    orders = np.array(DEFAULT_ORDERS)
    gate = ClippingBiasGate(gate_noise=gate_noise, reference_noise=reference)
    gated = renyi_divergences(release(b / n, sigma, gate.acceptance, reference), orders)
    assert f"{rdp.compute_epsilon(orders, t * gated, 1e-5)[0]:.3f}" == selective
    if plain is not None:
        ungated = renyi_divergences(release(b / n, sigma), orders)
        assert f"{rdp.compute_epsilon(orders, t * ungated, 1e-5)[0]:.3f}" == plain


def test_a_two_sided_gate_is_much_dearer():
    orders = np.array(DEFAULT_ORDERS)
    low = ClippingBiasGate(gate_noise=1.0).acceptance.ratio_min
    gate = Acceptance(ratio_min=low, ratio_max=1 / low, probability_min=0.1)
    cost = 2000 * renyi_divergences(release(1024 / 60000, 2.0, gate), orders)
    assert f"{1 / low:.3f}" == "1.502"
    assert f"{rdp.compute_epsilon(orders, cost, 1e-5)[0]:.3f}" == "2.786"


@pytest.mark.parametrize("q", [1e-6, 0.5, 1.0])
@pytest.mark.parametrize("sigma", [1e-2, 1.0, 1e6])
def test_never_negative_and_never_nan(q, sigma):
    for gate in (UNGATED, Acceptance(ratio_min=1e-9, ratio_max=1.0, probability_min=1e-9)):
        values = renyi_divergences(release(q, sigma, gate), np.array(DEFAULT_ORDERS))
        assert np.all(values >= 0)
        assert not np.any(np.isnan(values))


@settings(max_examples=40)
@given(q=st.floats(1e-4, 0.9), sigma=st.floats(0.4, 10), low=st.floats(0.1, 0.99), reference=st.floats(1.0, 50.0))
def test_more_data_less_noise_or_a_stronger_gate_never_costs_less(q, sigma, low, reference):
    def cost(q=q, sigma=sigma, low=low, reference=reference):
        gate = Acceptance(ratio_min=low, ratio_max=1.0, probability_min=0.1)
        return renyi_divergences(release(q, sigma, gate, reference), np.array([1.5, 4.0, 32.0]))

    base = cost() * (1 - 1e-9)
    assert np.all(cost(q=min(1.0, 1.1 * q)) >= base)
    assert np.all(cost(sigma=0.9 * sigma) >= base)
    assert np.all(cost(low=0.9 * low) >= base)
    assert np.all(cost(reference=0.9 * reference) >= base)


def exact_divergence(order: float, ratio_min: str, ratio_max: str, sigma: float) -> mp.mpf:
    """With all records in each batch moments are closed forms; the worst mixture is looked for with 340 digits."""
    low, high, variance = mp.mpf(ratio_min), mp.mpf(ratio_max), mp.mpf(sigma) ** 2
    shares = [10 ** (mp.mpf(i) / 3) for i in range(-960, 0)]
    weights = [mp.mpf(0), mp.mpf(1), *shares, *(1 - share for share in shares[-12:])]

    def worst(power: mp.mpf) -> mp.mpf:
        moment = power * (power - 1) / (2 * variance)

        def value(weight: mp.mpf) -> mp.mpf:
            mean = low + weight * (high - low)
            return mp.log(weight * (high / mean) ** power + (1 - weight) * (low / mean) ** power) + moment

        return max(map(value, weights))

    return max(worst(mp.mpf(order)), worst(1 - mp.mpf(order))) / (mp.mpf(order) - 1)


@pytest.mark.parametrize("order", [1.5, 2.0, 8.0, 100.0])
@pytest.mark.parametrize(
    ("ratio_min", "ratio_max"),
    [("1e-10", "1"), ("1e-15", "1"), ("1e-17", "1"), ("1e-60", "1"), ("1e-250", "1"), ("1e-3", "1e20")],
)
def test_gates_of_which_one_record_decides_are_dear(ratio_min, ratio_max, order):
    acceptance = Acceptance(ratio_min=float(ratio_min), ratio_max=float(ratio_max), probability_min=1e-300)
    event = release(1.0, 3.0, acceptance)
    with mp.workdps(340):
        exact = exact_divergence(order, ratio_min, ratio_max, 3.0)
    found = renyi_divergences(event, np.array([order]))[0]
    assert exact <= found <= exact * mp.mpf("1.1")  # the grid of mixtures is coarse


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("log_ratio", range(-300, 0, 3))
@pytest.mark.parametrize("q", [1e-6, 0.0655, 1.0])
def test_no_gate_makes_epsilon_zero(q, log_ratio):
    acceptance = Acceptance(ratio_min=10.0**log_ratio, ratio_max=1.0 + 1e-3, probability_min=1e-300)
    gated = renyi_divergences(release(q, 2.0, acceptance), np.array(DEFAULT_ORDERS))
    assert not np.isnan(gated).any()
    assert (gated >= renyi_divergences(release(q, 2.0), np.array(DEFAULT_ORDERS)) * (1 - 1e-9)).all()
