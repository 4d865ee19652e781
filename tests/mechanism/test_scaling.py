from __future__ import annotations

import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sluice._base.errors import InputError
from sluice.mechanism.scaling import MARGIN, Clip, GlobalScaling, Normalise, ScalingRule

RULES = [Clip(max_grad_norm=0.7), GlobalScaling(max_grad_norm=1.3, bound=8.0), Normalise(max_grad_norm=0.5, gamma=0.02)]
positive = st.floats(min_value=1e-6, max_value=1e6)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.kind)
@given(norm=st.floats(min_value=0, allow_nan=False, allow_infinity=False, width=32), error=st.floats(-1e-5, 1e-5))
def test_no_weighted_gradient_is_longer_than_the_bound(rule: ScalingRule, norm: float, error: float):
    """In float32, for any gradient, even where the measured norm is off by as much as the engine allows."""
    measured = torch.tensor([norm * (1 + error)], dtype=torch.float32)
    weight = rule(measured)
    if measured.isfinite().all():
        assert weight.item() * norm <= rule.sensitivity
    assert 0 <= weight.item() < math.inf


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.kind)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_norm_that_is_not_finite_gets_weight_zero(rule: ScalingRule, dtype: torch.dtype):
    weights = rule(torch.tensor([math.inf, math.nan, 1.0], dtype=dtype))
    assert weights.dtype == dtype
    assert weights[:2].tolist() == [0, 0]
    assert weights[2] > 0


def test_the_formulas():
    norms = torch.tensor([0.0, 0.5, 2.0, 20.0], dtype=torch.float64)
    shrink = 1 - MARGIN
    assert torch.allclose(Clip(max_grad_norm=1.0)(norms), shrink * torch.tensor([1, 1, 0.5, 0.05]).double())
    expected = shrink * torch.tensor([0.125, 0.125, 0.125, 0.05]).double()
    assert torch.allclose(GlobalScaling(max_grad_norm=1.0, bound=8.0)(norms), expected)
    assert torch.allclose(Normalise(max_grad_norm=1.0, gamma=0.5)(norms), shrink / (norms + 0.5))


def test_an_empty_batch_has_no_weights():
    assert Clip()(torch.zeros(0)).shape == (0,)


@given(clip=positive, bound=positive)
def test_round_trip_through_json(clip: float, bound: float):
    for rule in (
        Clip(max_grad_norm=clip),
        GlobalScaling(max_grad_norm=clip, bound=bound),
        Normalise(max_grad_norm=clip, gamma=bound),
    ):
        assert ScalingRule.from_dict(json.loads(json.dumps(rule.to_dict()))) == rule


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"rule": "drop"}, "rule='drop' is not allowed"),
        ({"rule": "clip"}, "lacks max_grad_norm"),
        ({"rule": "clip", "max_grad_norm": 1.0, "bound": 2.0}, "unknown keys bound"),
        ({"rule": "clip", "max_grad_norm": -1.0}, "max_grad_norm=-1.0 is not allowed"),
        ([], "must be an object"),
    ],
)
def test_bad_descriptions_are_refused(data, message):
    with pytest.raises(InputError, match=message):
        ScalingRule.from_dict(data)
