"""From scores and coins to a result: what is refused, what is planned, what is said."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice._base.errors import InputError
from sluice.audit import guesses
from sluice.audit.curves import Claim
from sluice.audit.guesses import DISPLACEMENT, LIKELIHOOD, LONGER, Channel, Plan, plan_guesses
from sluice.audit.result import result_of
from sluice.audit.scores import Observations, audit_scores, epsilon_lower_bound, right_guesses
from sluice.mechanism.scaling import Clip
from sluice.mechanism.selective_release import SelectiveRelease

DELTA = 1e-5


def coins(count, seed=0):
    return np.random.default_rng(seed).random(count) < 0.5


def test_the_highest_scores_are_guessed_in_and_the_lowest_out():
    members = np.array([True, False, True, False])
    assert right_guesses(np.array([3.0, 0.0, 2.0, 1.0]), members, guesses=2) == 2
    assert right_guesses(np.array([0.0, 3.0, 1.0, 2.0]), members, guesses=4) == 0


@given(st.lists(st.floats(-5, 5), min_size=16, max_size=60), st.integers(0, 2**16))
def test_coins_of_canaries_that_are_not_guessed_change_nothing(scores, seed):
    values = np.array(scores)
    members = coins(len(values), seed)
    guesses = len(values) // 4 * 2
    order = np.argsort(values, kind="stable")
    between = order[guesses // 2 : len(order) - guesses // 2]
    flipped = members.copy()
    flipped[between] ^= True
    assert right_guesses(values, members, guesses=guesses) == right_guesses(values, flipped, guesses=guesses)


def test_perfect_scores_refute_a_small_claim_and_reach_the_ceiling():
    members = coins(1000)
    claim = Claim.of_epsilon(1.0, delta=DELTA)
    found = audit_scores({"scores": members + 0.0}, members, plan=Plan.fixed(200), delta=DELTA, claim=claim)
    assert found.refuted
    assert found.verdict == "refuted"
    assert found.p_value < 1e-3
    assert found.lower_bound == pytest.approx(found.ceiling)


def test_a_bare_claim_is_refuted_exactly_where_the_bound_exceeds_it():
    members = coins(1000)
    scores = members + 1.2 * np.random.default_rng(1).standard_normal(1000)
    bound = epsilon_lower_bound(scores, members, delta=DELTA, guesses=200)
    for claimed, refuted in ((bound - 0.01, True), (bound + 0.01, False)):
        claim = Claim.of_epsilon(claimed, delta=DELTA)
        found = audit_scores({"scores": scores}, members, plan=Plan.fixed(200), delta=DELTA, claim=claim)
        assert found.refuted is refuted


def test_several_scores_share_the_error_probability():
    plan = Plan(guesses={name: {} for name in ("a", "b", "c")}, confidence=0.95)
    assert sum(1 - plan.confidence_of(name) for name in "abc") == pytest.approx(0.05)


def test_a_result_can_be_written_and_read_again():
    members = coins(200)
    claim = Claim.of_epsilon(40.0, delta=DELTA)
    found = audit_scores({"scores": members + 0.0}, members, plan=Plan.fixed(50), delta=DELTA, claim=claim)
    assert "it takes about" in found.notes[0]  # the claim is above what so few canaries can show
    assert result_of(found.to_dict(), where="a test") == found
    assert not any("private" in value for _, value in found.rows)
    first = found.bounds[0]
    assert (found.method, found.assumption, found.guesses, found.correct) == ("one-run", "", 50, first.correct)


def test_many_canaries_times_delta_is_noted():
    members = coins(2000)
    found = audit_scores({"scores": members + 0.0}, members, plan=Plan.fixed(50), delta=1e-3)
    assert "fewer canaries" in found.notes[0]


@pytest.mark.parametrize(
    ("scores", "members", "message"),
    [
        (np.arange(15.0), coins(15), "canaries=15"),
        (np.arange(99.0), coins(100), "one score for each"),
        (np.full(100, np.nan), coins(100), "not a number"),
        (np.ones(100), coins(100), "the same for all"),
        (np.arange(100.0), np.ones(100, dtype=bool), "fair coins"),
        (np.arange(100.0), np.arange(100), "true and false"),
    ],
)
def test_bad_scores_and_coins_are_refused(scores, members, message):
    with pytest.raises(InputError, match=message):
        audit_scores({"scores": scores}, members, plan=Plan.fixed(10), delta=DELTA)


def test_more_guesses_than_canaries_are_refused():
    with pytest.raises(InputError, match="guesses=200"):
        audit_scores({"scores": np.arange(100.0)}, coins(100), plan=Plan.fixed(200), delta=DELTA)


@pytest.mark.parametrize("delta", [0.0, 1.0, -1.0])
def test_delta_must_be_a_probability(delta):
    with pytest.raises(InputError, match="delta"):
        audit_scores({"scores": np.arange(100.0)}, coins(100), plan=Plan.fixed(10), delta=delta)


def test_planning_looks_at_public_values_alone_and_repeats(monkeypatch):
    monkeypatch.setattr(guesses, "_DRAWS", 200_000)
    channel = Channel(sample_rate=0.1, noise_multiplier=1.5, releases=20)
    plan = plan_guesses(channel, canaries=500)
    assert plan == plan_guesses(channel, canaries=500)
    assert set(plan.guesses) == {LIKELIHOOD, LONGER, DISPLACEMENT}
    assert all(2 <= count <= 500 for by_method in plan.guesses.values() for count in by_method.values())


def test_a_test_of_the_claim_is_planned_for_what_it_is_to_refute():
    """With half of the noise, fewer guesses than are best for the claimed mechanism refute its claim as often or more."""
    channel = Channel(sample_rate=1.0, noise_multiplier=3.7, releases=1)
    mechanism = SelectiveRelease(
        sample_rate=1.0, expected_batch_size=10.0, scaling=Clip(), noise_multiplier=3.7, releases=1
    )
    claim = Claim.of_mechanism(mechanism, delta=DELTA, accountant="pld")
    plan = plan_guesses(mechanism, canaries=1000, scores=(LIKELIHOOD,), delta=DELTA)
    assert plan == plan_guesses(channel, canaries=1000, scores=(LIKELIHOOD,), delta=DELTA)
    assert plan.test_guesses[LIKELIHOOD]["f-dp"] < plan.guesses[LIKELIHOOD]["f-dp"]
    plain = replace(plan, test_guesses=plan.guesses)
    random = np.random.default_rng(0)
    refuted = {"planned": 0, "plain": 0}
    for seed in range(20):
        members = coins(1000, seed)
        halves = [channel.simulated(1000, members=each, random=random, noise_left=0.5) for each in (True, False)]
        scores = {LIKELIHOOD: np.where(members, *(half[LIKELIHOOD] for half in halves))}
        for name, used in (("planned", plan), ("plain", plain)):
            refuted[name] += audit_scores(scores, members, plan=used, delta=DELTA, claim=claim).refuted
    assert refuted["planned"] >= max(8, refuted["plain"])


def test_guesses_are_only_planned_for_scaled_sums():
    with pytest.raises(InputError, match="no scaled sums"):
        plan_guesses(object(), canaries=1000)


def test_the_channel_of_a_mechanism_and_of_others():
    mechanism = SelectiveRelease(
        sample_rate=0.1, expected_batch_size=10.0, scaling=Clip(), noise_multiplier=2.0, releases=7
    )
    assert Channel.of(mechanism) == Channel(sample_rate=0.1, noise_multiplier=2.0, releases=7)
    assert Channel.of(object()) is None


def test_observations_are_log_likelihood_ratios_and_can_be_kept():
    channel = Channel(sample_rate=0.25, noise_multiplier=2.0, releases=2)
    seen = Observations(canaries=3, channel=channel)
    sums = np.array([[0.0, 1.0, -2.0], [3.0, np.inf, 0.5]])
    for row in sums:
        seen.add(row)
    finite = np.where(np.isfinite(sums), sums, 0.5)  # at half the length the ratio is 1, which says nothing
    expected = np.log(0.75 + 0.25 * np.exp((finite - 0.5) / 4)).sum(axis=0)
    np.testing.assert_allclose(seen.scores(np.zeros(3))[LIKELIHOOD], expected)
    again = Observations(canaries=3, channel=channel)
    again.load_state_dict(seen.state_dict())
    np.testing.assert_array_equal(again.scores(np.zeros(3))[LIKELIHOOD], seen.scores(np.zeros(3))[LIKELIHOOD])


def test_the_claim_of_a_mechanism_has_its_whole_profile():
    mechanism = SelectiveRelease(
        sample_rate=0.1, expected_batch_size=10.0, scaling=Clip(), noise_multiplier=2.0, releases=7
    )
    claim = Claim.of_mechanism(mechanism, delta=DELTA, accountant="pld")
    assert claim.proved
    assert claim.epsilon == mechanism.epsilon_after(7, delta=DELTA, accountant="pld")
    assert len(claim.profile) > 10
    deltas = [delta for _, delta in claim.profile]
    assert deltas == sorted(deltas, reverse=True)


@pytest.mark.slow
@pytest.mark.parametrize(("rate", "releases", "noise"), [(0.1, 20, 1.0), (1.0, 5, 4.0)])
def test_a_true_claim_is_refuted_no_more_often_than_stated(rate, releases, noise):
    """Three scores and the whole curve, on the very mechanism that is claimed: a thousand games."""
    mechanism = SelectiveRelease(
        sample_rate=rate, expected_batch_size=1.0, scaling=Clip(), noise_multiplier=noise, releases=releases
    )
    channel = Channel.of(mechanism)
    claim = Claim.of_mechanism(mechanism, delta=DELTA, accountant="pld")
    plan = plan_guesses(channel, canaries=1000)
    random, games = np.random.default_rng(5), 1000
    refuted = above = 0
    for game in range(games):
        members = coins(1000, game)
        inside, outside = (channel.simulated(1000, members=each, random=random) for each in (True, False))
        scores = {name: np.where(members, inside[name], outside[name]) for name in inside}
        found = audit_scores(scores, members, plan=plan, delta=DELTA, claim=claim)
        refuted += found.refuted
        above += found.lower_bound > claim.epsilon
    assert max(refuted, above) / games <= 0.05 + 3 * np.sqrt(0.05 * 0.95 / games)
