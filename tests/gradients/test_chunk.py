"""Norms and weights by layer, against the oracle: one sample at a time, in float64."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from sluice._base.errors import InputError
from sluice.gradients import PerSampleGradients
from sluice.gradients.chunk import NonFiniteGradientWarning
from sluice.gradients.combine import SumContribution
from sluice.gradients.contributions import Contribution, ExplicitContribution, Tap, blocks
from sluice.mechanism.rounding_error import CHUNK_ROWS


class Model(nn.Module):
    """A parameter of its own, a layer called twice, one with weight and bias, and one that the loss does not see."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(6))
        self.twice, self.last, self.unused = nn.Linear(6, 6), nn.Linear(6, 3), nn.Linear(2, 2)

    def forward(self, x):
        x = torch.tanh(self.twice(torch.tanh(self.twice(x * self.scale))))
        return self.last(x)


LAYERS = {"", "twice", "last", "unused"}


def loss(output, y):
    return ((output - y[:, None]) ** 2 * torch.arange(1, 4, dtype=output.dtype)).sum(1)


def layer(parameter: str) -> str:
    return parameter.rpartition(".")[0]


def exact_norms(gradients: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    names = {layer(name) for name in gradients}
    return {
        one: sum(g.flatten(1).square().sum(1) for name, g in gradients.items() if layer(name) == one).sqrt()
        for one in names
    }


def test_norms_by_layer_are_those_of_the_oracle(oracle):
    model, x, y = Model(), torch.randn(50, 6), torch.randn(50)
    expected = exact_norms(oracle(model, x, y, loss).gradients)
    for chunk in PerSampleGradients(model).chunks(x, y, loss):
        found = chunk.norms_by_layer()
        assert set(found) == LAYERS
        for name, norms in found.items():
            torch.testing.assert_close(norms.double(), expected[name][chunk.samples], rtol=1e-5, atol=1e-7)
        together = torch.stack([norms.double().square() for norms in found.values()]).sum(0).sqrt()
        torch.testing.assert_close(together, chunk.norms.double(), rtol=1e-6, atol=0)


def test_clipping_by_layer_is_that_of_the_oracle(oracle):
    model, x, y = Model(), torch.randn(50, 6), torch.randn(50)
    bounds = {"": 0.1, "twice": 0.5, "last": 2.0, "unused": 1.0}
    gradients = oracle(model, x, y, loss).gradients
    factors = {
        name: (bounds[name] / norms.clamp(min=1e-12)).clamp(max=1) for name, norms in exact_norms(gradients).items()
    }
    assert all(float((factors[name] < 1).double().mean()) > 0 for name in ("", "twice", "last"))
    engine = PerSampleGradients(model, expected_batch_size=20.0)  # chunks of one shape, with rows that only fill up
    sums = engine.zeros()
    for chunk in engine.chunks(x, y, loss):
        norms = chunk.norms_by_layer()
        weights = {name: (bounds[name] / each.clamp(min=1e-12)).clamp(max=1) for name, each in norms.items()}
        chunk.add_weighted_sum(weights, into=sums)
    for name, found in sums.items():
        wanted = torch.tensordot(factors[layer(name)], gradients[name], dims=1)
        torch.testing.assert_close(found.double(), wanted, rtol=1e-4, atol=1e-5)


def test_one_weight_for_all_layers_is_the_same_as_one_for_each():
    model, x, y = Model(), torch.randn(9, 6), torch.randn(9)
    engine, weights = PerSampleGradients(model), torch.rand(9)
    (chunk,) = engine.chunks(x, y, loss)
    once, by_layer = engine.zeros(), engine.zeros()
    chunk.add_weighted_sum(weights, into=once)
    chunk.add_weighted_sum(dict.fromkeys(LAYERS, weights), into=by_layer)
    assert all(torch.equal(once[name], by_layer[name]) for name in once)


def test_a_sample_that_is_not_finite_adds_nothing_whatever_its_weight():
    model, x, y = Model(), torch.randn(9, 6), torch.randn(9)
    y[5] = torch.inf
    (chunk,) = PerSampleGradients(model).chunks(x, y, loss)
    with pytest.warns(NonFiniteGradientWarning):
        norms = chunk.norms
    found: dict[str, torch.Tensor] = {}
    chunk.add_weighted_sum(torch.full((9,), torch.nan).masked_fill(torch.isfinite(norms), 0), into=found)
    assert all(not each.any() for each in found.values())


@pytest.mark.filterwarnings("ignore:A sample's gradient is not finite")
def test_a_sample_that_is_not_finite_in_one_layer_counts_in_none():
    model, x, y = Model(), torch.randn(8, 6), torch.randn(8)
    x[3] = 1e38  # tanh saturates: only the scale's own gradient suffers
    y[5] = torch.inf
    engine = PerSampleGradients(model)
    (chunk,) = engine.chunks(x, y, loss)
    norms = chunk.norms_by_layer()
    assert all(bool(torch.isinf(each[5])) for each in norms.values())
    sums, others = engine.zeros(), engine.zeros()
    chunk.add_weighted_sum(dict.fromkeys(LAYERS, torch.ones(8)), into=sums)
    kept = torch.isfinite(chunk.norms)
    (rest,) = engine.chunks(x[kept], y[kept], loss)
    rest.add_weighted_sum(torch.ones(int(kept.sum())), into=others)
    for name, found in sums.items():
        torch.testing.assert_close(found, others[name], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({"last": torch.ones(4)}, "weights for the layers .*norms_by_layer"),
        (dict.fromkeys(LAYERS, torch.ones(3)), r"shape \(3,\) are not allowed"),
        (dict.fromkeys(LAYERS, torch.full((4,), torch.nan)), "NaN or infinity"),
    ],
)
def test_other_weights_are_refused(weights, message):
    engine = PerSampleGradients(Model())
    (chunk,) = engine.chunks(torch.randn(4, 6), torch.randn(4), loss)
    with pytest.raises(InputError, match=message):
        chunk.add_weighted_sum(weights, into=engine.zeros())


def test_sums_of_a_layer_called_twice_are_made_of_small_parts():
    """What noise pays for is the rounding of sums over 256 samples, however many a chunk has."""
    weight, samples = torch.zeros(7, 5), 600
    gradients = [torch.randn(samples, 7, 5) for _ in range(2)]
    parts: list[Contribution] = []
    for each in gradients:
        tap = Tap(each.shape, each.dtype, each.device)
        tap.bind(each)
        parts.append(ExplicitContribution(weight, tap, lambda gradient: gradient))
    both = SumContribution(parts, batch_size=samples, kept_bytes=1 << 30)
    both.norms_squared(keep=True)
    weights, flat = torch.rand(samples), (gradients[0] + gradients[1]).flatten(1)
    cuts = blocks(samples)
    assert all(rows.stop - rows.start <= CHUNK_ROWS for rows in cuts)
    expected = sum((weights[rows] @ flat[rows] for rows in cuts[1:]), start=weights[cuts[0]] @ flat[cuts[0]])
    assert torch.equal(both.weighted_sum(weights).flatten(), expected)
