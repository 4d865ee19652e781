from __future__ import annotations

import numpy as np
import pytest
import torch

from sluice.experiments.convergence.problems import PROBLEMS, Digits, Problem, Quadratic


@pytest.fixture(scope="module", params=list(PROBLEMS))
def problem(request: pytest.FixtureRequest) -> Problem:
    return PROBLEMS[request.param]()


def moved(problem: Problem, scale: float, seed: int = 0) -> np.ndarray:
    count = sum(parameter.numel() for parameter in problem.model().parameters())
    return scale * np.random.default_rng(seed).standard_normal(count)


def test_closed_forms_are_those_of_the_model(problem):
    weights = moved(problem, 0.3)
    model = problem.model().double()
    (parameter,) = model.parameters()
    with torch.no_grad():
        parameter.copy_(torch.from_numpy(weights).reshape(parameter.shape))
    inputs, targets = problem.records.tensors
    inputs = inputs.double()
    point = problem.at(weights)
    loss = problem.loss(model(inputs), targets)
    loss.backward()
    assert point.value == pytest.approx(loss.item(), rel=1e-9)
    np.testing.assert_allclose(point.gradient, parameter.grad.flatten().numpy(), rtol=1e-7, atol=1e-9)
    factors = np.random.default_rng(1).random(len(inputs))
    total = np.zeros_like(weights)
    for index in range(20):
        model.zero_grad()
        problem.loss(model(inputs[index : index + 1]), targets[index : index + 1]).backward()
        assert np.linalg.norm(parameter.grad.numpy()) == pytest.approx(point.norms[index], rel=1e-9)
        total += factors[index] * parameter.grad.flatten().numpy()
    factors[20:] = 0.0
    np.testing.assert_allclose(point.mean(factors), total / len(inputs), rtol=1e-7, atol=1e-12)


def test_constants_bound_what_they_say(problem):
    for seed in range(5):
        here, step = problem.at(moved(problem, 0.5, seed)), moved(problem, 0.2, seed + 10)
        there = problem.at(moved(problem, 0.5, seed) + step)
        rise = there.value - here.value - here.gradient @ step
        assert -1e-9 <= rise <= problem.smoothness / 2 * step @ step + 1e-9
        assert problem.least <= there.value
    assert problem.trace <= problem.smoothness * len(moved(problem, 1.0)) * (1 + 1e-9)


def test_the_smallest_loss_of_digits_is_reached():
    problem = Digits(decay=0.1)
    point = moved(problem, 0.0)
    for _ in range(400):
        point = point - problem.at(point).gradient / problem.smoothness
    assert problem.least <= problem.at(point).value <= problem.least + 1e-3


def test_the_quadratic_begins_as_far_away_as_it_says():
    start = Quadratic(distance=20.0)
    assert np.linalg.norm(start.now(start.model()).gradient) == pytest.approx(20.0, rel=0.02)
