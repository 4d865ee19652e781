"""Reading the records that a sample names, in pieces that bound the memory."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, default_collate
from torch.utils.data import Sampler as TorchSampler

from sluice._base.errors import InputError
from sluice._base.records import reads_by_index
from sluice.gradients.trees import tensors_in

#: What Hugging Face's models and collators call the target.
TARGETS = ("labels",)


class _NamedRecords(TorchSampler[list[int]]):
    """The batch sampler of a `DataLoader` that reads just what was named last."""

    def __init__(self) -> None:
        self.pieces: list[list[int]] = []

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.pieces)

    def __len__(self) -> int:
        return len(self.pieces)


class _KeepingGenerators:
    """A loader's ``worker_init_fn`` that leaves the worker's generators in the state in which PyTorch started them.

    That state comes from the run's own source (`ModelRandomness`). A function that seeds them, as many do to repeat an
    experiment, would make augmentation known to whoever reads the program.
    """

    def __init__(self, function: Callable[[int], None]) -> None:
        self._function = function

    def __call__(self, worker: int) -> None:
        of_torch, of_python = torch.get_rng_state(), random.getstate()
        of_numpy = np.random.get_state()  # noqa: NPY002 - the global generator is what data sets use
        try:
            self._function(worker)
        finally:
            torch.set_rng_state(of_torch)
            random.setstate(of_python)
            np.random.set_state(of_numpy)  # noqa: NPY002


class Batches:
    """Batches of a map-style data set by index.

    A data set with a method ``batch(indices)`` and a ``TensorDataset`` are indexed at once; any other, and one whose loader
    has a ``collate_fn`` of its own, is read record by record, by the workers and with the ``collate_fn`` of the loader.

    Guarantee:
        A record has one row in every tensor of a piece. Each row's gradient is clipped by itself, so a record with two of
        them would count twice.

        Workers begin with generators that the caller's torch generator seeds; the loader's ``worker_init_fn`` does not change
        them.

    Args:
        source: a `DataLoader`, whose own sampling and batch size are not used, or a map-style data set.
    """

    def __init__(self, source: DataLoader[Any] | Dataset[Any]) -> None:
        dataset = source.dataset if isinstance(source, DataLoader) else source
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
            raise InputError(
                f"data_loader holds a {type(dataset).__name__}, which cannot be sampled by index. Poisson sampling needs "
                "a map-style data set with __len__ and __getitem__."
            )
        self.dataset = dataset
        self.size = len(dataset)
        if self.size == 0:
            raise InputError("data_loader holds an empty data set: at least one record is needed.")
        self._named = _NamedRecords()
        self._reader: DataLoader[Any] | None = None
        own_collate = isinstance(source, DataLoader) and source.collate_fn is not default_collate
        if own_collate or not (reads_by_index(dataset) or _is_indexed_at_once(dataset)):
            self._reader = self._make_reader(source)

    def _make_reader(self, source: DataLoader[Any] | Dataset[Any]) -> DataLoader[Any]:
        if not isinstance(source, DataLoader):
            return DataLoader(source, batch_sampler=self._named)
        return DataLoader(
            source.dataset,
            batch_sampler=self._named,
            num_workers=source.num_workers,
            collate_fn=source.collate_fn,
            pin_memory=source.pin_memory,
            worker_init_fn=source.worker_init_fn and _KeepingGenerators(source.worker_init_fn),
            multiprocessing_context=source.multiprocessing_context,
            persistent_workers=source.num_workers > 0,
        )

    def pieces(self, indices: Tensor, size: int) -> Iterator[Any]:
        """The named records in pieces of at most ``size``; nothing at all for an empty sample."""
        parts = indices.split(size) if indices.shape[0] else ()
        if self._reader is not None:
            self._named.pieces = [part.tolist() for part in parts]
        batches = map(self._at_once, parts) if self._reader is None or not parts else self._reader
        for part, batch in zip(parts, batches, strict=True):
            _require_rows(batch, part.shape[0])
            yield batch
            del batch  # see `TrainingContext.chunks`

    def full_pieces(self, indices: Tensor, size: int) -> Iterator[tuple[Any, int]]:
        """`pieces`, each with its number of records; the last one is filled up with copies of its first record.

        Data sets that are read record by record leave the last piece as it is: there, copies would cost as much as records.
        """
        remaining = indices.shape[0]
        missing = -remaining % size
        if missing and self._reader is None:
            first_of_last = remaining + missing - size
            indices = torch.cat([indices, indices[first_of_last].expand(missing)])
        for piece in self.pieces(indices, size):
            yield piece, min(remaining, size)
            del piece  # see `TrainingContext.chunks`
            remaining -= size

    def _at_once(self, indices: Tensor) -> Any:
        if reads_by_index(self.dataset):
            return self.dataset.batch(indices)  # type: ignore[attr-defined]
        return tuple(tensor[indices] for tensor in self.dataset.tensors)  # type: ignore[attr-defined]


def _is_indexed_at_once(dataset: Dataset[Any]) -> bool:
    """A subclass of `TensorDataset` may change what it reads."""
    return (
        isinstance(dataset, TensorDataset)
        and type(dataset).__getitem__ is TensorDataset.__getitem__
        and not hasattr(dataset, "__getitems__")
    )


def _require_rows(batch: Any, records: int) -> None:
    for tensor in tensors_in(batch):
        rows = tensor.shape[0] if tensor.dim() else None
        if rows != records:
            raise InputError(
                "the data set or its collate function gave a tensor whose first axis has not one row for each record of the batch "
                f"(its other axes: {list(tensor.shape[1:])}). What a record contributes is bounded row by row. Several views of "
                "a record belong on an axis behind the first, [records, views, ...], with one loss for all of them."
            )


def split_pair(batch: Any, *, targets: tuple[str, ...] = TARGETS) -> tuple[Any, Any]:
    """A batch as (inputs of the model, target of the loss): the last entry is the target.

    Args:
        targets: of a batch that is a dict, the entries that make up the target: as it is if it is one, as a dict otherwise.
    """
    if isinstance(batch, Mapping):
        missing = [name for name in targets if name not in batch]
        if missing:
            raise InputError(
                f"A record of the data set is a dict with the entries {', '.join(map(str, batch))}; targets={targets} names "
                f"{', '.join(missing)}, which is not among them. Pass TrainingOptions(targets=...): the entries that "
                "the loss takes; the others are the model's keywords."
            )
        chosen = {name: batch[name] for name in targets}
        keywords = {name: value for name, value in batch.items() if name not in chosen}
        return keywords, chosen if len(targets) > 1 else batch[targets[0]]
    if isinstance(batch, tuple | list) and len(batch) >= 2:
        inputs = batch[0] if len(batch) == 2 else tuple(batch[:-1])
        return inputs, batch[-1]
    raise InputError(
        f"A record of the data set is a {type(batch).__name__}; it must be (inputs..., target) or a dict for this way of training. "
        "Use the ordinary loop over the loader for other shapes."
    )


def rows_in(batch: Any) -> int:
    """How many records a batch holds."""
    for tensor in tensors_in(batch):
        return int(tensor.shape[0])
    raise InputError("A batch holds no tensor: the data set must return tensors.")


__all__ = ["Batches", "rows_in", "split_pair"]
