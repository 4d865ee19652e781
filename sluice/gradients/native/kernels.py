"""The compiled kernels, called with tensors. Everything that C would not check is checked here."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from sluice.gradients.native.loading import library, loaded_library


def available(*tensors: Tensor) -> bool:
    """Whether there are compiled kernels for these tensors: float32 in ordinary memory."""
    return all(t.dtype is torch.float32 and t.device.type == "cpu" for t in tensors) and library() is not None


@dataclass(frozen=True, eq=False)
class Offsets:
    """Where entries are, counted from the start of a sample's memory. Finding their range takes longer than a small product.

    Attributes:
        entries: integers, which nobody changes.
        least: the smallest.
        most: the largest.
    """

    entries: Tensor
    least: int
    most: int

    @classmethod
    def of(cls, entries: Tensor) -> Offsets:
        require(entries.dtype is torch.int64 and entries.dim() == 1 and entries.is_contiguous())
        return cls(entries, *(int(entries.min()), int(entries.max())) if len(entries) else (0, 0))


@lru_cache(maxsize=1024)
def _evenly(count: int, step: int) -> Offsets:
    return Offsets.of(torch.arange(count) * step)


def correlate(
    image: Tensor,
    windows: Offsets,
    places: Offsets,
    maps: Tensor,
    *,
    into: Tensor | None = None,
    split: int | None = None,
    groups: int = 1,
) -> Tensor:
    """Squared norms of ``gradient_i[w, o] = sum_t image_i[windows[w] + places[t]] * maps_i[t, o]``, ``[1, n]``.

    Args:
        image: ``[n, ...]``, in which ``windows`` and ``places`` find entries.
        windows: of ``inputs`` entries.
        places: of ``positions`` entries.
        maps: ``[n, positions, outputs]``.
        into: ``[n, inputs, outputs]``, where the gradients themselves are wanted; the last two axes contiguous.
        split: the number of inputs whose norms are wanted apart from those of the others, ``[2, n]``.
        groups: of channels, the last axis of ``image`` and of ``maps``; ``windows`` are those of the first group.
    """
    n, positions, outputs = maps.shape
    inputs, channels = len(windows.entries), image.shape[-1]
    if maps.stride(2) != 1:
        maps = maps.contiguous()
    require(available(image, maps))
    require(image.shape[0] == n and len(places.entries) == positions)
    if into is not None:
        require(
            into.shape == (n, inputs, outputs) and into.dtype is torch.float32 and into.stride()[1:] == (outputs, 1)
        )
    require(split is None or 0 <= split < inputs)
    require(groups == 1 or (outputs % groups == 0 and channels % groups == 0 and image.stride(-1) == 1))
    squares = torch.zeros(1 if split is None else 2, n)
    if n == 0 or positions == 0 or inputs == 0 or outputs == 0:
        if into is not None:
            into.zero_()
        return squares
    group_step = channels // groups
    reach = windows.most + places.most + (groups - 1) * group_step
    require(
        windows.least + places.least >= 0
        and reach <= sum((size - 1) * step for size, step in zip(image.shape[1:], image.stride()[1:], strict=True))
    )
    failed = loaded_library().correlate(
        *(n, positions, inputs, outputs // groups, groups, group_step),
        *(image.data_ptr(), image.stride(0), windows.entries.data_ptr(), places.entries.data_ptr()),
        *(maps.data_ptr(), maps.stride(0), maps.stride(1)),
        *(0 if into is None else into.data_ptr(), 0 if into is None else into.stride(0)),
        *(inputs if split is None else split, squares.data_ptr(), torch.get_num_threads()),
    )
    succeed(failed)
    return squares


def products(a: Tensor, b: Tensor, *, into: Tensor | None = None, split: int | None = None) -> Tensor:
    """`correlate` for ``gradient_i = a_i^T b_i``, with ``a`` ``[n, positions, inputs]`` and ``b`` ``[n, positions, outputs]``."""
    if a.stride(2) != 1:
        a = a.contiguous()
    windows, places = _evenly(a.shape[2], 1), _evenly(a.shape[1], a.stride(1))
    return correlate(a, windows, places, b, into=into, split=split)


def require(condition: bool) -> None:
    """What callers in this package must have seen to; C would read or write beyond the tensors otherwise."""
    if not condition:
        raise AssertionError("tensors of the wrong shape, type or strides were given to a compiled kernel")


def succeed(failed: int) -> None:
    """Raise if a kernel says that it has failed."""
    if failed:
        raise MemoryError("a compiled kernel could not get the memory it works in")
