from __future__ import annotations

import pytest
import torch
from torch import nn

from sluice._base.errors import InputError, UnsupportedModuleError
from sluice.gradients import PerSampleGradients, check_independence, fix, problems


def net() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 12, 3),
        nn.BatchNorm2d(12),
        nn.ReLU(),
        nn.InstanceNorm2d(12, track_running_stats=True),
        nn.Flatten(),
    )


def test_batch_normalisation_is_refused_by_name_with_its_replacement():
    with pytest.raises(UnsupportedModuleError, match=r"'1' \(BatchNorm2d\).*GroupNorm"):
        PerSampleGradients(net())
    assert len(problems(net())) == 2
    assert problems(net().eval()) == []


def test_frozen_batch_normalisation_is_allowed(matches, reaching_loss):
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten())
    model[1](torch.randn(8, 4, 5, 5))
    matches(model.eval(), torch.randn(5, 3, 4, 4), torch.randn(5), reaching_loss)


def test_switching_to_training_mode_later_is_caught():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).eval()
    engine = PerSampleGradients(model)
    model.train()
    with pytest.raises(UnsupportedModuleError, match="BatchNorm1d"):
        engine.norms(torch.randn(4, 3), torch.zeros(4), lambda o, y: o.sum(1))


def test_fix_returns_a_copy_without_mixing():
    model = net()
    model[1].weight.data.fill_(2.0)
    fixed = fix(model)
    assert problems(fixed) == []
    assert isinstance(model[1], nn.BatchNorm2d)
    assert isinstance(fixed[1], nn.GroupNorm)
    assert torch.equal(fixed[1].weight, model[1].weight)
    assert fixed[1].weight is not model[1].weight
    check_independence(fixed, torch.randn(5, 3, 6, 6))
    PerSampleGradients(fixed).norms(torch.randn(4, 3, 6, 6), torch.zeros(4), lambda o, y: o.sum(1))


class NormThenActivation(nn.BatchNorm2d):
    """Normalisation, dropout and activation in one module, as timm's BatchNormAct2d."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.drop = nn.Identity()
        self.act = nn.ReLU(inplace=True)

    def forward(self, x):
        return self.act(self.drop(super().forward(x)))


class NormOfSquares(nn.BatchNorm2d):
    def forward(self, x):
        return super().forward(x.square())


def test_fix_keeps_what_a_normalisation_applies_afterwards():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), NormThenActivation(8), nn.Flatten())
    nn.init.zeros_(model[1].bias)
    fixed = fix(model)
    assert sum(isinstance(part, nn.ReLU) for part in fixed.modules()) == 1
    x = torch.randn(4, 3, 6, 6)
    norm = next(part for part in fixed.modules() if isinstance(part, nn.GroupNorm))
    assert torch.allclose(fixed(x), norm(model[0](x)).relu().flatten(1))
    assert problems(fixed) == []
    bare = fix(NormThenActivation(8))
    assert bare(torch.randn(2, 8, 3, 3)).min() >= 0


@pytest.mark.parametrize("weight", [0.0, 1.0])
def test_fix_refuses_a_normalisation_that_computes_something_else(weight):
    model = nn.Sequential(NormOfSquares(4))
    nn.init.constant_(model[0].weight, weight)
    with pytest.raises(UnsupportedModuleError, match=r"'0' \(NormOfSquares\).*by hand"):
        fix(model)


def test_fix_of_a_bare_layer_and_of_vectors():
    assert isinstance(fix(nn.BatchNorm1d(7)), nn.GroupNorm)
    fixed = fix(nn.BatchNorm1d(8))
    assert fixed.num_groups < 8, "a group of one channel would map every vector to its bias"


class Centred(nn.Module):
    def forward(self, x):
        return x - x.mean(0)


def test_mixing_is_found_by_trial():
    model = nn.Sequential(nn.Linear(3, 4), nn.Sequential(nn.Tanh(), Centred()), nn.Linear(4, 2))
    with pytest.raises(UnsupportedModuleError, match=r"'1.1'"):
        check_independence(model, torch.randn(5, 3))
    check_independence(nn.Sequential(nn.Linear(3, 4), nn.Dropout()), torch.randn(5, 3))
    with pytest.raises(InputError, match="at least 3"):
        check_independence(model, torch.randn(2, 3))
