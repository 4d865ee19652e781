from __future__ import annotations

import json

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from sluice._base.errors import InputError
from sluice.accounting import create_accountant
from sluice.accounting.calibration import release_event
from sluice.accounting.opacus_adapter import SelectiveAccountant, register_with_opacus
from sluice.mechanism.gates import ClippingBiasGate

GATE = ClippingBiasGate(gate_noise=1.0, reference_noise=10.0)


def stepped(gate=GATE, steps=30, accountant="rdp"):
    mine = SelectiveAccountant(gate=gate, accountant=accountant)
    for _ in range(steps):
        mine.step(noise_multiplier=2.0, sample_rate=0.02)
    return mine


@pytest.mark.parametrize("gate", [None, GATE])
def test_steps_cost_what_the_events_cost(gate):
    mine = stepped(gate, accountant="pld")
    mine.step(noise_multiplier=1.0, sample_rate=0.1)
    fresh = create_accountant("pld")
    fresh.compose(release_event(sample_rate=0.02, noise_multiplier=2.0, gate=gate), 30)
    fresh.compose(release_event(sample_rate=0.1, noise_multiplier=1.0, gate=gate), 1)
    assert mine.get_epsilon(1e-5) == pytest.approx(fresh.get_epsilon(1e-5), rel=1e-9)


def test_its_length_is_the_number_of_steps_and_history_groups_them():
    mine = stepped()
    mine.step(noise_multiplier=1.0, sample_rate=0.1)
    assert len(mine) == 31
    assert mine.history == [(2.0, 0.02, 30), (1.0, 0.1, 1)]


def test_state_survives_json():
    mine = stepped()
    state = json.loads(json.dumps(mine.state_dict(), allow_nan=False))
    other = SelectiveAccountant()
    other.load_state_dict(state)
    assert len(other) == 30
    assert other.get_epsilon(1e-5) == mine.get_epsilon(1e-5)


def test_foreign_states_are_refused():
    state = stepped().state_dict()
    with pytest.raises(InputError, match="unknown keys more"):
        SelectiveAccountant().load_state_dict(state | {"more": 1})
    with pytest.raises(InputError, match="mechanism='rdp'"):
        SelectiveAccountant().load_state_dict(state | {"mechanism": "rdp"})
    with pytest.raises(InputError, match="count"):
        SelectiveAccountant().load_state_dict(state | {"steps": [state["steps"][0] | {"count": -5}]})


def test_an_uncalibrated_gate_is_refused():
    with pytest.raises(InputError, match="reference_noise"):
        SelectiveAccountant(gate=ClippingBiasGate(gate_noise=1.0)).step(noise_multiplier=1.0, sample_rate=0.1)


@pytest.mark.filterwarnings("ignore")
def test_opacus_trains_with_it_and_charges_each_step():
    from opacus import PrivacyEngine
    from opacus.accountants import create_accountant as create_opacus_accountant

    register_with_opacus()
    assert isinstance(create_opacus_accountant("selective"), SelectiveAccountant)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = TensorDataset(torch.randn(64, 4), torch.randint(0, 2, (64,)))
    engine = PrivacyEngine(accountant="selective")
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=optimizer,
        data_loader=DataLoader(data, batch_size=16),
        noise_multiplier=1.5,
        max_grad_norm=1.0,
    )
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    assert len(engine.accountant) == 4
    plain = create_accountant("pld").compose(release_event(sample_rate=0.25, noise_multiplier=1.5, gate=None), 4)
    assert engine.get_epsilon(1e-5) == pytest.approx(plain.get_epsilon(1e-5), rel=1e-9)
