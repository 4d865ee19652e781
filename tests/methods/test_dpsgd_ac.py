"""What DPSGD-AC promises, by its options."""

from __future__ import annotations

import pytest

from sluice._base.errors import InputError
from sluice.experiments.settings import settings_from
from sluice.mechanism.clipped_release import ClippedRelease
from sluice.mechanism.clipping import FlatClipping, QuantileClipping, Schedule
from sluice.methods import planned_mechanism


def planned(**overrides: object) -> ClippedRelease:
    given = {"method": "dpsgd-ac", "dataset": "digits", "releases": 12, "noise_multiplier": 2.0, "accountant": "rdp"}
    mechanism = planned_mechanism(settings_from({**given, **overrides}), dataset_size=1437)
    assert isinstance(mechanism, ClippedRelease)
    return mechanism


def test_the_bound_follows_a_quantile_or_a_schedule():
    found = planned(options={"quantile": 0.7, "count_noise": 5.0})
    assert found.clipping == QuantileClipping(max_grad_norm=1.0, quantile=0.7, noise=5.0, smallest=1e-3, largest=1e3)
    assert found.noise_schedule is None
    found = planned(options={"bound": "schedule", "clip_end": 0.25, "noise_end": 4.0, "levels": 3})
    assert found.clipping == FlatClipping(max_grad_norm=1.0, schedule=Schedule(factors=(1.0, 0.5, 0.25), every=4))
    assert found.noise_schedule == Schedule(factors=(1.0, 2.0, 4.0), every=4)


def test_noise_is_calibrated_with_its_schedule():
    found = planned(noise_multiplier=None, epsilon=2.0, options={"noise_end": 0.5, "levels": 4})
    assert 1.98 < found.epsilon_after(12, delta=1e-5, accountant="rdp") <= 2.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bound": "hope"}, "bound='hope' is not allowed"),
        ({"quantile": 1.0}, "quantile=1.0 is not allowed"),
        ({"noise_end": 1e-3}, "noise_end=0.001 is not allowed"),
        ({"bound": "schedule", "quantile": 0.7}, "the bound follows a schedule"),
        ({"clip_end": 0.5}, "the bound follows a quantile"),
        ({"levels": 5}, "there is no schedule"),
        ({"count_noise": 0.5}, "on the count is not allowed"),
    ],
)
def test_options_without_meaning_are_refused(options, message):
    with pytest.raises(InputError, match=message):
        planned(options=options)
