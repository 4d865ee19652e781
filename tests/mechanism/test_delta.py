from __future__ import annotations

import warnings

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import TensorDataset

from sluice import PrivacyEngine
from sluice.mechanism.delta import DeltaWarning, delta_problem, records_of
from sluice.mechanism.scaling import Clip
from sluice.mechanism.selective_release import SelectiveRelease


@given(st.integers(1, 10**9), st.floats(1e-12, 0.999))
def test_a_delta_is_questioned_just_where_it_is_not_below_one_over_n(records, delta):
    problem = delta_problem(delta, records=records)
    assert (problem is not None) == (delta * records >= 1)
    if problem is not None:
        suggested = float(problem.rsplit(", ", 1)[1].split()[0])
        assert suggested <= 0.1 / records


def test_an_unknown_number_of_records_is_not_guessed():
    assert delta_problem(0.5, records=None) is None
    assert records_of(object()) is None


def test_the_number_of_records_is_that_of_the_plan():
    mechanism = SelectiveRelease(
        sample_rate=50 / 1000,
        expected_batch_size=50.0,
        scaling=Clip(max_grad_norm=1.0),
        noise_multiplier=1.0,
        releases=3,
    )
    assert records_of(mechanism) == 1000


@pytest.mark.parametrize(("delta", "warns"), [(0.5, True), (1 / 40, True), (1e-5, False)])
def test_the_engine_warns_where_epsilon_is_asked_for(delta, warns):
    model = nn.Sequential(nn.Linear(2, 2))
    data = TensorDataset(torch.zeros(40, 2), torch.zeros(40, dtype=torch.int64))
    engine = PrivacyEngine(accountant="rdp", seed=1)
    options = {"module": model, "data_loader": data, "sample_rate": 0.1, "max_grad_norm": 1.0, "releases": 2}
    engine.make_private(**options, optimizer=torch.optim.SGD(model.parameters(), lr=1.0), noise_multiplier=1.0)
    other = PrivacyEngine(accountant="rdp", seed=1)
    asked = [
        lambda: engine.get_epsilon(delta),
        lambda: engine.get_certified_epsilon(delta),
        lambda: other.make_private_with_epsilon(
            **options, optimizer=torch.optim.SGD(model.parameters(), lr=1.0), target_epsilon=1.0, target_delta=delta
        ),
    ]
    for ask in asked:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            ask()
        assert any(issubclass(each.category, DeltaWarning) for each in caught) == warns
    engine.close()
    other.close()
