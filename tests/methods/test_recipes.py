"""Recipes: smooth in epsilon, allowed as settings, and the same mechanism with and without the gate's scaling."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.experiments.settings import default_settings
from sluice.methods.recipes import EPSILONS, RECIPES, Recipe, at

RECIPE = Recipe(
    features={0.0: "patches"}, batch_size=0, gated_batch_size=64, releases=40.0, clip=0.5, lr=(1, 2, 4, 8, 16)
)


def test_given_values_are_met_and_the_ends_hold_beyond():
    curve = (1.0, 2.0, 4.0, 8.0, 16.0)
    assert [at(curve, epsilon) for epsilon in EPSILONS] == list(curve)
    assert at(curve, 0.01) == 1.0
    assert at(curve, 100.0) == 16.0
    assert at(3.0, 7.0) == 3.0


@given(st.floats(0.3, 12.0))
def test_between_them_a_curve_rises_as_its_values_do(epsilon: float):
    curve = (1.0, 2.0, 4.0, 8.0, 16.0)
    assert at(curve, epsilon) <= at(curve, epsilon * 1.2)
    assert at(curve, math.sqrt(2.0)) == pytest.approx(math.sqrt(8.0), rel=5e-3)


def test_the_gate_has_the_scaling_of_its_paper_and_the_learning_rate_takes_the_factor_back():
    plain, gated = RECIPE.settings(1.0, gated=False), RECIPE.settings(1.0, gated=True)
    assert (plain["scaling"], plain["max_grad_norm"], plain["lr"], plain["batch_size"]) == ("clip", 0.5, 2.0, 0)
    assert (gated["scaling"], gated["scaling_bound"], gated["lr"], gated["batch_size"]) == ("global", 0.5, 1.0, 64)
    # C / max(norm, S) with C = 1 is clipping at S, divided by S.
    for norm in (0.1, 0.5, 1.3):
        clipped = plain["lr"] * min(1.0, plain["max_grad_norm"] / norm)
        assert gated["lr"] / max(norm, gated["scaling_bound"]) == pytest.approx(clipped)


@pytest.mark.parametrize("dataset", sorted(RECIPES))
@pytest.mark.parametrize("method", ["dpsgd", "dpsr-cg"])
@pytest.mark.parametrize("epsilon", [0.3, 1.0, 1.7, 3.0, 20.0])
def test_every_recipe_is_a_valid_default(dataset: str, method: str, epsilon: float):
    best = default_settings(dataset, method=method, epsilon=epsilon)
    paper = default_settings(dataset, method=method, epsilon=epsilon, recipe="paper")
    assert best.features != paper.features
    assert (best.epsilon, best.method) == (epsilon, method)
