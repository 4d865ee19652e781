"""Memory that one chunk after the other uses again.

Fresh memory has to be given by the system page by page, which can cost more than the arithmetic done in it. Layers
therefore borrow their large buffers here. A buffer is lent again only when the loan before it is gone, so a chunk that
somebody still holds keeps what it has. Where nobody can be asked to hold a loan, as for batches that go through a
user's model, a tensor's own memory is the loan (`Pool`).
"""

from __future__ import annotations

import math
import weakref
from collections import deque
from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar

import torch
from numpy import ndarray
from torch import Tensor

T = TypeVar("T")


class Loan(Generic[T]):
    """Something borrowed. Whoever uses ``thing``, or a view of it, must hold the loan for as long."""

    def __init__(self, thing: T) -> None:
        self.thing = thing


#: Gives an uninitialised tensor of this shape, with the dtype and the device of another one, and the loan to hold.
Lender = Callable[[tuple[int, ...], Tensor], tuple[Tensor, Loan[Tensor]]]


class Workspace:
    """What the layers of one model may use again; at most one thing for each key."""

    def __init__(self) -> None:
        self._kept: dict[Hashable, tuple[Any, int, weakref.ref[Loan[Any]]]] = {}

    def borrow(self, key: Hashable, make: Callable[[], T], *, fits: Callable[[T], bool], size: int) -> Loan[T]:
        """The thing kept for this key if it is free and fits, else a new one. The largest is kept for later."""
        thing, kept_size, loan = self._kept.get(key, (None, -1, None))
        free = loan is None or loan() is None
        if thing is None or not free or not fits(thing):
            thing = make()
            if not free or size < kept_size:
                return Loan(thing)
            kept_size = size
        new = Loan(thing)
        self._kept[key] = thing, kept_size, weakref.ref(new)
        return new

    def empty(self, key: Hashable, shape: tuple[int, ...], like: Tensor) -> tuple[Tensor, Loan[Tensor]]:
        """An uninitialised tensor with the dtype and the device of another one."""
        size = math.prod(shape)
        loan = self.borrow(
            (key, like.dtype, like.device),
            lambda: torch.empty(size, dtype=like.dtype, device=like.device),
            fits=lambda kept: kept.numel() >= size,
            size=size,
        )
        return loan.thing[:size].view(shape), loan


class Pool:
    """float32 tensors in ordinary memory that is lent again as soon as no tensor, and no view of one, uses it.

    Args:
        blocks: how many that are free are kept.
        largest: entries of the largest that is kept.
    """

    def __init__(self, *, blocks: int = 3, largest: int = 1 << 24) -> None:
        self._largest = largest
        # Its operations are atomic: memory comes back in any thread, and in the middle of anything.
        self._free: deque[ndarray[Any, Any]] = deque(maxlen=blocks)

    def empty(self, shape: tuple[int, ...]) -> Tensor:
        """An uninitialised tensor."""
        size = math.prod(shape)
        if not 0 < size <= self._largest:
            return torch.empty(shape)
        block = self._take(size)
        lent = block[:size]
        # The tensor's memory holds this array, and nothing else does.
        weakref.finalize(lent, self._free.append, block).atexit = False
        return torch.from_numpy(lent).view(shape)

    def _take(self, size: int) -> ndarray[Any, Any]:
        for _ in range(len(self._free)):
            try:
                block = self._free.pop()
            except IndexError:
                break
            if size <= block.size <= 2 * size:
                return block
            self._free.appendleft(block)
        return torch.empty(size).numpy()
