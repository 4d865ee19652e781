"""Schedules, ways of clipping, and what a run costs whose releases have different noise."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice._base.errors import InputError
from sluice.accounting import create_accountant
from sluice.accounting.events import plain_release
from sluice.mechanism.clipped_release import ClippedRelease, largest_count
from sluice.mechanism.clipping import Clipping, FlatClipping, LayerClipping, QuantileClipping, Schedule
from sluice.mechanism.registry import mechanism_from_dict
from sluice.mechanism.scaling import Clip
from sluice.mechanism.selective_release import SelectiveRelease

FLAT = FlatClipping(max_grad_norm=2.0)
QUANTILE = QuantileClipping(max_grad_norm=1.0, noise=4.0, smallest=0.1, largest=10.0)
LAYERS = LayerClipping.of({"0": 3.0, "2": 4.0}, schedule=Schedule(factors=(1.0, 0.5)))


def mechanism(clipping: Clipping = FLAT, **changes: object) -> ClippedRelease:
    settings: dict = {
        "sample_rate": 0.05,
        "expected_batch_size": 80.0,
        "clipping": clipping,
        "noise_multiplier": 1.5,
        "releases": 20,
        **changes,
    }
    return ClippedRelease(**settings)


@given(st.lists(st.sampled_from([1.0, 0.5, 2.0]), min_size=1, max_size=6), st.integers(1, 4), st.integers(0, 40))
def test_counts_are_how_often_each_factor_holds(factors, every, releases):
    schedule = Schedule(factors=tuple(factors), every=every)
    spread = [factor for factor, count in schedule.counts(releases) for _ in range(count)]
    assert spread == [schedule.at(turn) for turn in range(releases)]
    found = [factor for factor, _ in schedule.counts(releases)]
    assert all(first != second for first, second in itertools.pairwise(found))


def test_an_exponential_schedule():
    schedule = Schedule.exponential(factor=0.5, every=3, times=2)
    assert [schedule.at(turn) for turn in (0, 2, 3, 5, 6, 100)] == [1.0, 1.0, 0.5, 0.5, 0.25, 0.25]


@pytest.mark.parametrize("accountant", ["rdp", "pld"])
def test_each_release_is_charged_with_its_own_noise(accountant):
    """Exactly what composing one event after the other gives."""
    scheduled = mechanism(noise_schedule=Schedule(factors=(1.0, 0.8, 1.2), every=4))
    for releases in (0, 3, 4, 9, 20):
        one_by_one = create_accountant(accountant)
        for turn in range(releases):
            sigma = 1.5 * (1.0, 0.8, 1.2)[min(turn // 4, 2)]
            one_by_one.compose(plain_release(sampling_probability=0.05, noise_multiplier=sigma))
        found = scheduled.epsilon_after(releases, delta=1e-5, accountant=accountant)
        assert found == pytest.approx(one_by_one.get_epsilon(1e-5), rel=1e-9)


def test_without_a_schedule_it_costs_what_plain_dpsgd_costs():
    plain = SelectiveRelease(
        sample_rate=0.05, expected_batch_size=80.0, scaling=Clip(), noise_multiplier=1.5, releases=20
    )
    for clipping in (FLAT, LAYERS, QUANTILE):
        found = mechanism(clipping).epsilon_after(20, delta=1e-5, accountant="pld")
        assert found == plain.epsilon_after(20, delta=1e-5, accountant="pld")


@given(st.floats(0.3, 5.0), st.floats(1.01, 50.0))
def test_sum_and_count_together_are_one_release_with_the_noise_that_is_charged(sigma, ratio):
    """The longest shift, in units of noise: 1/sigma_g in the sum and (1/2)/noise in the count."""
    count_noise = ratio * sigma / 2
    quantile = QuantileClipping(max_grad_norm=1.0, noise=count_noise, smallest=0.1, largest=10.0)
    gradient = mechanism(quantile, noise_multiplier=sigma).gradient_noise_at(0)
    assert math.hypot(1 / gradient, 0.5 / count_noise) == pytest.approx(1 / sigma, rel=1e-9)
    assert gradient > sigma


def test_a_count_that_would_cost_too_much_is_refused():
    with pytest.raises(InputError, match="it must be above 4"):
        mechanism(QUANTILE, noise_multiplier=8.0)
    with pytest.raises(InputError, match="it must be above 4"):
        mechanism(QUANTILE, noise_schedule=Schedule(factors=(1.0, 16 / 3)))


@given(st.floats(0.1, 10.0), st.floats(-3.0, 4.0))
def test_the_bound_stays_in_its_range_and_falls_where_too_few_are_clipped(bound, share):
    found = QUANTILE.next_bound(bound, share)
    assert 0.1 <= found <= 10.0
    assert found <= bound if share >= 0.5 else found >= bound


@pytest.mark.parametrize(
    "clipping", [FLAT, LAYERS, QUANTILE, FlatClipping(max_grad_norm=1.0, schedule=LAYERS.schedule)]
)
@pytest.mark.parametrize("schedule", [None, Schedule(factors=(1.0, 0.9), every=5)])
def test_it_is_read_back_from_a_ledger(clipping, schedule):
    for whole in (mechanism(clipping, noise_schedule=schedule), mechanism(clipping).open_ended(first_stage=5)):
        assert mechanism_from_dict(whole.to_dict()) == whole
        assert "12" in whole.theorem("pld")
        assert whole.summary
    with pytest.raises(InputError, match="calibrate the mechanism first"):
        mechanism_from_dict(mechanism(clipping, noise_multiplier=None).to_dict())


@pytest.mark.parametrize("accountant", ["rdp", "pld"])
@pytest.mark.parametrize("schedule", [None, Schedule(factors=(1.0, 0.7, 0.5), every=6)])
def test_calibration_meets_its_target(accountant, schedule):
    asked = mechanism(QUANTILE, noise_multiplier=None, noise_schedule=schedule)
    found = asked.calibrate(epsilon=2.0, delta=1e-5, accountant=accountant)
    assert 1.99 < found.epsilon_after(20, delta=1e-5, accountant=accountant) <= 2.0


@pytest.mark.parametrize("schedule", [None, Schedule(factors=(1.0, 0.7, 0.5), every=6)])
def test_a_budget_gives_the_most_releases_that_fit(schedule):
    found = mechanism(noise_schedule=schedule).lasting(epsilon=1.5, delta=1e-5, accountant="rdp")
    assert found.epsilon_after(found.releases, delta=1e-5, accountant="rdp") <= 1.5
    more = found.with_releases(found.releases + 1)
    assert more.epsilon_after(more.releases, delta=1e-5, accountant="rdp") > 1.5
    with pytest.raises(InputError, match="not enough for a single release"):
        mechanism().lasting(epsilon=1e-4, delta=1e-5, accountant="rdp")


@given(st.integers(0, 5000))
def test_the_largest_count(limit):
    assert largest_count(lambda count: count <= limit) == limit


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Schedule(factors=()), "factors of length 0"),
        (lambda: Schedule(factors=(1.0, 0.0)), "factors=0.0 is not allowed"),
        (lambda: Schedule(factors=(1.0,), every=0), "every=0 is not allowed"),
        (lambda: FlatClipping(max_grad_norm=0.0), "max_grad_norm=0.0 is not allowed"),
        (lambda: LayerClipping(layers=("a", "a"), bounds=(1.0, 1.0)), "give each layer once"),
        (lambda: LayerClipping(layers=("a",), bounds=(1.0, 1.0)), "give each layer once"),
        (lambda: LayerClipping(layers=("a",), bounds=(math.inf,)), "bounds=inf is not allowed"),
        (lambda: QuantileClipping(max_grad_norm=1.0, noise=1.0, smallest=2.0, largest=3.0), "must lie between"),
        (lambda: QuantileClipping(max_grad_norm=1.0, noise=1.0, smallest=0.5, largest=3.0, rate=20.0), "rate=20.0"),
        (lambda: mechanism().calibrate(epsilon=1.0, delta=1e-5), "leave it None"),
    ],
)
def test_bad_settings_are_refused(make, message):
    with pytest.raises(InputError, match=message):
        make()
