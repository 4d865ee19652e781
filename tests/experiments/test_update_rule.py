"""The optimizers of `sluice train` are PyTorch's, but for the compiler that those load."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from sluice.experiments.update_rule import make_optimizer

KINDS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.1),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.1),
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
@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_weights_and_state_are_those_of_torch_bit_for_bit(kind, schedule):
    settings = SimpleNamespace(optimizer=kind, lr=0.1, momentum=0.9, lr_schedule=schedule, releases=10)
    ours, theirs = _model(), _model()
    optimizer, scheduler = make_optimizer(settings, ours)
    reference = KINDS[kind](theirs.parameters())
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
