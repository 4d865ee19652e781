from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, default_collate

from sluice import PrivacyEngine
from sluice._base.errors import InputError
from sluice._base.records import reads_by_index
from sluice.training.batches import Batches

X, Y = torch.randn(20, 4), torch.arange(20) % 2


class ForeignBatch:
    """Has a method of the same name that does something else, as a Hugging Face ``Dataset`` has."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index):
        return X[index], Y[index]

    def batch(self, batch_size: int, drop_last_batch: bool = False) -> None:
        raise AssertionError("not a way to read records by index")


class ByIndex:
    def __len__(self) -> int:
        return 20

    def __getitem__(self, index):
        raise AssertionError("read at once")

    def batch(self, indices):
        return X[indices], Y[indices]


def train(data) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 2))
    engine = PrivacyEngine(seed=3)
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.5),
        data_loader=data,
        sample_rate=0.5,
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        releases=2,
    )
    for x, y in loader:
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    engine.close()
    return model


def test_only_a_method_that_takes_indices_reads_records_at_once():
    assert reads_by_index(ByIndex())
    assert not reads_by_index(ForeignBatch())
    assert not reads_by_index(object())
    same = [train(data)[0].weight for data in (ForeignBatch(), ByIndex(), TensorDataset(X, Y))]
    assert torch.allclose(same[0], same[1], atol=1e-6)
    assert torch.allclose(same[0], same[2], atol=1e-6)


def doubled(records):
    x, y = default_collate(records)
    return 2 * x, y


@pytest.mark.parametrize("make", [lambda: TensorDataset(X, Y), ForeignBatch])
def test_the_collate_function_of_a_loader_is_used(make):
    batches = Batches(DataLoader(make(), collate_fn=doubled))
    (x, _), *_ = batches.pieces(torch.tensor([3, 5]), 2)
    assert torch.equal(x, 2 * X[[3, 5]])


def test_a_hugging_face_data_set_is_read_record_by_record():
    datasets = pytest.importorskip("datasets")
    data = datasets.Dataset.from_dict({"x": X.tolist(), "y": Y.tolist()}).with_format("torch")
    (batch,) = Batches(data).pieces(torch.tensor([3, 5]), 2)
    assert torch.allclose(batch["x"], X[[3, 5]])
    trained = train(DataLoader(data, batch_size=4, collate_fn=lambda rows: tuple(default_collate(rows).values())))
    assert torch.allclose(trained[0].weight, train(TensorDataset(X, Y))[0].weight, atol=1e-6)


class Drawn:
    """Records that are drawn from the global generators, as augmentation is."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index):
        return torch.tensor([torch.rand(()).item(), np.random.rand(), random.random()]), 0  # noqa: NPY002


def seed_everything(worker: int) -> None:
    torch.manual_seed(7)
    np.random.seed(7)  # noqa: NPY002
    random.seed(7)


def first_record(seed: int) -> list[float]:
    torch.manual_seed(seed)
    loader = DataLoader(Drawn(), num_workers=1, worker_init_fn=seed_everything)
    ((x, _),) = Batches(loader).pieces(torch.arange(1), 1)
    return x[0].tolist()


def test_seeds_of_a_loaders_workers_do_not_make_augmentation_known():
    first, other = first_record(1), first_record(2)
    assert all(a != b for a, b in zip(first, other, strict=True))
    assert first == first_record(1)  # what a seeded run draws is repeated


@pytest.mark.parametrize(
    "views", [lambda x: x.repeat_interleave(2, 0), lambda x: torch.cat([x, x]), lambda x: x.sum(0)]
)
@pytest.mark.parametrize("ordinary_loop", [True, False])
def test_a_record_has_one_row_in_every_tensor(views, ordinary_loop):
    """Each row is clipped by itself: a record with two of them would count twice."""

    def collate(records):
        x, y = default_collate(records)
        return (views(x), views(y)) if len(y) > 1 else (x, y)

    def run():
        model = nn.Linear(4, 2)
        engine = PrivacyEngine(seed=3)
        _, optimizer, loader = engine.make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.5),
            data_loader=DataLoader(TensorDataset(X, Y), batch_size=4, collate_fn=collate),
            sample_rate=1.0,
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            releases=2,
        )
        if not ordinary_loop:
            next(engine.releases(nn.functional.cross_entropy))
        for x, y in loader:
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()

    with pytest.raises(InputError, match="one row for each record") as error:
        run()
    assert "20" not in str(error.value)  # how many there were in the batch


class Transformed(TensorDataset):
    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return 0 * x + 7, y


def test_a_tensor_data_set_that_changes_what_it_reads_is_read_record_by_record():
    ((x, _),) = Batches(Transformed(X, Y)).pieces(torch.tensor([3, 5]), 2)
    assert x.eq(7).all()
