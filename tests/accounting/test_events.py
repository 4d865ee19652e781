from __future__ import annotations

import json
import math

import pytest
from dp_accounting import DpEvent, GaussianDpEvent, LaplaceDpEvent, PoissonSampledDpEvent
from hypothesis import given
from hypothesis import strategies as st

from sluice._base.errors import InputError
from sluice.accounting.acceptance import Acceptance
from sluice.accounting.events import UNGATED, SelectiveReleaseDpEvent, as_release, plain_release
from sluice.mechanism.gates import ClippingBiasGate

PROBABILITY = st.floats(1e-9, 1.0, exclude_min=True)
EVENTS = st.builds(
    SelectiveReleaseDpEvent,
    sampling_probability=PROBABILITY,
    noise_multiplier=st.floats(1e-3, 1e6),
    acceptance=st.builds(Acceptance, ratio_min=PROBABILITY, ratio_max=st.floats(1, 100), probability_min=PROBABILITY),
    reference_noise_multiplier=st.one_of(st.just(math.inf), st.floats(1e-3, 1e6)),
    max_attempts=st.one_of(st.none(), st.integers(1, 10**9)),
)


@given(EVENTS)
def test_json_gives_the_very_same_event_back(event):
    text = json.dumps(event.to_dict(), allow_nan=False)
    assert SelectiveReleaseDpEvent.from_dict(json.loads(text)) == event


@given(EVENTS)
def test_dp_accountings_named_tuples_give_the_very_same_event_back(event):
    assert DpEvent.from_named_tuple(event.to_named_tuple()) == event


@pytest.mark.parametrize("place", ["top", "acceptance"])
def test_unknown_and_missing_keys_are_refused(place):
    event = SelectiveReleaseDpEvent(sampling_probability=0.1, noise_multiplier=1.0, acceptance=UNGATED)
    data = event.to_dict()
    target = data if place == "top" else data["acceptance"]
    with pytest.raises(InputError, match="unknown keys surprise"):
        target["surprise"] = 1
        SelectiveReleaseDpEvent.from_dict(data)
    del target["surprise"]
    target.pop("noise_multiplier" if place == "top" else "ratio_min")
    with pytest.raises(InputError, match="lacks"):
        SelectiveReleaseDpEvent.from_dict(data)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("sampling_probability", 0.0),
        ("sampling_probability", 1.1),
        ("noise_multiplier", 0.0),
        ("noise_multiplier", math.inf),
        ("noise_multiplier", math.nan),
        ("reference_noise_multiplier", 0.0),
        ("max_attempts", 0),
    ],
)
def test_values_out_of_range_are_refused_by_name(name, value):
    arguments = {"sampling_probability": 0.1, "noise_multiplier": 1.0, "acceptance": UNGATED, name: value}
    with pytest.raises(InputError, match=name):
        SelectiveReleaseDpEvent(**arguments)


def test_gradient_and_reference_are_one_gaussian_release():
    event = SelectiveReleaseDpEvent(
        sampling_probability=0.1, noise_multiplier=3.0, acceptance=UNGATED, reference_noise_multiplier=4.0
    )
    assert event.effective_noise_multiplier == pytest.approx((1 / 9 + 1 / 16) ** -0.5)


def test_giving_up_has_the_probability_of_that_many_rejections():
    gate = Acceptance(ratio_min=0.5, ratio_max=1.0, probability_min=0.1)
    event = SelectiveReleaseDpEvent(sampling_probability=0.1, noise_multiplier=1.0, acceptance=gate, max_attempts=30)
    assert event.give_up_probability == pytest.approx(0.9**30)


def test_plain_events_are_releases_without_a_gate():
    assert as_release(plain_release(sampling_probability=0.1, noise_multiplier=2.0)) == SelectiveReleaseDpEvent(
        sampling_probability=0.1, noise_multiplier=2.0, acceptance=UNGATED
    )
    assert as_release(GaussianDpEvent(2.0)).sampling_probability == 1.0
    assert as_release(LaplaceDpEvent(2.0)) is None
    assert as_release(PoissonSampledDpEvent(0.1, LaplaceDpEvent(2.0))) is None
    assert as_release(GaussianDpEvent(0.0)) is None


def test_a_gate_with_next_to_no_noise_is_refused_with_a_remedy():
    with pytest.raises(InputError, match="Raise the gate's noise"):
        _ = ClippingBiasGate(gate_noise=0.01, reference_noise=1.0).acceptance
