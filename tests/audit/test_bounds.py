"""Bounds against figures computed elsewhere, and against mechanisms whose epsilon is known."""

from __future__ import annotations

import math
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice._base.errors import InputError
from sluice.audit.bounds import (
    clopper_pearson,
    f_dp,
    f_dp_p_value,
    gaussian_fit,
    gaussian_fit_mu,
    is_refuted,
    one_run,
    one_run_p_value,
)
from sluice.audit.curves import gaussian_curve, gaussian_epsilon, profile_curve
from sluice.audit.guesses import Channel, plan_guesses
from sluice.audit.scores import audit_scores, right_guesses

DELTA = 1e-5
FIXED_POINTS = [
    (1000, 100, 95, 2.1652, 3.3233),
    (1000, 1000, 700, 0.7317, 1.372),
    (10000, 1000, 950, 2.691, 3.8024),
    (10000, 10000, 6000, 0.3715, 0.619),
    (100000, 1500, 1429, 2.6688, 3.2992),
]


@pytest.mark.parametrize(("canaries", "guesses", "correct", "plain", "gaussian"), FIXED_POINTS)
def test_bounds_are_those_computed_elsewhere(canaries, guesses, correct, plain, gaussian):
    game = {"canaries": canaries, "guesses": guesses, "correct": correct, "delta": DELTA}
    assert one_run(**game) == pytest.approx(plain, abs=1e-4)
    assert f_dp(**game) == pytest.approx(gaussian, abs=1e-4)


def test_without_delta_only_the_binomial_tail_counts():
    assert one_run(canaries=1000, guesses=100, correct=95, delta=0.0) == pytest.approx(2.1724, abs=1e-4)


@pytest.mark.parametrize(
    ("hits", "alarms", "trials", "epsilon", "mu"),
    [(500, 0, 500, 4.9056, 4.8793), (400, 50, 500, 1.7709, 1.8412), (900, 100, 1000, 1.9897, 2.3471)],
)
def test_bounds_from_independent_trials(hits, alarms, trials, epsilon, mu):
    found = {"hits": hits, "with_canary": trials, "alarms": alarms, "without": trials}
    assert clopper_pearson(**found, delta=DELTA) == pytest.approx(epsilon, abs=1e-4)
    assert gaussian_fit_mu(**found) == pytest.approx(mu, abs=1e-4)
    assert gaussian_fit(**found, delta=DELTA) == pytest.approx(gaussian_epsilon(mu, delta=DELTA), abs=2e-3)


@pytest.mark.parametrize(("canaries", "plain", "gaussian"), [(100, 3.49, 8.2), (1000, 5.78, 12.3), (10000, 7.83, 16.1)])
def test_ceilings(canaries, plain, gaussian):
    game = {"canaries": canaries, "guesses": canaries, "correct": canaries, "delta": DELTA}
    assert one_run(**game) == pytest.approx(plain, abs=0.01)
    assert f_dp(**game) == pytest.approx(gaussian, abs=0.1)


@given(st.integers(16, 400), st.data())
def test_more_right_guesses_never_lower_a_bound(canaries, data):
    guesses = data.draw(st.integers(2, canaries))
    correct = data.draw(st.integers(0, guesses - 1))
    for bound in (one_run, f_dp):
        lower, higher = (
            bound(canaries=canaries, guesses=guesses, correct=v, delta=DELTA) for v in (correct, correct + 1)
        )
        assert 0 <= lower <= higher + 1e-9


@given(st.integers(16, 2000), st.floats(0.3, 1.0), st.floats(0.0, 5.0))
def test_the_bound_is_where_the_p_value_passes_the_level(canaries, share, epsilon):
    game = {"canaries": canaries, "guesses": canaries, "correct": int(share * canaries), "delta": DELTA}
    bound = one_run(**game)
    p_value = one_run_p_value(epsilon, **game)
    if epsilon < bound - 1e-6:
        assert p_value < 0.05
    elif epsilon > bound + 1e-6:
        assert p_value >= 0.05 - 1e-9


def test_p_values_by_a_curve_agree_with_refutations():
    game = {"canaries": 1000, "guesses": 200, "correct": 150}
    curve = gaussian_curve(0.3)
    p_value = f_dp_p_value(curve, **game)
    assert is_refuted(curve, **game, beta=1.01 * p_value)
    assert not is_refuted(curve, **game, beta=0.99 * p_value)


def test_the_curve_of_a_gaussian_is_above_that_of_any_of_its_pairs():
    mu = 0.9
    exact = gaussian_curve(mu)
    pairs = [(epsilon, _delta(epsilon, mu)) for epsilon in (0.0, 0.5, 1.0, 2.0, 3.0)]
    from_pairs = profile_curve(pairs)
    for power in np.linspace(0.001, 0.999, 50):
        assert from_pairs(power) <= exact(power) + 1e-12
    assert max(exact(p) - from_pairs(p) for p in np.linspace(0.001, 0.999, 50)) < 0.03


def _delta(epsilon, mu):
    from sluice.audit.curves import gaussian_delta

    return gaussian_delta(epsilon, mu=mu)


@pytest.mark.parametrize(
    "wrong", [{"guesses": 101}, {"correct": 51}, {"correct": -1}, {"delta": 1.0}, {"confidence": 1.0}, {"canaries": 0}]
)
def test_impossible_counts_are_refused(wrong):
    with pytest.raises(InputError):
        one_run(**{"canaries": 100, "guesses": 50, "correct": 40, "delta": DELTA, **wrong})


def test_a_million_canaries_take_less_than_a_second():
    game = {"canaries": 10**6, "guesses": 10**6, "correct": 600_000, "delta": DELTA}
    began = time.process_time()
    one_run(**game)
    f_dp(**game)
    assert time.process_time() - began < 1


def test_random_scores_show_nothing():
    random = np.random.default_rng(0)
    plan = plan_guesses(Channel.of_epsilon(4.0, delta=DELTA), canaries=2000, scores=("scores",))
    found = [
        audit_scores({"scores": random.standard_normal(2000)}, random.random(2000) < 0.5, plan=plan, delta=DELTA)
        for _ in range(40)
    ]
    assert sum(each.lower_bound > 0 for each in found) <= 6
    assert np.median([each.lower_bound for each in found]) == 0


@pytest.mark.parametrize("epsilon", [0.0, 0.5, 2.0])
def test_randomised_response_is_exceeded_no_more_often_than_stated(epsilon):
    assert _share_above(epsilon, canaries=200, guesses=100, trials=400) <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / 400)


@pytest.mark.slow
@pytest.mark.parametrize("epsilon", [0.0, 0.5, 1.0, 2.0, 4.0])
@pytest.mark.parametrize(("canaries", "guesses"), [(200, 200), (1000, 100), (1000, 1000)])
def test_coverage_over_a_thousand_trials(epsilon, canaries, guesses):
    share = _share_above(epsilon, canaries=canaries, guesses=guesses, trials=1000)
    assert share <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / 1000)


def _share_above(epsilon, *, canaries, guesses, trials):
    """How often the unconditional bound exceeds the epsilon of randomised response, ranked at random among equals."""
    random = np.random.default_rng(1)
    truth = 1 / (1 + math.exp(-epsilon))
    above = 0
    for _ in range(trials):
        members = random.random(canaries) < 0.5
        answers = np.where(random.random(canaries) < truth, members, ~members)
        correct = right_guesses(answers + 0.5 * random.random(canaries), members, guesses=guesses)
        above += one_run(canaries=canaries, guesses=guesses, correct=correct, delta=DELTA) > epsilon
    return above / trials


#: True epsilon of a Gaussian mechanism, canaries, and the mean bounds that are expected with planned guesses.
GAUSSIAN = [
    (1.0, 1000, 0.21, 0.33),
    (1.0, 10_000, 0.49, 0.60),
    (2.0, 1000, 0.68, 1.03),
    (2.0, 10_000, 1.06, 1.34),
    (4.0, 1000, 1.54, 2.32),
    (4.0, 10_000, 2.17, 2.82),
    (8.0, 1000, 2.91, 4.77),
    (8.0, 10_000, 3.83, 5.46),
]


@pytest.mark.slow
@pytest.mark.parametrize(("epsilon", "canaries", "plain", "gaussian"), GAUSSIAN)
def test_planned_guesses_reach_what_is_known_for_the_gaussian_mechanism(epsilon, canaries, plain, gaussian):
    random = np.random.default_rng(2)
    channel = Channel.of_epsilon(epsilon, delta=DELTA)
    plan = plan_guesses(channel, canaries=canaries, scores=("scores",))
    trials, bounds = 1000, []
    for _ in range(trials):
        members = random.random(canaries) < 0.5
        scores = random.standard_normal(canaries) * channel.noise_multiplier + members
        found = audit_scores({"scores": scores}, members, plan=plan, delta=DELTA)
        bounds.append([bound.lower_bound for bound in found.bounds])
    allowed = 0.05 + 3 * math.sqrt(0.05 * 0.95 / trials)
    assert (np.array(bounds) > epsilon).mean(axis=0).max() <= allowed
    means = np.mean(bounds, axis=0)
    assert means[0] == pytest.approx(plain, abs=0.12)
    assert means[1] == pytest.approx(gaussian, abs=0.2)
