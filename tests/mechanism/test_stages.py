"""Runs without a planned end: what is charged, and that an adversary who chooses when to stop does not get past it."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import brentq
from scipy.signal import fftconvolve
from scipy.special import ndtr
from scipy.stats import norm

from sluice._base.errors import InputError
from sluice.mechanism.gates import ClippingBiasGate
from sluice.mechanism.registry import mechanism_from_dict
from sluice.mechanism.scaling import Clip
from sluice.mechanism.selective_release import SelectiveRelease
from sluice.mechanism.stages import Stages


def mechanism(**changes: object) -> SelectiveRelease:
    settings: dict = {
        "sample_rate": 0.05,
        "expected_batch_size": 50.0,
        "scaling": Clip(),
        "noise_multiplier": 1.5,
        "releases": 20,
        **changes,
    }
    return SelectiveRelease(**settings)


@given(st.integers(1, 10**6), st.integers(0, 40))
def test_a_stage_ends_half_a_power_of_two_later(first, number):
    end = Stages(first=first).stage(number).releases
    assert (end - 1) ** 2 < first**2 * 2**number <= end**2


@given(st.integers(1, 500), st.integers(0, 10**6))
def test_the_stage_that_is_reached_is_the_first_that_covers_the_releases(first, releases):
    stages = Stages(first=first)
    found = stages.reached_by(releases)
    assert found.releases >= releases
    assert found.number == 0 or stages.stage(found.number - 1).releases < releases


def test_shares_of_delta_never_add_up_to_more_than_one():
    stages = Stages(first=1)
    assert sum(Fraction(stages.stage(number).delta_share) for number in range(2000)) < 1


@pytest.mark.parametrize("spent", [0, 1, 20, 21, 29, 300])
def test_a_run_is_charged_for_its_stage_at_the_stages_delta(spent):
    opened = mechanism().open_ended(first_stage=20)
    stage = Stages(first=20).reached_by(spent)
    expected = mechanism(releases=stage.releases).epsilon_after(
        stage.releases, delta=1e-5 * stage.delta_share, accountant="rdp"
    )
    assert opened.epsilon_spent(spent, delta=1e-5, accountant="rdp") == expected
    assert opened.epsilon_spent(spent, delta=1e-5, accountant="rdp") > opened.epsilon_after(
        spent, delta=1e-5, accountant="rdp"
    )


def test_a_planned_run_is_charged_as_before():
    planned = mechanism()
    assert planned.epsilon_spent(3, delta=1e-5, accountant="rdp") == planned.epsilon_after(
        20, delta=1e-5, accountant="rdp"
    )
    assert "stages" not in planned.to_dict()


@pytest.mark.parametrize("gate", [None, ClippingBiasGate(gate_noise=1.0, reference_noise=4.0, small_norm=0.2)])
def test_it_is_read_back_from_a_ledger(gate):
    opened = mechanism(gate=gate).open_ended(first_stage=7)
    assert mechanism_from_dict(opened.to_dict()) == opened
    assert not opened.composable
    assert "12.1" in opened.theorem("pld")
    assert all(figure.guaranteed and math.isfinite(figure.value) for figure in opened.report(delta=1e-5)[:2])


def test_stages_need_a_first():
    with pytest.raises(InputError, match="first=0 is not allowed"):
        Stages(first=0)


def gaussian_epsilon(mu: float, delta: float) -> float:
    def excess(epsilon: float) -> float:
        return float(ndtr(mu / 2 - epsilon / mu) - math.exp(epsilon) * ndtr(-mu / 2 - epsilon / mu)) - delta

    return float(brentq(excess, 0.0, 60.0))


def test_stopping_by_looking_stays_within_the_charge_of_the_stages():
    """The adversary of docs/accounting.md, section 3.5, now against what is charged by stages: it stops as soon as the loss of the
    outputs exceeds the epsilon that would be reported. Followed on a grid, under the law with the record."""
    sigma, most, delta, step = 10.0, 120, 1e-3, 0.02
    mu = 1 / sigma
    stages = Stages(first=5)
    score = np.arange(-80.0, 90.0, step)
    noise = norm.pdf(np.arange(-8.0, 8.0 + step / 2, step)) * step
    going = norm.pdf(score)
    beyond = 0.0
    for t in range(1, most + 1):
        if t > 1:
            going = np.maximum(fftconvolve(going, noise, mode="same"), 0.0)
        stage = stages.reached_by(t)
        charged = gaussian_epsilon(mu * math.sqrt(stage.releases), delta * stage.delta_share)
        loss = mu * score + t * mu * mu / 2
        stopped = np.where(loss > charged, going, 0.0) * step
        beyond += float(np.sum(stopped * np.maximum(-np.expm1(charged - loss), 0.0)))
        going = np.where(loss > charged, 0.0, going)
    assert 0 < beyond <= delta
    assert charged > gaussian_epsilon(mu * math.sqrt(most), delta)
