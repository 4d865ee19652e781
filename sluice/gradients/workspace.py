"""Memory that one chunk after the other uses again.

Fresh memory has to be given by the system page by page, which can cost more than the arithmetic done in it. Layers
therefore borrow their large buffers here. A buffer is lent again only when the loan before it is gone, so a chunk that
somebody still holds keeps what it has.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar

import torch
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
