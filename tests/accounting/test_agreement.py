"""Plain DP-SGD by our accountants, by dp-accounting's and by Opacus's."""

from __future__ import annotations

import math
import warnings

import pytest
from dp_accounting import pld, rdp
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.accounting import create_accountant
from sluice.accounting.events import plain_release
from sluice.accounting.rdp_accountant import SelectiveRdpAccountant
from sluice.mechanism.gates import ClippingBiasGate

DELTA = 1e-5


def ours(name, q, sigma, steps, delta=DELTA):
    event = plain_release(sampling_probability=q, noise_multiplier=sigma)
    return create_accountant(name).compose(event, steps).get_epsilon(delta)


@settings(max_examples=8)
@given(q=st.floats(0.005, 0.3), sigma=st.floats(0.8, 4.0), steps=st.integers(1, 200))
def test_between_dp_accountings_optimistic_and_pessimistic_answers(q, sigma, steps):
    def theirs(**rounding):
        one = pld.privacy_loss_distribution.from_gaussian_mechanism(
            sigma, sampling_prob=q, value_discretization_interval=2e-4, **rounding
        )
        return one.self_compose(steps).get_epsilon_for_delta(DELTA)

    epsilon = ours("pld", q, sigma, steps)
    assert epsilon >= theirs(pessimistic_estimate=False, use_connect_dots=False) - 1e-9
    assert epsilon <= theirs() * (1 + 2e-4) + 1e-6


@settings(max_examples=25)
@given(q=st.floats(0.001, 0.5), sigma=st.floats(0.6, 8.0), steps=st.integers(1, 10_000))
def test_renyi_agrees_with_dp_accounting_and_opacus_at_equal_orders(q, sigma, steps):
    from opacus.accountants import RDPAccountant

    orders = [float(order) for order in range(2, 64)]
    event = plain_release(sampling_probability=q, noise_multiplier=sigma)
    mine = SelectiveRdpAccountant(orders).compose(event, steps).get_epsilon(DELTA)
    assert mine == pytest.approx(
        rdp.RdpAccountant(orders).compose(event, steps).get_epsilon(DELTA), rel=1e-8, abs=1e-12
    )
    opacus = RDPAccountant()
    opacus.history = [(sigma, q, steps)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Opacus warns where the best order is the first or the last
        theirs = opacus.get_epsilon(DELTA, alphas=orders)
    if mine > 0:
        assert mine == pytest.approx(theirs, rel=1e-8)


@settings(max_examples=5)
@given(q=st.floats(0.005, 0.1), sigma=st.floats(0.8, 3.0), steps=st.integers(10, 500))
def test_within_the_error_that_opacus_allows_its_prv(q, sigma, steps):
    from opacus.accountants import PRVAccountant

    opacus = PRVAccountant()
    opacus.history = [(sigma, q, steps)]
    error = 0.05
    theirs = opacus.get_epsilon(DELTA, eps_error=error)  # their upper bound, at most 2 * error above the truth
    epsilon = ours("pld", q, sigma, steps)
    assert theirs - 2 * error <= epsilon <= theirs + 1e-4


@pytest.mark.parametrize(
    ("n", "b", "sigma", "t", "gate_noise", "reference", "plain", "selective"),
    [
        (60000, 1024, 2.0, 2000, 1.0, 10.0, "1.621", "1.663"),
        (50000, 2048, 5.67, 553, 2.0, 20.0, "0.620", "0.663"),
        (50000, 8192, 9.0, 300, 3.0, 20.0, "1.211", "1.389"),
    ],
)
def test_published_loss_distribution_figures(n, b, sigma, t, gate_noise, reference, plain, selective):
    from sluice.accounting.calibration import release_event

    gate = ClippingBiasGate(gate_noise=gate_noise, reference_noise=reference)
    event = release_event(sample_rate=b / n, noise_multiplier=sigma, gate=gate)
    assert f"{ours('pld', b / n, sigma, t):.3f}" == plain
    assert f"{create_accountant('pld').compose(event, t).get_epsilon(DELTA):.3f}" == selective


@pytest.mark.parametrize("q", [0.01, 0.3])
@pytest.mark.parametrize("steps", [3, 1000])
def test_a_gate_that_no_record_can_move_costs_what_plain_costs(q, steps):
    """Gate noise without end leaves a ratio of 1: the gated formulas must run into the plain ones."""
    gate = ClippingBiasGate(gate_noise=1e7, reference_noise=math.inf)
    from sluice.accounting.calibration import release_event

    for name, tolerance in (("rdp", 1e-6), ("pld", 2e-4)):
        gated = create_accountant(name).compose(release_event(sample_rate=q, noise_multiplier=1.0, gate=gate), steps)
        assert gated.get_epsilon(DELTA) == pytest.approx(ours(name, q, 1.0, steps), rel=tolerance)
