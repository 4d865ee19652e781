from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from sluice.accounting.dpsur import compare_dpsur, provable_epsilon
from sluice.engine import PrivacyEngine
from sluice.errors import InputError
from sluice.methods import planned_mechanism
from sluice.methods.dpsur import DpsurMechanism, SelectiveUpdates, claimed_settings
from sluice.scaling import Clip, GlobalScaling
from sluice.settings import settings_from

RECORDS = 200


def mechanism(**changes: Any) -> DpsurMechanism:
    exact = DpsurMechanism(
        sample_rate=0.5,
        expected_batch_size=100.0,
        scaling=Clip(max_grad_norm=1.0),
        noise_multiplier=1e-3,
        validation_rate=0.5,
        expected_validation_size=100.0,
        validation_noise=1e-3,
        loss_clip=0.01,
        threshold=-0.5,
        releases=3,
    )
    return replace(exact, **changes)


def run(promise: DpsurMechanism, *, optimizer: str = "sgd") -> tuple[PrivacyEngine, nn.Module, torch.optim.Optimizer]:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(RECORDS, 4, generator=generator)
    data = TensorDataset(inputs, (inputs[:, 0] > 0).long())
    torch.manual_seed(1)
    model = nn.Linear(4, 2)
    chosen: torch.optim.Optimizer = (
        torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
        if optimizer == "sgd"
        else torch.optim.Adam(model.parameters(), lr=0.1)
    )
    engine = PrivacyEngine(seed=5, accountant="rdp")
    engine.make_private_by(promise, module=model, optimizer=chosen, data_loader=data)
    return engine, model, chosen


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_a_planted_bad_step_is_rejected_and_leaves_no_trace(optimizer, monkeypatch):
    engine, model, chosen = run(mechanism(), optimizer=optimizer)
    releases = engine.releases(F.cross_entropy)
    next(releases)
    before = copy.deepcopy((model.state_dict(), chosen.state_dict()))
    honest, seen = SelectiveUpdates._noisy_gradient, []

    def planted(self: SelectiveUpdates, indices: Tensor, loss: Any) -> dict[str, Tensor]:
        if seen:  # everything the rejected candidate touched is back
            now = (model.state_dict(), chosen.state_dict())
            assert all(torch.equal(now[0][name], value) for name, value in before[0].items())
            assert str(now[1]) == str(before[1])
        gradient = honest(self, indices, loss)
        seen.append(1)
        return {name: -50 * value for name, value in gradient.items()} if len(seen) <= 3 else gradient

    monkeypatch.setattr(SelectiveUpdates, "_noisy_gradient", planted)
    next(releases)
    assert engine.last_private_trace()[0] == 4
    assert not torch.equal(model.weight, before[0]["weight"])


def test_both_losses_are_taken_on_the_same_fresh_batch(monkeypatch):
    from sluice.workbench import Workbench

    engine, _, _ = run(mechanism())
    seen: list[Tensor] = []
    honest = Workbench.raw_losses

    def watched(self: Workbench, indices: Tensor, loss: Any) -> Tensor:
        seen.append(indices)
        return honest(self, indices, loss)

    monkeypatch.setattr(Workbench, "raw_losses", watched)
    for _ in engine.releases(F.cross_entropy):
        pass
    pairs = list(zip(seen[::2], seen[1::2], strict=True))
    assert all(torch.equal(first, second) for first, second in pairs)
    assert not torch.equal(pairs[0][0], pairs[1][0])


def test_the_test_has_the_noise_that_is_accounted():
    engine, _, _ = run(mechanism(validation_noise=1.3, loss_clip=0.01, threshold=-1.0))
    procedure = engine._procedure
    assert isinstance(procedure, SelectiveUpdates)
    for raw_change in (-0.01, 0.0, 0.01):
        share = sum(procedure._passes(raw_change) for _ in range(4000)) / 4000
        expected = torch.distributions.Normal(0, 2 * 0.01 * 1.3).cdf(torch.tensor(-0.01 - raw_change)).item()
        assert share == pytest.approx(expected, abs=0.03)


def test_a_change_that_is_not_a_number_counts_as_the_worst():
    engine, _, _ = run(mechanism())
    procedure = engine._procedure
    assert isinstance(procedure, SelectiveUpdates)
    nothing = torch.zeros(0, dtype=torch.float64)
    assert procedure._raw_change(nothing, nothing) == 0.0
    assert procedure._raw_change(torch.tensor([1.0]), torch.tensor([float("nan")])) == 0.01
    assert procedure._raw_change(torch.tensor([float("inf")]), torch.tensor([1.0])) == 0.01
    assert procedure._raw_change(torch.tensor([1.0]), torch.tensor([100.0])) == 0.01
    assert procedure._raw_change(torch.tensor([100.0]), torch.tensor([1.0])) == -0.01


def test_the_three_figures_are_those_of_the_accountants():
    settings = settings_from({"dataset": "mnist", **claimed_settings("mnist", 3.0), "method": "dpsur"})
    promise = planned_mechanism(settings, dataset_size=60000)
    assert isinstance(promise, DpsurMechanism)
    known = compare_dpsur(promise.release, releases=1475, delta=1e-5)
    authors, paper = promise.claims_after(1475, delta=1e-5)
    assert authors.value == pytest.approx(known.claimed_authors)
    assert paper.value == pytest.approx(known.claimed_paper_table)
    proved = promise.epsilon_after(1475, delta=1e-5, accountant="rdp")
    assert proved == pytest.approx(provable_epsilon(promise.release, releases=1475, delta=1e-5), rel=0.02)
    assert authors.value < 3 < proved


def test_noise_is_calibrated_to_the_account_that_is_asked_for():
    given = {"method": "dpsur", "dataset": "mnist", "epsilon": 3.0}
    proved = planned_mechanism(settings_from(given), dataset_size=60000)
    assert 2.9 < proved.epsilon_after(proved.releases, delta=1e-5, accountant="rdp") <= 3.0
    settings = settings_from({**given, "options": {"account": "claimed"}})
    claimed = planned_mechanism(settings, dataset_size=60000)
    assert 2.9 < claimed.claims_after(claimed.releases, delta=1e-5)[0].value <= 3.0
    assert claimed.epsilon_after(claimed.releases, delta=1e-5, accountant="rdp") > 3.5


def test_a_budget_below_the_cost_of_selection_is_refused():
    settings = settings_from({"method": "dpsur", "epsilon": 0.05, "releases": 500})
    with pytest.raises(InputError, match=r"epsilon=0\.05 cannot be reached"):
        planned_mechanism(settings, dataset_size=1437)


def test_the_ablation_scales_globally():
    settings = settings_from({"method": "dpsur", "scaling": "global", "scaling_bound": 3.0, "noise_multiplier": 2.0})
    promise = planned_mechanism(settings, dataset_size=1437)
    assert isinstance(promise, DpsurMechanism)
    assert promise.scaling == GlobalScaling(max_grad_norm=1.0, bound=3.0)
    assert promise == DpsurMechanism.from_dict(promise.to_dict())
