from __future__ import annotations

import warnings

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from torch import nn

from sluice.gradients import GradientOptions, PerSampleGradients
from sluice.gradients.layers import linear as linear_rule
from sluice.gradients.native import narrow


@pytest.mark.parametrize("strategy", ["auto", "gram", "explicit", "vmap", "loop"])
@hypothesis_settings(max_examples=12)
@given(
    n=st.sampled_from([0, 1, 7, 64]),
    inner=st.lists(st.integers(1, 5), max_size=2),
    inputs=st.integers(1, 12),
    outputs=st.integers(1, 12),
    bias=st.booleans(),
)
def test_linear_agrees_with_the_oracle(matches, reaching_loss, strategy, n, inner, inputs, outputs, bias):
    model = nn.Sequential(nn.Linear(inputs, outputs, bias=bias), nn.Tanh(), nn.Linear(outputs, 3))
    x = torch.randn(n, *inner, inputs)
    matches(model, x, torch.randn(n), reaching_loss, strategy={"0": strategy})


# Layers with few outputs on stored features.


@hypothesis_settings(max_examples=12)
@given(
    n=st.sampled_from([0, 1, 7, 300]),
    inputs=st.integers(128, 180),
    outputs=st.integers(1, 16),
    bias=st.booleans(),
    frozen=st.sampled_from([(), ("weight",), ("bias",)]),
)
def test_few_outputs_agree_with_the_oracle(matches, reaching_loss, n, inputs, outputs, bias, frozen):
    model = nn.Sequential(nn.Flatten(), nn.Linear(inputs, outputs, bias=bias), nn.Linear(outputs, 2))
    for name, parameter in model[1].named_parameters():
        parameter.requires_grad_(name not in frozen)
    matches(model, torch.randn(n, inputs), torch.randn(n), reaching_loss)


@pytest.mark.parametrize(
    "model",
    [
        nn.Sequential(nn.Linear(9, 150), nn.Linear(150, 3)),  # the inputs have a history
        nn.Sequential(nn.Unflatten(1, (3, 3)), nn.Linear(3, 150), nn.Tanh(), nn.Linear(150, 2)),
    ],
)
def test_few_outputs_elsewhere_agree_with_the_oracle(matches, reaching_loss, model):
    matches(model, torch.randn(7, 9), torch.randn(7), reaching_loss)


def test_a_narrow_layer_called_twice_agrees_with_the_oracle(matches, reaching_loss):
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(130, 3)

        def forward(self, x, other):
            return torch.cat([self.layer(x), self.layer(other).sin()], 1)

    matches(Twice(), (torch.randn(7, 130), torch.randn(7, 130)), torch.randn(7), reaching_loss)


def test_the_narrow_kernel_is_used_for_stored_features(monkeypatch):
    calls = []
    forward = narrow.forward
    monkeypatch.setattr(narrow, "forward", lambda *tensors: calls.append(1) or forward(*tensors))
    if not linear_rule.kernels.available():
        pytest.skip("no kernels in C here")
    model = nn.Linear(130, 3)
    engine = PerSampleGradients(model, options=GradientOptions(verify=False))
    engine.norms(torch.randn(5, 130), torch.zeros(5), lambda o, y: o.sum(1))
    assert len(calls) == 1
    engine.norms(torch.randn(5, 4, 130), torch.zeros(5), lambda o, y: o.sum((1, 2)))
    assert len(calls) == 1


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 3e38, 1e25])
def test_a_hostile_record_leaves_the_others_of_a_narrow_layer_alone(bad, compiled):
    model = nn.Linear(130, 3)
    x = torch.randn(300, 130)
    engine = PerSampleGradients(model, options=GradientOptions(compiled=compiled))

    def sums(x, weights):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return engine.weighted_sum(x, torch.zeros(300), lambda o, y: (o**2).sum(1), lambda norms: weights)

    weights = torch.ones(300)
    weights[5] = 0
    norms, wanted = sums(x, weights)
    spoilt = x.clone()
    spoilt[5, 77] = bad
    weights[5] = 1
    found_norms, found = sums(spoilt, weights)
    assert not found_norms[5].isfinite()
    others = torch.arange(300) != 5
    assert torch.equal(found_norms[others], norms[others])
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value)
