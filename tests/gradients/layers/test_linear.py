from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from torch import nn


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
