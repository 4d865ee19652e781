"""Positions that are looked up once for the whole batch and added to every sample's scores, as T5 does."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from sluice.gradients import PerSampleGradients
from sluice.gradients.escalation import LoopWarning
from sluice.gradients.vmap import VmapRule

LENGTH = 4


class Attention(nn.Module):
    """One head of attention with a learned bias for each distance between two words."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(7, 6)
        self.places = nn.Embedding(LENGTH, 6)
        self.distances = nn.Embedding(2 * LENGTH - 1, 1)
        self.projections = nn.Linear(6, 18)
        self.head = nn.Linear(6, 3)

    def bias(self) -> Tensor:
        steps = torch.arange(LENGTH)
        return self.distances(steps[:, None] - steps + LENGTH - 1)[..., 0]

    def masked(self, bias: Tensor, mask: Tensor | None) -> Tensor:
        return bias if mask is None else bias + torch.where(mask > 0, 0.0, -1e9)[:, None].to(bias.dtype)

    def forward(self, words: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.words(words) + self.places(torch.arange(LENGTH)[None])
        q, k, v = self.projections(x).chunk(3, -1)
        scores = q @ k.transpose(1, 2) + self.masked(self.bias(), mask)
        return self.head((scores.softmax(-1) @ v).mean(1))


class Deciding(Attention):
    """Leaves out masks that hide nothing."""

    def masked(self, bias: Tensor, mask: Tensor | None) -> Tensor:
        return super().masked(bias, None if mask is None or mask.all() else mask)


class DecidingOutside(nn.Module):
    """Calls a module without the mask where that hides nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()

    def forward(self, words: Tensor, mask: Tensor) -> Tensor:
        return self.attention(words) if mask.all() else self.attention(words, mask)


def masks(kind: str) -> tuple[Tensor, ...]:
    ones = torch.ones(5, LENGTH, dtype=torch.int64)
    padded = ones.clone()
    padded[1:3, 2:] = 0
    return {"none": (), "ones": (ones,), "padded": (padded,)}[kind]


def words() -> Tensor:
    return torch.randint(7, (5, LENGTH))


def fallbacks(engine: PerSampleGradients) -> list[str]:
    return [unit.name for unit in engine._units.values() if isinstance(unit.rule, VmapRule)]


@pytest.mark.parametrize("kind", ["none", "ones", "padded"])
def test_a_lookup_without_samples_is_each_samples_own(matches, reaching_loss, kind):
    model, x, y = Attention(), (words(), *masks(kind)), torch.randn(5)
    matches(model, x, y, reaching_loss)
    engine = PerSampleGradients(model)
    engine.norms(x, y, reaching_loss)
    assert fallbacks(engine) == []


@pytest.mark.parametrize("first", ["ones", "padded"])
@pytest.mark.parametrize("make", [Deciding, DecidingOutside])
def test_a_model_that_leaves_out_masks_runs_so_that_no_record_decides_for_others(oracle, reaching_loss, make, first):
    """One and the same engine sees batches in which something is masked and batches in which nothing is."""
    model, y = make(), torch.randn(5)
    engine = PerSampleGradients(model)
    second = "ones" if first == "padded" else "padded"
    with pytest.warns(LoopWarning, match="one sample at a time"):
        engine.norms((words(), *masks(first)), y, reaching_loss)
    for kind in (first, second):
        x = (words(), *masks(kind))
        expected = oracle(model, x, y, reaching_loss)
        norms, sums = engine.weighted_sum(x, y, reaching_loss, torch.ones_like)
        torch.testing.assert_close(norms.double(), expected.norms, rtol=1e-5, atol=1e-6)
        for name, value in expected.weighted_sum(torch.ones(5)).items():
            torch.testing.assert_close(sums[name].double(), value, rtol=1e-5, atol=1e-5)
