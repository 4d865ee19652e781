"""Rows of images in batches of one shape, so that no row knows how many others there are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager

import torch
from torch import Tensor


def in_batches(compute: Callable[[Tensor], Tensor], images: Tensor, *, batch: int, width: int) -> Tensor:
    """Rows of shape ``(n, width)`` from images, ``batch`` at a time, on as many threads as PyTorch is set to use.

    The last bits of a matrix product depend on its shape, so the last batch is filled up with zeros, and each batch is
    computed by one thread.

    Guarantee:
        Row i is a function of image i alone, bit for bit, if within one shape ``compute`` treats each place alike.
    """
    rows = images.new_empty(len(images), width)
    starts = range(0, len(images), batch)

    def compute_from(start: int) -> None:
        part = images[start : start + batch]
        if len(part) < batch:
            part = torch.cat([part, part.new_zeros(batch - len(part), *part.shape[1:])])
        with torch.no_grad():
            values = compute(part)
        rows[start : start + batch] = values[: len(rows) - start]

    with single_threads(min(torch.get_num_threads(), max(1, len(starts)))) as workers:
        for done in [workers.submit(compute_from, start) for start in starts]:
            done.result()
    return rows


@contextmanager
def single_threads(count: int) -> Iterator[Executor]:
    """A pool in which every operation runs on one thread, so that batches and not operations share the cores.

    PyTorch's setting is put back at the end; while the pool runs, matrix products elsewhere in the process may use fewer
    threads.
    """
    configured = torch.get_num_threads()
    with ThreadPoolExecutor(count, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        try:
            yield pool
        finally:
            pool.shutdown()
            torch.set_num_threads(configured)


__all__ = ["in_batches", "single_threads"]
