"""Which modules get a rule."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from sluice.gradients.rules import rule_for


class Named(nn.Conv2d):
    """Other defaults, the same arithmetic."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels, channels, 3, padding=1, bias=False)
        self.channels = channels

    def extra_repr(self) -> str:
        return f"channels={self.channels}"

    def fan_in(self) -> int:
        return self.channels * 9


class OtherForward(nn.Linear):
    def forward(self, input):
        return super().forward(input) * 2


class Standardised(nn.Conv2d):
    def _conv_forward(self, input, weight, bias):
        return super()._conv_forward(input, weight - weight.mean(), bias)


class Computed(nn.Linear):
    def __init__(self) -> None:
        super().__init__(3, 3)
        del self.weight
        self.raw = nn.Parameter(torch.randn(3, 3))

    @property
    def weight(self):
        return torch.tanh(self.raw)


class ByAttribute(nn.Linear):
    def __init__(self) -> None:
        super().__init__(3, 3)
        nn.init.normal_(self._parameters["weight"])  # the base class has initialised what it got, a copy

    def __getattr__(self, name):
        found = super().__getattr__(name)
        return found * 2 if name == "weight" else found


def patched() -> nn.Module:
    layer = nn.Linear(3, 3)
    layer.forward = lambda x: F.linear(x, layer.weight * 2, layer.bias)
    return layer


@pytest.mark.parametrize("module", [Named(3), NonDynamicallyQuantizableLinear(3, 3), nn.Linear(3, 3)])
def test_subclasses_that_change_no_arithmetic_inherit_the_rule(module):
    assert rule_for(module) is not None


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (lambda: OtherForward(3, 3), (3,)),
        (lambda: Standardised(3, 2, 1), (3, 4, 4)),
        (Computed, (3,)),
        (ByAttribute, (3,)),
        (patched, (3,)),
    ],
    ids=["forward", "inner-forward", "property", "attribute", "patched"],
)
def test_subclasses_that_may_compute_something_else_do_not_and_are_right(matches, reaching_loss, make, shape):
    module = make()
    assert rule_for(module) is None
    if make is not patched:  # a copy of it, as the oracle makes one, calls the original
        matches(nn.Sequential(module), torch.randn(4, *shape), torch.randn(4), reaching_loss)
