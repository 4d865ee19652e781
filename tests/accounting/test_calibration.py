from __future__ import annotations

import math

import dp_accounting as dpa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice._base.errors import InputError
from sluice.accounting import create_accountant
from sluice.accounting.calibration import calibrate, release_event, solve_releases
from sluice.accounting.search import smallest_reaching
from sluice.mechanism.gates import ClippingBiasGate, CoinGate


def recheck(plan):
    """The epsilon of a plan, by a fresh accountant that knows nothing of the search."""
    accountant = create_accountant(plan.accountant)
    for multiplier in plan.prior_releases:
        accountant.compose(dpa.GaussianDpEvent(multiplier))
    event = release_event(sample_rate=plan.sample_rate, noise_multiplier=plan.noise_multiplier, gate=plan.gate)
    return accountant.compose(event, plan.releases).get_epsilon(plan.delta)


@settings(max_examples=15)
@given(
    log_q=st.floats(math.log(1e-4), 0.0),
    log_releases=st.floats(0.0, math.log(3000)),
    log_epsilon=st.floats(math.log(0.05), math.log(50)),
    log_delta=st.floats(math.log(1e-9), math.log(1e-4)),
    gated=st.booleans(),
    accountant=st.sampled_from(["pld", "rdp"]),
)
def test_it_never_overspends_and_hardly_underspends(log_q, log_releases, log_epsilon, log_delta, gated, accountant):
    target = math.exp(log_epsilon)
    plan = calibrate(
        sample_rate=math.exp(log_q),
        releases=round(math.exp(log_releases)),
        target_epsilon=target,
        target_delta=math.exp(log_delta),
        gate=ClippingBiasGate() if gated else None,
        accountant=accountant,
    )
    epsilon = recheck(plan)
    assert epsilon <= target
    assert plan.epsilon == epsilon
    slightly_less = release_event(
        sample_rate=plan.sample_rate,
        noise_multiplier=0.99 * plan.noise_multiplier,
        gate=plan.gate
        and plan.gate.with_noise(
            gate_noise=0.99 * plan.gate.gate_noise, reference_noise=0.99 * plan.gate.reference_noise
        ),
    )
    accountant_ = create_accountant(accountant).compose(slightly_less, plan.releases)
    assert epsilon >= 0.998 * target or accountant_.get_epsilon(plan.delta) > target


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_all_three_noises_are_chosen_together_and_cost_little(accountant):
    common = {"sample_rate": 0.02, "releases": 1000, "target_epsilon": 1.0, "target_delta": 1e-5}
    gated = calibrate(gate=ClippingBiasGate(), accountant=accountant, **common)
    plain = calibrate(accountant=accountant, **common)
    assert plain.noise_multiplier < gated.noise_multiplier < 1.03 * plain.noise_multiplier
    assert 0.7 * gated.noise_multiplier < gated.gate_noise < gated.noise_multiplier
    assert gated.reference_noise > 2 * gated.noise_multiplier


@pytest.mark.parametrize("target", [0.3, 3.0])
def test_an_ordinary_budget_is_used_up_to_parts_in_ten_thousand(target):
    plan = calibrate(sample_rate=0.02, releases=1000, target_epsilon=target, target_delta=1e-5)
    assert (1 - 5e-4) * target <= plan.epsilon <= target


def test_the_split_is_the_best_of_its_kind_for_the_same_strength():
    """Moving noise between gate and reference at equal joint noise must not allow less gradient noise."""
    common = {"sample_rate": 0.3, "releases": 200, "target_epsilon": 1.0, "target_delta": 1e-5, "accountant": "rdp"}
    best = calibrate(gate=ClippingBiasGate(), **common)
    blur = math.sqrt(0.1 / 1.9)
    sigma, strength = best.noise_multiplier, best.noise_multiplier
    joint = math.hypot(4 * best.gate_noise, blur * best.reference_noise)
    assert joint == pytest.approx(4 * strength, rel=1e-9)
    for angle in (0.1, 0.3, 0.8):
        other = ClippingBiasGate(gate_noise=sigma * math.cos(angle), reference_noise=4 * sigma * math.sin(angle) / blur)
        event = release_event(sample_rate=0.3, noise_multiplier=sigma, gate=other)
        assert create_accountant("rdp").compose(event, 200).get_epsilon(1e-5) >= 0.998 * best.epsilon


def test_a_chosen_gate_noise_leaves_the_worst_batch_a_chance():
    plan = calibrate(
        sample_rate=0.01,
        releases=500,
        target_epsilon=60.0,
        target_delta=1e-5,
        gate=ClippingBiasGate(),
        accountant="rdp",
    )
    assert plan.noise_multiplier < 0.4
    assert 0.05 <= plan.gate.acceptance.probability_min < 0.06


def test_noises_that_are_given_are_kept():
    common = {"sample_rate": 0.02, "releases": 1000, "target_epsilon": 1.0, "target_delta": 1e-5, "accountant": "rdp"}
    gate = calibrate(gate=ClippingBiasGate(gate_noise=3.0), **common)
    assert gate.gate_noise == 3.0
    assert gate.reference_noise == pytest.approx(5 * gate.noise_multiplier)
    reference = calibrate(gate=ClippingBiasGate(reference_noise=20.0), **common)
    assert reference.reference_noise == 20.0
    assert reference.gate_noise == pytest.approx(reference.noise_multiplier)
    both = calibrate(gate=ClippingBiasGate(gate_noise=3.0, reference_noise=math.inf), **common)
    assert (both.gate_noise, both.reference_noise) == (3.0, math.inf)


def test_the_trainers_own_gates_are_calibrated_and_keep_their_other_settings():
    plan = calibrate(
        sample_rate=0.02,
        releases=500,
        target_epsilon=1.0,
        target_delta=1e-5,
        gate=ClippingBiasGate(beta=2.0, large_norm=30.0),
        accountant="rdp",
    )
    assert isinstance(plan.gate, ClippingBiasGate)
    assert plan.gate.beta == 2.0
    assert plan.gate.large_norm == 30.0
    assert plan.gate.gate_noise > 0
    coin = CoinGate(probability=0.5)
    kept = calibrate(sample_rate=0.02, releases=500, target_epsilon=1.0, target_delta=1e-5, gate=coin, accountant="rdp")
    assert kept.gate is coin


def test_preparation_shares_the_budget():
    common = {"sample_rate": 0.02, "releases": 500, "target_epsilon": 2.0, "target_delta": 1e-5}
    plan = calibrate(prior_releases=(8.0, 8.0), **common)
    assert plan.noise_multiplier > calibrate(**common).noise_multiplier
    assert recheck(plan) <= 2.0
    with pytest.raises(InputError, match="prior_releases"):
        calibrate(prior_releases=(0.5,), **common)


def test_a_target_out_of_reach_is_refused_with_a_remedy():
    with pytest.raises(InputError, match="Raise gate_noise"):
        calibrate(
            sample_rate=1.0, releases=10, target_epsilon=0.05, target_delta=1e-6, gate=ClippingBiasGate(gate_noise=1.0)
        )


def test_a_cap_on_attempts_is_paid_for():
    common = {"sample_rate": 0.02, "releases": 100, "target_epsilon": 1.0, "target_delta": 1e-5, "accountant": "rdp"}
    plan = calibrate(gate=ClippingBiasGate(max_attempts=400), **common)
    assert recheck(plan) <= 1.0
    with pytest.raises(InputError, match="max_attempts"):
        calibrate(gate=ClippingBiasGate(max_attempts=3), **common)


def test_the_same_question_is_answered_from_memory():
    common = {"sample_rate": 0.02, "releases": 777, "target_epsilon": 1.0, "target_delta": 1e-5, "accountant": "rdp"}
    assert calibrate(gate=ClippingBiasGate(), **common) is calibrate(gate=ClippingBiasGate(), **common)


@pytest.mark.parametrize(
    ("name", "value"),
    [("target_epsilon", 0.0), ("target_delta", 1.0), ("releases", 0), ("sample_rate", 2.0), ("accountant", "prv")],
)
def test_bad_arguments_are_refused_by_name(name, value):
    good = {"sample_rate": 0.1, "releases": 10, "target_epsilon": 1.0, "target_delta": 1e-5}
    with pytest.raises(InputError, match=name):
        calibrate(**(good | {name: value}))


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
@pytest.mark.parametrize(("sigma", "target"), [(2.0, 1.0), (1.0, 1.5), (4.0, 3.0)])
def test_releases_fit_and_one_more_would_not(accountant, sigma, target):
    gate = ClippingBiasGate(gate_noise=2.0, reference_noise=20.0)
    common = {"sample_rate": 0.02, "noise_multiplier": sigma, "gate": gate, "accountant": accountant}
    plan = solve_releases(target_epsilon=target, target_delta=1e-5, **common)
    assert recheck(plan) <= target
    step = 1 if plan.releases < 4000 else plan.releases // 1000
    event = release_event(sample_rate=0.02, noise_multiplier=sigma, gate=gate)
    more = create_accountant(accountant).compose(event, plan.releases + step).get_epsilon(1e-5)
    assert more > target


def test_releases_stop_at_their_maximum_and_at_none():
    common = {"sample_rate": 1e-4, "target_delta": 1e-5, "accountant": "rdp"}
    assert solve_releases(target_epsilon=5.0, noise_multiplier=10.0, max_releases=1234, **common).releases == 1234
    with pytest.raises(InputError, match="single release"):
        solve_releases(target_epsilon=0.1, noise_multiplier=0.05, sample_rate=1.0, target_delta=1e-5, accountant="rdp")


@given(steepness=st.floats(0.3, 8.0), root=st.floats(0.01, 1e4), guess=st.floats(1e-3, 1e6), jump=st.floats(0.0, 3.0))
def test_the_search_ends_on_the_safe_side_of_any_falling_curve(steepness, root, guess, jump):
    evaluated = {}

    def curve(x):
        evaluated[x] = (root / x) ** steepness + (jump if x < root else 0.0)
        return evaluated[x]

    found = smallest_reaching(curve, target=1.0, guess=guess, slack=1e-3, lowest=1e-4, highest=1e7)
    assert evaluated[found.x] <= 1.0
    assert found.x <= root * 1.01
    assert len(evaluated) <= 60


def test_the_search_says_when_nothing_reaches_the_target():
    assert smallest_reaching(lambda x: 2.0, target=1.0, guess=1.0, slack=1e-3, lowest=1e-3, highest=1e3) is None
