from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
from dp_accounting import ComposedDpEvent, GaussianDpEvent, PoissonSampledDpEvent, SelfComposedDpEvent
from hypothesis import given
from hypothesis import strategies as st

from sluice._base.errors import InputError
from sluice.accounting.events import SelectiveReleaseDpEvent
from sluice.mechanism.gates import ClippingBiasGate, CoinGate, Gate
from sluice.mechanism.registry import mechanism_from_dict
from sluice.mechanism.scaling import Clip, GlobalScaling
from sluice.mechanism.selective_release import SelectiveRelease
from sluice.mechanism.stated_gate import StatedGate, stated

GATE = ClippingBiasGate(gate_noise=2.5, reference_noise=10.0, small_norm=8.0)
PLAIN = SelectiveRelease(
    sample_rate=0.01, expected_batch_size=600.0, scaling=Clip(max_grad_norm=1.0), noise_multiplier=1.5, releases=100
)
SELECTIVE = replace(PLAIN, gate=GATE, scaling=GlobalScaling(bound=8.0))


def test_without_a_gate_it_is_the_sampled_gaussian():
    assert PLAIN.release_event == PoissonSampledDpEvent(0.01, GaussianDpEvent(1.5))
    assert PLAIN.dp_event == ComposedDpEvent([SelfComposedDpEvent(PLAIN.release_event, 100)])


def test_with_a_gate_the_event_holds_what_the_gate_states():
    event = SELECTIVE.release_event
    assert isinstance(event, SelectiveReleaseDpEvent)
    assert event.acceptance == GATE.acceptance
    assert event.reference_noise_multiplier == 10.0
    assert SELECTIVE.provable
    assert not replace(SELECTIVE, gate=replace(GATE, hidden_reference=True)).provable


def test_preparation_is_composed_with_the_releases():
    events = replace(PLAIN, prior_releases=(8.0, 8.0)).event_after(3).events
    assert events[:2] == [GaussianDpEvent(8.0), GaussianDpEvent(8.0)]
    assert events[2].count == 3
    assert PLAIN.event_after(0) == ComposedDpEvent([])


@given(
    rate=st.floats(1e-6, 1), noise=st.floats(0.1, 50), gate_noise=st.floats(0.1, 9), reference=st.floats(0.5, math.inf)
)
def test_round_trip_through_json(rate, noise, gate_noise, reference):
    gate = replace(GATE, gate_noise=gate_noise, reference_noise=reference, max_attempts=1000)
    for chosen in (None, gate, CoinGate(probability=0.4)):
        mechanism = replace(PLAIN, sample_rate=rate, noise_multiplier=noise, gate=chosen, prior_releases=(4.0,))
        again = SelectiveRelease.from_dict(json.loads(json.dumps(mechanism.to_dict(), allow_nan=False)))
        assert again == mechanism
        assert again.dp_event == mechanism.dp_event


def test_a_gate_of_ones_own_is_kept_by_what_it_states():
    class Own(ClippingBiasGate):
        pass

    own = Own(gate_noise=1.0, reference_noise=5.0, small_norm=1.0)
    again = Gate.from_dict(json.loads(json.dumps(stated(own).to_dict())))
    assert isinstance(again, StatedGate)
    assert (again.acceptance, again.reference_noise, again.provable) == (own.acceptance, 5.0, True)
    with pytest.raises(InputError, match="give make_private the gate object"):
        again.first_reference()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sample_rate": 0.0}, "sample_rate=0.0 is not allowed"),
        ({"noise_multiplier": -1.0}, "noise_multiplier=-1.0 is not allowed"),
        ({"releases": 0}, "releases=0 is not allowed"),
        ({"releases": 1.5}, "releases=1.5 is not allowed"),
        ({"expected_batch_size": 0.0}, "expected_batch_size=0.0 is not allowed"),
        ({"prior_releases": (0.0,)}, "prior_releases=0.0 is not allowed"),
        ({"gate": ClippingBiasGate()}, "reference_noise=None is not allowed"),
        ({"gate": ClippingBiasGate(reference_noise=5.0)}, "gate_noise=None is not allowed"),
    ],
)
def test_bad_values_are_refused(change, message):
    with pytest.raises(InputError, match=message):
        replace(PLAIN, **change)


OPEN = replace(PLAIN, noise_multiplier=None)


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
@pytest.mark.parametrize("gate", [None, ClippingBiasGate(small_norm=8.0), CoinGate(probability=0.5)])
def test_calibration_fills_in_what_is_open_and_meets_the_budget(gate, accountant):
    found = replace(OPEN, gate=gate, prior_releases=(20.0,)).calibrate(epsilon=1.0, delta=1e-5, accountant=accountant)
    assert 0.99 < found.epsilon_after(found.releases, delta=1e-5, accountant=accountant) <= 1.0
    assert replace(found, noise_multiplier=None, gate=gate) == replace(OPEN, gate=gate, prior_releases=(20.0,))
    if isinstance(gate, ClippingBiasGate):
        assert isinstance(found.gate, ClippingBiasGate)
        assert replace(found.gate, gate_noise=None, reference_noise=None) == gate


def test_calibration_keeps_what_is_given():
    given = ClippingBiasGate(small_norm=8.0, gate_noise=3.0)
    found = replace(OPEN, gate=given).calibrate(epsilon=1.0, delta=1e-5, accountant="rdp")
    assert isinstance(found.gate, ClippingBiasGate)
    assert found.gate.gate_noise == 3.0
    assert found.gate.reference_noise is not None
    with pytest.raises(InputError, match=r"noise_multiplier=1.5 is not allowed in calibrate"):
        PLAIN.calibrate(epsilon=1.0, delta=1e-5)


def test_a_mechanism_with_open_noise_is_neither_accounted_for_nor_read():
    with pytest.raises(InputError, match="noise_multiplier=None is not allowed here"):
        _ = OPEN.dp_event
    with pytest.raises(InputError, match="noise_multiplier=None is not allowed"):
        mechanism_from_dict(PLAIN.to_dict() | {"noise_multiplier": None})


def test_unknown_keys_and_gates_are_refused():
    with pytest.raises(InputError, match="unknown keys seed"):
        SelectiveRelease.from_dict({**PLAIN.to_dict(), "seed": 1})
    with pytest.raises(InputError, match="gate='open' is not allowed"):
        SelectiveRelease.from_dict({**PLAIN.to_dict(), "gate": {"gate": "open"}})
    with pytest.raises(InputError, match="releases=101 is not allowed"):
        PLAIN.event_after(101)
