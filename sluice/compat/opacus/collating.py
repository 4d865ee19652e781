"""Refusing collate functions that give a record another shape in company than alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils.data import DataLoader, default_collate

from sluice._base.errors import InputError
from sluice.gradients.trees import tensors_in

#: So many records of each batch are put together alone as well.
_TRIED = 8


class Alone:
    """A collate function, checked with every batch: a record must have the same shape in company as alone.

    The first records of each batch are tried. A function that mixes values and keeps shapes is not noticed.
    """

    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        self._collate = collate

    def __call__(self, records: list[Any]) -> Any:
        batch = self._collate(records)
        together = _shapes(batch)
        if any(_shapes(self._collate([record])) != together for record in records[:_TRIED]):
            raise InputError(
                "collate_fn pads records to the longest of their batch, or shapes them by their company in another way. A "
                "record's gradient would then depend on which others were drawn, which no noise covers. Give all records one "
                "shape that is fixed in advance: pad to a public length, torch.nn.functional.pad(x, (0, LENGTH - len(x))), and "
                "cut what is longer."
            )
        return batch


def _shapes(batch: Any) -> list[tuple[int, ...]]:
    return [tuple(tensor.shape[1:]) for tensor in tensors_in(batch)]


def checked(source: DataLoader[Any]) -> DataLoader[Any]:
    """The loader, its collate function checked; that of PyTorch needs no check."""
    if source.collate_fn is default_collate or source.batch_size is None:
        return source
    return DataLoader(
        source.dataset,
        batch_size=source.batch_size,
        sampler=source.sampler,
        num_workers=source.num_workers,
        collate_fn=Alone(source.collate_fn),
        pin_memory=source.pin_memory,
        worker_init_fn=source.worker_init_fn,
        multiprocessing_context=source.multiprocessing_context,
    )
