"""Smaller physical batches. Loaders of Sluice always give batches in pieces; this makes the pieces smaller."""

from __future__ import annotations

from types import TracebackType

from torch.optim import Optimizer

from sluice._base.errors import InputError
from sluice.training.loop import PrivateLoader


class BatchMemoryManager:
    """At most ``max_physical_batch_size`` records go through the model at once inside the block.

    Nothing else changes: ``optimizer.step()`` updates the weights with the last piece of a batch. Sizes above those of
    make_private (``max_physical_batch_size``, 256 by default) have no effect.
    """

    def __init__(self, *, data_loader: PrivateLoader, max_physical_batch_size: int, optimizer: Optimizer) -> None:
        if not isinstance(data_loader, PrivateLoader):
            raise InputError("data_loader is not private: give the loader that make_private returned.")
        self._loader = data_loader
        self._size = max_physical_batch_size

    def __enter__(self) -> PrivateLoader:
        self._before = self._loader.set_piece_size(self._size)
        return self._loader

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loader.set_piece_size(self._before)
