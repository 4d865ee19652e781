"""One record more or less, with any number of workers: what the others contribute stays, and rounding is charged."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from sluice.gradients import PerSampleGradients
from sluice.mechanism.scaling import Clip
from sluice.randomness.noise import SeededNoise
from sluice.training.batches import Batches
from sluice.training.context import TrainingContext
from sluice.training.distributed.workers import Workers
from sluice.training.weights import WeightUpdater

EXPECTED = 900.0


class Worker(Workers):
    """One of several, each by itself: nothing has to cross for what is looked at here."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size


class Ordered(SeededNoise):
    """The order is that of the names."""

    def random_order(self, indices: Tensor) -> Tensor:
        return indices


def measured(data: TensorDataset, order: Tensor, workers: int) -> tuple[dict[int, float], Tensor, float]:
    """The norm of each record, by number, the sum over all workers, and what its rounding is charged."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 8))
    rule = Clip(max_grad_norm=1.0)
    norms: dict[int, float] = {}
    total = torch.zeros(sum(p.numel() for p in module.parameters()), dtype=torch.float64)
    for rank in range(workers):
        context = TrainingContext(
            gradients=PerSampleGradients(module, loss_reduction="mean", expected_batch_size=EXPECTED / workers),
            batches=Batches(data),
            updater=WeightUpdater(module=module, optimizer=torch.optim.SGD(module.parameters(), lr=1.0)),
            noise=Ordered(1),
            piece_size=256,
            before_release=lambda number: None,
            workers=Worker(rank, workers),
        )
        raw_sum, own = context.raw_sum(), context.workers.own(order).tolist()
        for chunk in context.chunks(order, nn.functional.cross_entropy):
            norms |= dict(zip(own[: len(chunk)], chunk.norms.tolist(), strict=True))
            own = own[len(chunk) :]
            raw_sum.add(chunk, rule(chunk.norms))
        total += torch.cat([part.double().flatten() for part in raw_sum.own_tensors().values()])
    return norms, total, context.sum_error


@pytest.mark.parametrize("workers", [2, 3])
def test_a_record_moves_nobody_else(workers):
    generator = torch.Generator().manual_seed(workers)
    size = 941
    x = torch.randn(size + 1, 16, generator=generator) * torch.logspace(-3, 3, size + 1)[:, None]
    data = TensorDataset(x, torch.randint(0, 8, (size + 1,), generator=generator))
    order = torch.randperm(size, generator=generator)
    for place in (1, size - 1):
        moved = order[place].clone()
        with_z = torch.cat([order, moved[None]])
        with_z[place] = size
        norms, total, sum_error = measured(data, with_z, workers)
        others, without, _ = measured(data, order, workers)
        assert {number: norm for number, norm in norms.items() if number != size} == others
        assert float((total - without).norm()) <= 1.0 + 2 * sum_error
        assert len(norms) == size + 1


@pytest.mark.parametrize("workers", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("records", [0, 1, 2, 6, 7, 8, 50])
def test_records_are_split_without_rest(workers, records):
    everyone = [Worker(rank, workers).own(torch.arange(records)).tolist() for rank in range(workers)]
    assert sorted(number for own in everyone for number in own) == list(range(records))
    assert max(map(len, everyone)) - min(map(len, everyone)) <= 1
    rounds = Worker(0, workers).rounds(records, rows=3)
    assert rounds == max(-(-len(own) // 3) for own in everyone)
