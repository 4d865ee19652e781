"""Reading whole chunks, and sums over many of them."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from sluice.data import TensorExamples
from sluice.data.transforms import unscaled
from sluice.gradients import PerSampleGradients
from sluice.training.batches import Batches
from sluice.training.context import RawSum

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
