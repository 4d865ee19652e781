"""A record whose terms are huge and cancel must not round away what other records add to a sum.

Its gradient may be nothing at all, so that its norm alone would let it through.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import spectral_norm

from sluice.gradients import GradientOptions, PerSampleGradients
from sluice.gradients.functional import pullback
from sluice.gradients.layers.recurrent_weights import FusedContribution

RECORDS, POSITIONS, CLASSES = 40, 12, 3
HUGE = 1e15


class Mean(nn.Module):
    """A layer whose outputs are averaged over positions, so that the same derivative stands at all of them."""

    def __init__(self, layer: nn.Module, *, channels_first: bool = False) -> None:
        super().__init__()
        self.layer = layer
        self.channels_first = channels_first

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.layer(x.transpose(1, 2)).transpose(1, 2) if self.channels_first else self.layer(x)
        return output.mean(1)


class EachByItself(nn.Module):
    """One layer that is called for each position."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([self.layer(position) for position in x.unbind(1)]).mean(0)


class Words(nn.Module):
    """Words with factors: the second number of a position multiplies the row that the first one names."""

    def __init__(self, *, bag: bool, rows: int = 9) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(rows, CLASSES, mode="sum") if bag else nn.Embedding(rows, CLASSES)
        self.bag = bag

    def forward(self, x: Tensor) -> Tensor:
        words, factors = x[..., 0].nan_to_num(0).clamp(0, 8).long(), x[..., 1]
        if self.bag:
            output: Tensor = self.table(words, per_sample_weights=factors)
            return output
        return (self.table(words) * factors.unsqueeze(2)).mean(1)


class Tied(nn.Module):
    """A table that is also the weight of a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(CLASSES, 8)

    def forward(self, x: Tensor) -> Tensor:
        looked_up = self.table(x[..., 7].long().clamp(0, 2))
        return F.linear(x + looked_up, self.table.weight).mean(1)


MODELS = {
    "linear": lambda: Mean(nn.Linear(8, CLASSES)),
    "convolution": lambda: Mean(nn.Conv1d(8, CLASSES, 1), channels_first=True),
    "wide convolution": lambda: Mean(nn.Conv1d(8, CLASSES, 2, stride=2), channels_first=True),
    "groups": lambda: nn.Sequential(Mean(nn.Conv1d(8, 8, 1, groups=8), channels_first=True), nn.Linear(8, CLASSES)),
    "several calls": EachByItself,
    "embedding": lambda: Words(bag=False),
    "bag": lambda: Words(bag=True),
    "large bag": lambda: Words(bag=True, rows=300_000),
    "tied": Tied,
}


def records() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(RECORDS + 1, POSITIONS, 8, generator=generator)
    x[..., 0] = torch.arange(RECORDS + 1).view(-1, 1) % 3
    return x, torch.arange(RECORDS + 1) % CLASSES


def cancelling(x: Tensor) -> Tensor:
    """Two pairs of positions, those of a pair opposite to each other, and nothing anywhere else."""
    z = torch.zeros_like(x[0])
    z[:2, 1:7], z[2:4, 1:7] = HUGE, -HUGE
    return z


def clipped_sum(engine: PerSampleGradients, x: Tensor, y: Tensor, *, norms_only: bool) -> Tensor:
    total = engine.zeros()
    for chunk in engine.chunks(x, y, losses, norms_only=norms_only):
        chunk.add_weighted_sum(1 / chunk.norms.clamp(min=1), into=total)
    return torch.cat([each.flatten() for each in total.values()]).double()


def losses(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target, reduction="none")


@pytest.mark.filterwarnings("ignore:Kernels of this model round")
@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("strategy", ["gram", "explicit"])
@pytest.mark.parametrize("norms_only", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_terms_that_cancel_leave_those_of_others_alone(name, norms_only, strategy, compiled):
    torch.manual_seed(0)
    model = MODELS[name]()
    layers = {part for part, module in model.named_modules() if isinstance(module, nn.Linear | nn.Conv1d)}
    # With a single byte for them no gradients are kept.
    options = GradientOptions(
        strategy=dict.fromkeys(layers, strategy),
        compiled=compiled,
        chunk_size=64,
        kept_bytes=1 if norms_only else 2**20,
    )
    engine = PerSampleGradients(model, loss_reduction="none", options=options, expected_batch_size=RECORDS)
    x, y = records()
    without = clipped_sum(engine, x[:-1], y[:-1], norms_only=norms_only)
    x[RECORDS] = x[20]
    x[20] = cancelling(x)
    y[RECORDS] = y[20]
    found = clipped_sum(engine, x, y, norms_only=norms_only)
    assert float((found - without).norm()) <= 1 + 2**-9


class Centred(nn.Module):
    """Each row of the weight without its mean: what all inputs have in common takes no part."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(CLASSES, 8))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight - self.weight.mean(1, keepdim=True))


class Standardised(nn.Module):
    """A convolution with weight standardisation."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(CLASSES, 2, 2, 2))

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight - self.weight.mean((1, 2, 3), keepdim=True)
        weight = weight / (weight.flatten(1).std(1).view(-1, 1, 1, 1) + 1e-5)
        return F.conv2d(x.view(-1, 2, 2, 2), weight).flatten(1)


class Merged(nn.Module):
    """A frozen weight and a product of two small matrices, as adapters have; what is outside its rows takes no part."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("frozen", torch.randn(CLASSES, 8))
        self.down, self.up = nn.Parameter(torch.eye(2, 8)), nn.Parameter(torch.zeros(CLASSES, 2))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.frozen + self.up @ self.down)


#: Models, and an input of which the way back to their parameters leaves next to nothing.
COMPUTED = {
    "centred": (Centred, torch.ones(8)),
    "standardised": (Standardised, torch.ones(8)),
    "spectral norm": (lambda: spectral_norm(nn.Linear(8, CLASSES, bias=False)), torch.ones(8)),
    "merged": (Merged, torch.eye(8)[7]),
}


@pytest.mark.filterwarnings("ignore:Kernels of this model round")
@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("size", [2.0**20, 2.0**40, 1e15])
@pytest.mark.parametrize("name", COMPUTED)
def test_what_the_way_back_takes_away_leaves_others_alone(name, size, kept, monkeypatch):
    if not kept:
        monkeypatch.setattr(pullback, "_BLOCK_BYTES", 1)
    torch.manual_seed(0)
    make, direction = COMPUTED[name]
    model = make()
    engine = PerSampleGradients(model, loss_reduction="none", expected_batch_size=RECORDS)
    x, y = torch.randn(RECORDS + 1, 8), torch.arange(RECORDS + 1) % CLASSES
    without = clipped_sum(engine, x[:-1], y[:-1], norms_only=False)
    x[RECORDS], y[RECORDS] = x[20], y[20]
    x[20] = size * direction
    y[20] = int(model(x[20:21])[0].argmin())
    found = clipped_sum(engine, x, y, norms_only=False)
    assert float((found - without).norm()) <= 1 + 2**-9


def test_lengths_of_recurrent_terms_are_those_of_a_linear_map_over_time():
    net = nn.LSTM(5, 4, batch_first=True)
    engine = PerSampleGradients(net, loss_reduction="none")
    x = torch.randn(6, 7, 5)
    (chunk,) = engine.chunks(x, torch.zeros(6), lambda output, _: output[0].square().flatten(1).sum(1))
    fused = [each for each in chunk._contributions if isinstance(each, FusedContribution)]
    assert len(fused) == 2
    for each in fused:
        with torch.no_grad():
            slow = each._shared.as_linear(each.parameter, each._state, "auto").term_lengths()
            torch.testing.assert_close(each.term_lengths(), slow)
            assert bool((each.term_lengths() >= each.norms_squared(keep=False).sqrt() * (1 - 1e-5)).all())
