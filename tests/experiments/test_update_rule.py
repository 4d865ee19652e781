"""The optimizers of `sluice train` are PyTorch's, but for the compiler that those load."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from sluice.experiments.update_rule import make_optimizer

KINDS = {
    "sgd": lambda parameters, **given: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, **given),
    "adam": lambda parameters, **given: torch.optim.Adam(parameters, lr=0.1, **given),
    "adamw": lambda parameters, **given: torch.optim.AdamW(parameters, lr=0.1, **given),
}


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3))


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine", "step"])
@pytest.mark.parametrize("decay", [None, 0.0, 0.01])
def test_weights_and_state_are_those_of_torch_bit_for_bit(kind, schedule, decay):
    settings = SimpleNamespace(
        optimizer=kind, lr=0.1, momentum=0.9, lr_schedule=schedule, releases=10, weight_decay=decay
    )
    ours, theirs = _model(), _model()
    optimizer, scheduler = make_optimizer(settings, ours)
    reference = KINDS[kind](theirs.parameters(), **({} if decay is None else {"weight_decay": decay}))
    assert isinstance(optimizer, type(reference))
    for step in range(3):
        for group, other in zip(optimizer.param_groups, reference.param_groups, strict=True):
            other["lr"] = group["lr"]
        _step(ours, optimizer, step)
        _step(theirs, reference, step)
        if scheduler is not None:
            scheduler.step()
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))
    resumed = _model()
    again, _ = make_optimizer(settings, resumed)
    resumed.load_state_dict(ours.state_dict())
    again.load_state_dict(reference.state_dict())
    _step(ours, optimizer, 9)
    for group, other in zip(optimizer.param_groups, again.param_groups, strict=True):
        other["lr"] = group["lr"]
    _step(resumed, again, 9)
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), resumed.parameters(), strict=True))


def test_a_step_is_a_tenth_of_the_learning_rate_from_the_middle_on():
    settings = SimpleNamespace(optimizer="sgd", lr=0.2, momentum=0.9, lr_schedule="step", releases=5, weight_decay=None)
    optimizer, scheduler = make_optimizer(settings, _model())
    rates = []
    for step in range(5):
        rates.append(optimizer.param_groups[0]["lr"])
        _step(_model(), optimizer, step)
        scheduler.step()
    assert rates == pytest.approx([0.2, 0.2, 0.2, 0.02, 0.02])
