"""What is not a number proves nothing: wherever a calculation fails, epsilon is infinite, delta is 1, or it is refused."""

from __future__ import annotations

import math

import mpmath
import numpy as np
import pytest

from sluice._base.errors import InputError
from sluice.accounting import calibration, create_accountant
from sluice.accounting.acceptance import Acceptance
from sluice.accounting.attempt_cap import GiveUpCharge
from sluice.accounting.composition import ComposedLosses, compose
from sluice.accounting.dpsur import Dpsur, provable_renyi
from sluice.accounting.dpsur_attempt import attempt_renyi, step_release
from sluice.accounting.dpsur_bound import SelfSelection
from sluice.accounting.events import SelectiveReleaseDpEvent
from sluice.accounting.loss_distribution import LossDistribution
from sluice.accounting.matrix.accounting import accounted_coefficients
from sluice.accounting.matrix.bins import BinsPair
from sluice.accounting.matrix.conditional import conditional_epsilon
from sluice.accounting.matrix.mixture_loss import sum_of_coins
from sluice.accounting.matrix.monte_carlo import certified_delta
from sluice.accounting.matrix.strategy import BandedToeplitz
from sluice.accounting.renyi_conversion import at_least_zero, at_most_one
from sluice.accounting.selective_rdp import renyi_divergences

NAN = math.nan


def test_an_epsilon_or_delta_that_failed_is_no_small_one():
    assert [at_least_zero(x) for x in (NAN, math.inf, 2.0, -1e-9)] == [math.inf, math.inf, 2.0, 0.0]
    assert [at_most_one(x) for x in (NAN, -0.1, math.inf, 2.0, 0.25, 0.0)] == [1.0, 1.0, 1.0, 1.0, 0.25, 0.0]


def test_a_cap_on_attempts_does_not_make_a_number_of_what_is_none():
    charge = GiveUpCharge(delta=1e-9, epsilon=0.1)
    assert charge.with_epsilon(NAN) == math.inf
    assert charge.with_delta(NAN) == 1.0
    with pytest.raises(InputError, match="Raise max_attempts"):
        GiveUpCharge(delta=NAN).remaining_delta(1e-5)


@pytest.mark.parametrize("broken", ["tilted", "infinity", "log_scale", "error", "drift"])
def test_composed_losses_that_failed_prove_nothing(broken):
    good = {"spacing": 0.1, "first": -50, "tilt": 1.0, "log_scale": 0.0, "infinity": 0.0, "error": 0.0, "drift": 0.0}
    values = {**good, "tilted": np.full(100, 1e-9), broken: np.full(100, NAN) if broken == "tilted" else NAN}
    losses = ComposedLosses(**values)
    assert losses.delta(1.0) == 1.0
    assert losses.epsilon(1e-5, near=1.0) == math.inf
    assert ComposedLosses(**{**values, broken: {**good, "tilted": np.full(100, 1e-9)}[broken]}).delta(1.0) < 1e-5


def test_epsilons_that_were_guessed_at_as_no_number_are_infinite():
    losses = ComposedLosses(
        spacing=0.1, first=0, tilt=1.0, log_scale=0.0, tilted=np.zeros(3), infinity=0.0, error=0.0, drift=0.0
    )
    assert losses.delta(NAN) == 1.0
    assert losses.epsilon(1e-5, near=NAN) == math.inf


@pytest.mark.parametrize("infinity", [1.0, NAN])
def test_a_loss_that_is_infinite_for_certain_leaves_nothing(infinity):
    masses = np.array([0.5, 0.5]) if math.isnan(infinity) else np.zeros(2)
    factor = LossDistribution(spacing=0.1, first=0, masses=masses, infinity=infinity)
    composed = compose([(factor, 3)], tilt=1.0, max_points=1000)
    assert composed.delta(5.0) == 1.0
    assert composed.epsilon(1e-5, near=1.0) == math.inf


def test_a_worst_weight_that_is_not_known_is_not_taken_for_a_harmless_one():
    gate = Acceptance(ratio_min=1 - 1e-16, ratio_max=1.0, probability_min=0.5)
    release = SelectiveReleaseDpEvent(sampling_probability=1e-310, noise_multiplier=1.0, acceptance=gate)
    assert np.all(np.isinf(renyi_divergences(release, np.array([2.0, 8.0]))))  # the weight is infinity less infinity


@pytest.mark.parametrize("directions", [(1.0, NAN), (NAN, 1.0)])
def test_dpsur_by_releases_takes_neither_direction_for_granted(directions, monkeypatch):
    monkeypatch.setattr(SelfSelection, "centred_renyi_by_direction", lambda self, order: directions)
    selection = SelfSelection(sample_rate=0.1, noise_multiplier=1.0, validation_rate=0.1, spread=2.0)
    assert selection.centred_renyi(2.0) == math.inf
    provable_renyi.cache_clear()
    mechanism = Dpsur(sample_rate=0.1, noise_multiplier=1.0, validation_rate=0.1, validation_noise=1.0)
    by_conditioning = provable_renyi(mechanism, (2.0, 8.0))
    provable_renyi.cache_clear()
    assert np.all(np.isfinite(by_conditioning))


@pytest.mark.parametrize(("beta", "noise", "rate"), [(3.0, 0.1, 0.2), (4.0, 0.15, 1.0), (-1.0, 1.3, 0.01)])
@pytest.mark.parametrize("order", [2.0, 64.0])
def test_a_side_of_dpsurs_coin_that_rounds_to_nothing_counts(beta, noise, rate, order):
    """Rejections of probability 1e-23 with the record and 1e-88 without: both are 1 - 1 in double precision."""
    attempt = Dpsur(sample_rate=0.1, noise_multiplier=1.0, validation_rate=rate, validation_noise=noise, beta=beta)
    with mpmath.workdps(120):
        least, most = (mpmath.ncdf(mpmath.mpf(end)) for end in attempt.acceptance_arguments)
        worst = mpmath.mpf(0)
        for without, drawn in ((least, most), (most, least)):
            record = (1 - mpmath.mpf(rate)) * without + mpmath.mpf(rate) * drawn
            for p, r in ((record, without), (without, record)):
                moment = p**order * r ** (1 - order) + (1 - p) ** order * (1 - r) ** (1 - order)
                worst = max(worst, mpmath.log(moment) / (order - 1))
    orders = np.array([order])
    decision = attempt_renyi(attempt, orders) - renyi_divergences(step_release(attempt), orders)
    assert decision[0] >= float(worst) * (1 - 1e-9)
    assert decision[0] == pytest.approx(float(worst), rel=1e-6, abs=1e-10)


@pytest.mark.parametrize("largest", [1e155, 1e200])
def test_coefficients_whose_norm_overflows_are_refused(largest):
    strategy = BandedToeplitz((1.0, largest))
    for account in (
        lambda: conditional_epsilon(strategy, steps=50, sample_rate=0.1, noise_multiplier=1.0, delta=1e-5),
        lambda: BinsPair.of(strategy, steps=50, bins=10, noise_multiplier=1.0),
        lambda: accounted_coefficients(strategy, steps=50, noise_multiplier=1.0),
    ):
        with pytest.raises(InputError, match="their norm overflows"):
            account()


@pytest.mark.parametrize(("shift", "probability"), [(NAN, 0.1), (1.0, NAN), (math.inf, 0.1), (1.0, 1.5), (1.0, -0.1)])
@pytest.mark.parametrize("count", [1, 40])
def test_coins_that_are_no_coins_are_refused(shift, probability, count):
    shifts, probabilities = np.full(count, 0.5), np.full(count, 0.1)
    shifts[-1], probabilities[-1] = shift, probability
    with pytest.raises(InputError, match="nothing is proved"):
        sum_of_coins(shifts, probabilities, cells=512, dropped=1e-9)


def test_monte_carlo_does_not_count_what_failed_as_nothing():
    pair = BinsPair(means=np.array([[1.0, NAN], [0.0, 1.0]]))
    for direction in ("remove", "add"):
        with np.errstate(invalid="ignore"):
            assert not np.any(pair.estimates(direction, epsilon=1.0, samples=1000, seed=1) == 0.0)
    with np.errstate(invalid="ignore"), pytest.raises(InputError, match="not allowed"):
        certified_delta(
            pair, noise_multiplier=1.0, epsilon=1.0, samples=1000, seed=1, failure_probability=1e-8, charge=1e-8
        )


def test_a_search_does_not_end_with_what_is_no_number(monkeypatch):
    task = calibration._Task(sample_rate=0.1, delta=1e-5, prior_releases=(), accountant="pld")
    assert task.result(1.0, None, 1, 10.0).epsilon == create_accountant("pld").compose(
        task.event(1.0, None)
    ).get_epsilon(1e-5)
    monkeypatch.setattr(calibration._Task, "epsilon", lambda *_, **__: NAN)
    with pytest.raises(InputError, match="could not be kept"):
        task.result(1.0, None, 1, 10.0)
    with pytest.raises(InputError, match="alone costs"):
        calibration._require_room(task, 10.0)
