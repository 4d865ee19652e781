from __future__ import annotations

import math

import dp_accounting as dpa
import numpy as np
import pytest
from dp_accounting import pld
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice._base.errors import InputError
from sluice.accounting import create_accountant
from sluice.accounting.acceptance import Acceptance
from sluice.accounting.events import UNGATED, SelectiveReleaseDpEvent, plain_release
from sluice.accounting.pld_accountant import SelectivePLDAccountant
from sluice.accounting.rdp_accountant import SelectiveRdpAccountant
from sluice.mechanism.gates import ClippingBiasGate

BOTH = pytest.mark.parametrize("name", ["pld", "rdp"])
# Rounding to the grid moves epsilon by parts in 10,000; what must grow may fall by that much.
GRID = 3e-4


def release(q=0.02, sigma=2.0, gate_noise=1.0, reference=10.0, max_attempts=None):
    gate = ClippingBiasGate(gate_noise=gate_noise, reference_noise=reference)
    return SelectiveReleaseDpEvent(
        sampling_probability=q,
        noise_multiplier=sigma,
        acceptance=gate.acceptance,
        reference_noise_multiplier=reference,
        max_attempts=max_attempts,
    )


def spent(name, *parts, delta=1e-5):
    accountant = create_accountant(name)
    for event, count in parts:
        accountant.compose(event, count)
    return accountant.get_epsilon(delta)


@BOTH
def test_order_and_grouping_do_not_matter(name):
    plain, gaussian, selective = (
        plain_release(sampling_probability=0.05, noise_multiplier=1.5),
        dpa.GaussianDpEvent(8.0),
        release(),
    )
    one = spent(name, (plain, 100), (gaussian, 2), (selective, 300))
    other = spent(name, (selective, 120), (gaussian, 1), (plain, 100), (selective, 180), (gaussian, 1))
    nested = dpa.ComposedDpEvent(
        [dpa.SelfComposedDpEvent(dpa.ComposedDpEvent([selective, selective, plain]), 100), gaussian, gaussian]
    )
    rest = spent(name, (nested, 1), (selective, 100))
    assert one == pytest.approx(other, rel=1e-9)
    assert one == pytest.approx(rest, rel=1e-9)


@BOTH
def test_reading_changes_nothing(name):
    accountant = create_accountant(name).compose(release(), 200)
    before = accountant.get_epsilon(1e-5)
    accountant.get_delta(0.3)
    accountant.get_epsilon(1e-9)
    assert accountant.get_epsilon(1e-5) == before
    accountant.compose(release(), 200)
    assert accountant.get_epsilon(1e-5) == spent(name, (release(), 400))


@BOTH
def test_the_ledger_keeps_what_was_composed(name):
    accountant = create_accountant(name).compose(release(), 3)
    assert accountant.ledger == dpa.SelfComposedDpEvent(release(), 3)


@BOTH
def test_unknown_events_are_refused_and_leave_no_trace(name):
    accountant = create_accountant(name).compose(release(), 10)
    before = accountant.get_epsilon(1e-5)
    for event in (
        dpa.UnsupportedDpEvent(),
        dpa.SampledWithReplacementDpEvent(100, 10, dpa.GaussianDpEvent(1.0)),
        dpa.PoissonSampledDpEvent(0.1, release()),
        dpa.ComposedDpEvent([release(), dpa.UnsupportedDpEvent()]),
    ):
        assert not accountant.supports(event)
        with pytest.raises(dpa.UnsupportedEventError):
            accountant.compose(event)
    assert accountant.get_epsilon(1e-5) == before


@pytest.mark.parametrize("kind", [SelectivePLDAccountant, SelectiveRdpAccountant])
@pytest.mark.parametrize("relation", [dpa.NeighboringRelation.REPLACE_ONE, dpa.NeighboringRelation.REPLACE_SPECIAL])
def test_other_adjacencies_are_refused(kind, relation):
    with pytest.raises(InputError, match="ADD_OR_REMOVE_ONE only"):
        kind(neighboring_relation=relation)


@BOTH
def test_a_non_private_event_is_infinite(name):
    accountant = create_accountant(name).compose(release()).compose(dpa.NonPrivateDpEvent())
    assert accountant.get_epsilon(1e-5) == math.inf
    assert accountant.get_delta(1.0) == 1.0
    assert create_accountant(name).compose(dpa.GaussianDpEvent(0.0)).get_epsilon(1e-5) == math.inf


@BOTH
def test_nothing_costs_nothing(name):
    assert create_accountant(name).get_epsilon(1e-5) == 0
    assert create_accountant(name).compose(dpa.NoOpDpEvent(), 5).get_epsilon(1e-5) == 0
    assert create_accountant(name).get_delta(0.0) == 0


@pytest.mark.parametrize(
    "event",
    [
        dpa.LaplaceDpEvent(3.0),
        dpa.PoissonSampledDpEvent(0.1, dpa.LaplaceDpEvent(1.0)),
        dpa.dp_event.DiscreteLaplaceDpEvent(0.2, 1),
    ],
)
def test_events_that_only_dp_accounting_knows_compose_with_releases(event):
    plain = plain_release(sampling_probability=0.05, noise_multiplier=1.5)
    theirs = pld.PLDAccountant().compose(event, 3).compose(plain, 40).get_epsilon(1e-5)
    assert spent("pld", (event, 3), (plain, 40)) == pytest.approx(theirs, rel=2e-3)
    with_gate = spent("pld", (event, 3), (plain, 40), (release(), 100))
    assert with_gate > spent("pld", (event, 3), (plain, 40))
    accountant = create_accountant("pld").compose(event, 3).compose(plain, 40)
    assert accountant.get_delta(theirs) == pytest.approx(1e-5, rel=0.05)


def test_a_mixture_of_gaussians_costs_what_the_sampled_gaussian_it_is_costs():
    mixture = dpa.dp_event.MixtureOfGaussiansDpEvent(2.0, [0.0, 1.0], [0.7, 0.3])
    sampled = plain_release(sampling_probability=0.3, noise_multiplier=2.0)
    assert spent("pld", (mixture, 5), (release(), 30)) == pytest.approx(
        spent("pld", (sampled, 5), (release(), 30)), rel=5e-3
    )


def test_an_event_with_almost_no_noise_is_infinite_rather_than_out_of_memory():
    assert spent("pld", (dpa.LaplaceDpEvent(1e-9), 1)) == math.inf


@BOTH
def test_the_attempt_cap_is_charged_to_delta_and_epsilon(name):
    free, capped = release(), release(max_attempts=150)
    eta = capped.give_up_probability
    assert 1e-9 < eta < 1e-7
    delta = 1e-5
    direct = spent(name, (free, 100), delta=delta - 100 * eta) - 100 * math.log1p(-eta)
    assert spent(name, (capped, 100), delta=delta) == pytest.approx(direct, rel=1e-12)
    accountant = create_accountant(name).compose(capped, 100)
    assert accountant.get_delta(1.0) > create_accountant(name).compose(free, 100).get_delta(1.0)


@BOTH
def test_a_cap_that_delta_cannot_pay_for_is_refused_with_a_remedy(name):
    accountant = create_accountant(name).compose(release(max_attempts=20), 100)
    with pytest.raises(InputError, match="Raise max_attempts"):
        accountant.get_epsilon(1e-5)
    assert accountant.get_delta(1.0) > 0.1


@BOTH
@pytest.mark.parametrize("delta", [0.0, 1.0, -1e-5, math.nan])
def test_delta_must_be_a_probability(name, delta):
    with pytest.raises(InputError, match="target_delta"):
        create_accountant(name).compose(release()).get_epsilon(delta)


@BOTH
def test_epsilon_must_not_be_negative(name):
    with pytest.raises(InputError, match="target_epsilon"):
        create_accountant(name).compose(release()).get_delta(-1.0)


@BOTH
@settings(max_examples=8)
@given(
    q=st.floats(1e-3, 0.5),
    sigma=st.floats(0.8, 8.0),
    gate_noise=st.floats(0.6, 4.0),
    reference=st.floats(3.0, 60.0),
    count=st.integers(1, 300),
)
def test_epsilon_grows_with_all_that_costs_privacy(name, q, sigma, gate_noise, reference, count):
    def cost(count=count, **changes):
        event = {"q": q, "sigma": sigma, "gate_noise": gate_noise, "reference": reference} | changes
        return spent(name, (release(**event), count))

    base = cost()
    assert base > 0
    room = base * (1 - GRID) - 1e-9
    assert cost(count=count + 1 + count // 10) >= room
    assert cost(q=min(1.0, 1.05 * q)) >= room
    assert cost(sigma=0.95 * sigma) >= room
    assert cost(gate_noise=0.95 * gate_noise) >= room
    assert cost(reference=0.95 * reference) >= room
    assert cost() >= spent(name, (plain_release(sampling_probability=q, noise_multiplier=sigma), count)) * (1 - GRID)


@settings(max_examples=10)
@given(q=st.floats(1e-3, 1.0), sigma=st.floats(0.8, 8.0), low=st.floats(0.2, 1.0), count=st.integers(1, 300))
def test_delta_and_epsilon_are_inverse_and_loss_distributions_are_the_tighter(q, sigma, low, count):
    gate = Acceptance(ratio_min=low, ratio_max=1.0, probability_min=0.1)
    event = SelectiveReleaseDpEvent(sampling_probability=q, noise_multiplier=sigma, acceptance=gate)
    accountant = create_accountant("pld").compose(event, count)
    epsilon = accountant.get_epsilon(1e-6)
    assert 0 <= epsilon <= spent("rdp", (event, count), delta=1e-6)
    if epsilon > 1e-3:
        assert accountant.get_delta(epsilon) == pytest.approx(1e-6, rel=0.02)
        assert 0 < accountant.get_delta(2 * epsilon) < accountant.get_delta(epsilon)


def test_renyi_costs_add_up():
    event = release()
    once, often = SelectiveRdpAccountant().compose(event), SelectiveRdpAccountant().compose(event, 50)
    np.testing.assert_allclose(often.rdp, 50 * once.rdp, rtol=1e-12)


@BOTH
@pytest.mark.parametrize("q", [1e-6, 0.01, 1.0])
@pytest.mark.parametrize("sigma", [0.02, 1.0, 1e5])
@pytest.mark.parametrize("count", [1, 10**6])
@pytest.mark.parametrize("delta", [1e-100, 0.3])
def test_extreme_corners_give_ordinary_numbers(name, q, sigma, count, delta):
    for acceptance in (UNGATED, Acceptance(ratio_min=0.3, ratio_max=1.0, probability_min=0.01)):
        event = SelectiveReleaseDpEvent(sampling_probability=q, noise_multiplier=sigma, acceptance=acceptance)
        epsilon = spent(name, (event, count), delta=delta)
        assert epsilon >= 0
        assert math.isfinite(epsilon)


def test_single_gaussian_release_matches_its_closed_form_at_any_delta():
    accountant = SelectivePLDAccountant().compose(dpa.GaussianDpEvent(2.0), 4)
    for delta in (1e-2, 1e-5, 1e-15, 1e-60):
        exact = dpa.get_epsilon_gaussian(1.0, delta)
        assert exact * (1 - 1e-9) <= accountant.get_epsilon(delta) <= exact * (1 + 3e-4)


@BOTH
def test_rdp_and_pld_are_all_there_is(name):
    assert create_accountant(name).neighboring_relation is dpa.NeighboringRelation.ADD_OR_REMOVE_ONE
    with pytest.raises(InputError, match="pld, rdp"):
        create_accountant(f"{name}!")
