"""Reading whole chunks, and sums over many of them."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from sluice.data import TensorExamples
from sluice.data.transforms import unscaled
from sluice.gradients import PerSampleGradients
from sluice.randomness.noise import SeededNoise
from sluice.training.batches import Batches
from sluice.training.context import RawSum, TrainingContext
from sluice.training.weights import WeightUpdater

VALUES, LABELS = torch.arange(20.0)[:, None], torch.arange(20)


class OneByOne(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return VALUES[index], LABELS[index]


@pytest.mark.parametrize("count", [0, 1, 5, 6, 10, 13])
@pytest.mark.parametrize("source", ["tensors", "examples", "one by one"])
def test_pieces_are_filled_up_with_their_first_record(source, count):
    data = {
        "tensors": TensorDataset(VALUES, LABELS),
        "examples": TensorExamples(VALUES, LABELS, unscaled),
        "one by one": DataLoader(OneByOne()),
    }[source]
    order = torch.randperm(20)[:count]
    found = [(x.flatten().tolist(), samples) for (x, _), samples in Batches(data).full_pieces(order, 5)]
    parts = [part.tolist() for part in order.split(5)] if count else []
    assert [samples for _, samples in found] == [len(part) for part in parts]
    for (read, _), part in zip(found, parts, strict=True):
        missing = 0 if source == "one by one" else 5 - len(part)
        assert read == part + part[:1] * missing


@pytest.mark.parametrize("rows", [256, 1100])
def test_sums_of_many_chunks_do_not_drift(rows):
    """Within a part single precision is right to 256 u / 2; beyond a block sums are in double precision."""
    model = nn.Linear(1, 1, bias=False)
    engine = PerSampleGradients(model, expected_batch_size=60_000.0)
    total, count = RawSum(engine), 0
    x = torch.full((60_000, 1), 0.1)
    for part in x.split(rows):
        for chunk in engine.chunks(part, torch.zeros(len(part)), lambda o, y: o[:, 0]):
            total.add(chunk, torch.ones(len(chunk)))
            count += len(chunk)
    (found,) = total.tensors().values()
    assert count == 60_000
    assert found.dtype is torch.float64
    assert float(found) == pytest.approx(60_000 * float(x[0]), rel=2.0**-17)


def test_an_empty_sum_is_zero_for_every_parameter():
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    sums = RawSum(PerSampleGradients(model)).tensors()
    assert list(sums) == [name for name, _ in model.named_parameters()]
    assert all(bool((value == 0).all()) for value in sums.values())


def make_context(model: nn.Module, x: torch.Tensor, y: torch.Tensor, piece_size: int = 1024) -> TrainingContext:
    return TrainingContext(
        gradients=PerSampleGradients(model),
        batches=Batches(TensorDataset(x, y)),
        updater=WeightUpdater(module=model, optimizer=torch.optim.SGD(model.parameters(), lr=1.0)),
        noise=SeededNoise(0),
        piece_size=piece_size,
        before_release=lambda number: None,
    )


@pytest.mark.parametrize("expected_size", [math.inf, 12.0])
def test_losses_at_several_weights_are_those_of_each_record_alone(expected_size):
    x, y = torch.randn(40, 3), torch.randint(2, (40,))
    model = nn.Sequential(nn.Linear(3, 2), nn.Dropout(0.5))
    context = make_context(model, x, y, piece_size=16)
    indices, points = torch.randperm(40)[:23], [torch.randn(2, 3) for _ in range(3)]

    def placed(weight: torch.Tensor) -> None:
        model[0].weight.data.copy_(weight)

    moves = [partial(placed, weight) for weight in points]
    found = context.raw_losses_at(moves, indices, F.cross_entropy, expected_size=expected_size)
    assert found.shape == (3, 23)
    bias = model[0].bias.detach().double()
    for row, weight in zip(found, points, strict=True):
        for loss, index in zip(row, indices, strict=True):
            output = x[index].double() @ weight.double().T + bias
            assert float(loss) == pytest.approx(float(F.cross_entropy(output, y[index])), rel=1e-5, abs=1e-6)
    assert model.training
    assert context.raw_losses_at(moves, indices[:0], F.cross_entropy).shape == (3, 0)


@pytest.mark.parametrize("count", [1, 5, 15, 16, 37])
def test_a_loss_does_not_depend_on_the_others_of_its_sample(count):
    """Forward passes have one shape, that of an expected sample, however many records there are."""
    rows: list[int] = []

    class Counted(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            rows.append(len(x))
            return super().forward(x)

    x, y = torch.randn(40, 300), torch.randint(2, (40,))
    context = make_context(Counted(300, 2), x, y)
    every = context.raw_losses(torch.arange(40), F.cross_entropy, expected_size=9.0)
    order = torch.randperm(40)[:count]
    assert torch.equal(context.raw_losses(order, F.cross_entropy, expected_size=9.0), every[order])
    assert len(set(rows)) == 1
    assert 9 <= rows[0] < 40
