"""Records that are dicts, models that are called by keyword and return dataclasses: exact in both training loops."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

from sluice import PrivacyEngine
from sluice._base.errors import InputError
from sluice.gradients import GradientOptions
from sluice.mechanism.scaling import Clip
from sluice.mechanism.selective_release import SelectiveRelease
from sluice.training.batches import split_pair
from sluice.training.options import TrainingOptions

RECORDS, BOUND, RATE = 30, 0.05, 0.5


class Records(Dataset):
    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(5)
        self.words = torch.randint(0, 12, (RECORDS, 6), generator=generator)
        self.mask = torch.rand(RECORDS, 6, generator=generator) < 0.8
        self.mask[:, 0] = True
        self.labels = torch.arange(RECORDS) % 3

    def __len__(self) -> int:
        return RECORDS

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return {"labels": self.labels[i], "words": self.words[i], "mask": self.mask[i]}


@dataclass
class Answer:
    logits: Tensor
    hidden: tuple[Tensor, ...]
    note: str = "as it is"
    nothing: Tensor | None = None


class Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(3)
            self.embedding = nn.Embedding(12, 5)
            self.head = nn.Linear(5, 3)

    def forward(self, words: Tensor, *, mask: Tensor, scale: float = 1.0) -> Answer:
        embedded = self.embedding(words) * mask[..., None]
        pooled = embedded.sum(1) / mask.sum(1, keepdim=True)
        return Answer(logits=self.head(pooled) * scale, hidden=(embedded, pooled))


def clipped_sum(model: nn.Module) -> list[Tensor]:
    """What a step releases when every record is sampled, one record at a time, in float64."""
    exact = copy.deepcopy(model).double()
    total = [torch.zeros_like(p) for p in exact.parameters()]
    for record in Records():
        label = record.pop("labels")[None]
        answer = exact(**{name: value[None] for name, value in record.items()})
        gradients = torch.autograd.grad(F.cross_entropy(answer.logits, label), list(exact.parameters()))
        norm = math.sqrt(sum(float(g.square().sum()) for g in gradients))
        for slot, g in zip(total, gradients, strict=True):
            slot += g * min(1.0, BOUND / norm)
    return total


def private(model: nn.Module, *, rate: float = 1.0, releases: int = 1, **options: object) -> PrivacyEngine:
    engine = PrivacyEngine(seed=2, accountant="rdp")
    mechanism = SelectiveRelease(
        sample_rate=rate,
        expected_batch_size=rate * RECORDS,
        scaling=Clip(max_grad_norm=BOUND),
        noise_multiplier=1e-6,
        releases=releases,
    )
    engine.make_private_by(
        mechanism,
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
        data_loader=Records(),
        options=TrainingOptions(**options),
    )
    return engine


def by_loop(engine: PrivacyEngine) -> None:
    model, optimizer, loader = engine.ordinary_loop()
    for batch in loader:
        labels = batch.pop("labels")
        F.cross_entropy(model(**batch).logits, labels).backward()
        optimizer.step()
    engine.close()


def by_mixed_call(engine: PrivacyEngine) -> None:
    model, optimizer, loader = engine.ordinary_loop()
    for batch in loader:
        answer = model(batch["words"], mask=batch["mask"], scale=1.0)
        assert len(answer.logits) == len(answer.hidden[0]) == len(batch["labels"])
        assert answer.note == "as it is"
        F.cross_entropy(answer.logits, batch["labels"]).backward()
        optimizer.step()
    engine.close()


def at_full_speed(engine: PrivacyEngine) -> None:
    for _ in engine.releases(lambda answer, labels: F.cross_entropy(answer.logits, labels)):
        pass
    engine.close()


@pytest.mark.parametrize("way", [by_loop, by_mixed_call, at_full_speed])
@pytest.mark.parametrize("strategy", [{}, {"": "vmap"}, {"": "loop"}], ids=["native", "vmap", "loop"])
@pytest.mark.parametrize("piece", [7, 256])
def test_a_step_is_the_clipped_sum_of_batches_of_one(way, strategy, piece):
    model = Reader()
    before = copy.deepcopy(model)
    way(private(model, max_physical_batch_size=piece, gradient_options=GradientOptions(strategy=strategy)))
    for p, start, slot in zip(model.parameters(), before.parameters(), clipped_sum(before), strict=True):
        assert torch.allclose(p.double(), start - slot / RECORDS, atol=1e-6)


def test_both_loops_agree_on_samples():
    weights = []
    for way in (by_loop, at_full_speed):
        model = Reader()
        way(private(model, rate=RATE, releases=6))
        weights.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert torch.allclose(*weights, atol=1e-6)


def test_the_module_bears_no_mark_between_steps():
    model = Reader()
    engine = private(model, rate=RATE, releases=3)
    _, optimizer, loader = engine.ordinary_loop()
    for batch in loader:
        labels = batch.pop("labels")
        F.cross_entropy(model(**batch).logits, labels).backward()
        optimizer.step()
        assert not model._forward_pre_hooks_with_kwargs
        assert not model._forward_pre_hooks
    engine.close()


def test_a_keyword_that_is_not_about_the_samples_is_refused():
    engine = private(Reader())
    model, _, loader = engine.ordinary_loop()
    batch = next(iter(loader))
    with pytest.raises(InputError, match="belongs into a buffer"):
        model(batch["words"], mask=torch.ones(6, 6))
    engine.close()


def test_a_loss_that_mixes_samples_is_refused_behind_a_dataclass():
    engine = private(Reader())
    with pytest.raises(InputError, match="depends on the other samples"):
        next(engine.releases(lambda answer, labels: F.cross_entropy(answer.logits - answer.logits.mean(0), labels)))
    engine.close()


def test_targets_are_named():
    batch = {"x": torch.ones(2), "start": torch.zeros(2), "end": torch.ones(2)}
    inputs, target = split_pair(batch, targets=("start", "end"))
    assert list(inputs) == ["x"]
    assert list(target) == ["start", "end"]
    with pytest.raises(InputError, match=r"targets=\('labels',\) names labels, which is not among them"):
        split_pair(batch)
    with pytest.raises(InputError, match="give a tuple of names"):
        TrainingOptions(targets="labels")
