"""Buffers of a recurrent layer that hold all steps, and what each step sees of them.

Everything is indexed by time first, with the directions of a layer stacked in front, ``[directions, time, n, features]``
(kernels in C want it stored sample by sample, which is a matter of strides); the
backward direction has its time reversed on entry, for each sample at its own length. Samples must be sorted by
decreasing length: a step then works on the first ``active[t]`` of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from sluice.gradients.workspace import Loan

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Weights:
    """One layer's parameters, both directions stacked, in the cell's own gate order.

    Attributes:
        fused: ``[directions, in + state, gates * hidden]``.
        bias: ``[directions, 1, gates * hidden]``.
        projection: ``[directions, hidden, state]`` of an LSTM with ``proj_size``, else None.
    """

    fused: Tensor
    bias: Tensor
    projection: Tensor | None


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """How long each sample is; samples are sorted by decreasing length.

    Attributes:
        active: number of samples that are still running at each step.
        each: length of each sample, ``[n]``; None where all are as long as the longest.
    """

    active: tuple[int, ...]
    each: Tensor | None

    def steps(self, buffer: Tensor, start: int = 0) -> list[Tensor]:
        """What each step sees of a buffer ``[directions, time, n, features]``: its own time, samples still running.

        One call for all steps: taking views one by one inside the loop would cost as much as the arithmetic.
        """
        views = buffer.unbind(1)[start : start + len(self.active)]
        if self.each is None:
            return list(views)
        return [view[:, :n] for view, n in zip(views, self.active, strict=True)]

    def running(self, buffer: Tensor) -> list[Tensor]:
        """The part of one buffer ``[directions, n, features]``, used again by every step, that each step sees."""
        return [buffer] * len(self.active) if self.each is None else [buffer[:, :n] for n in self.active]

    def add_reversed(self, target: Tensor, source: Tensor) -> None:
        """Add to ``[time, n, features]`` another with each sample's own steps in reverse order, padding in place."""
        if self.each is None:
            torch._foreach_add_(target.unbind(0), source.unbind(0)[::-1])
        else:
            target += self._gathered(source)

    def copy_reversed(self, target: Tensor, source: Tensor) -> None:
        """The same, overwriting the target."""
        if self.each is None:
            torch._foreach_copy_(target.unbind(0), source.unbind(0)[::-1])
        else:
            target.copy_(self._gathered(source))

    def _gathered(self, source: Tensor) -> Tensor:
        assert self.each is not None
        steps = torch.arange(source.shape[0], device=source.device).unsqueeze(1)
        mirrored = self.each - 1 - steps
        index = torch.where(mirrored >= 0, mirrored, steps)
        return source.gather(0, index.unsqueeze(2).expand_as(source))

    def last(self, states: Tensor) -> Tensor:
        """The state after each sample's own last step, from ``[directions, time + 1, n, features]``."""
        if self.each is None:
            return states[:, -1].clone()
        return states[:, self.each, torch.arange(self.each.shape[0], device=states.device)]


class Memory:
    """What one layer's forward loop leaves for its backward loop.

    Attributes:
        lengths: of the samples it was made for.
        inputs: ``[directions, time + 1, n, in + state]``; step t's input and the state before it.
        h: the states in it.
        z: ``[directions, time, n, gates * hidden]``: activations, then pre-activation gradients.
        c, tanh_c: an LSTM's cell states (``time + 1`` of them) and their tanh.
        dh, dc: gradients of the state and of an LSTM's cell state during the backward loop.
        projected: an LSTM's states before the projection.
        lstm: whether it is an LSTM's.
        compiled: whether a compiled kernel works on it, which wants it stored sample by sample.
    """

    def __init__(
        self,
        lengths: Lengths,
        weights: Weights,
        *,
        n: int,
        in_features: int,
        gates: int,
        lstm: bool,
        compiled: bool = False,
    ) -> None:
        directions, columns, width = weights.fused.shape
        steps = len(lengths.active)
        self.lengths = lengths
        self.hidden = width // gates
        self.state = columns - in_features
        self.compiled = compiled
        self.lstm = lstm
        new = weights.fused.new_empty
        # Steps after a sample's end are never computed, and must count as zero.
        new_padded = weights.fused.new_zeros if lengths.each is not None else new

        def by_step(make: Callable[..., Tensor], count: int, width: int) -> Tensor:
            if compiled:
                return make(directions, n, count, width).transpose(1, 2)
            # One sample more than there are: rows of neighbouring steps that are a power of two apart would share a
            # few lines of the cache, and the per-sample products read such rows together.
            return make(directions, count, n + 1, width)[:, :, :n]

        self.inputs = by_step(new_padded, steps + 1, columns)
        self.h = self.inputs[..., in_features:]
        self.z = by_step(new_padded, steps, width)
        self.projected = None if weights.projection is None else new_padded(directions, steps, n, self.hidden)
        cells = self.hidden if lstm else 0
        self.c = by_step(new, steps + 1, cells)
        self.tanh_c = by_step(new, steps, cells)
        self.dc = new(directions, n, cells)
        self.dh = new(directions, n, self.state)
        self._cache: dict[object, Any] = {}

    def cached(self, key: object, make: Callable[[], T]) -> T:
        """Something about these buffers (views of them, more buffers, functions of both) that is made once."""
        if key not in self._cache:
            self._cache[key] = make()
        return cast(T, self._cache[key])

    def buffer(self, name: str, *shape: int) -> Tensor:
        """One more buffer. Steps after a sample's end count as zero in it."""
        new = self.z.new_zeros if self.lengths.each is not None else self.z.new_empty
        return self.cached((name, shape), lambda: new(shape))

    def blocks(self, first: int, count: int = 1) -> list[Tensor]:
        """Some neighbouring blocks of z, for each step."""
        return self.lengths.steps(self.z[..., first * self.hidden : (first + count) * self.hidden])

    def scratch(self, blocks: int) -> list[list[Tensor]]:
        """A buffer of that many blocks that every step uses again: the whole of it, then block by block."""
        buffer = self.z.new_empty(self.z.shape[0], self.z.shape[2], blocks * self.hidden)
        return [self.lengths.running(buffer), *(self.lengths.running(part) for part in buffer.split(self.hidden, -1))]


class Borrowed:
    """A memory for one forward and backward pass.

    Attributes:
        spent: whether the backward loop has run, after which the activations are gone.
    """

    def __init__(self, loan: Loan[Memory]) -> None:
        self._loan = loan
        self.memory = loan.thing
        self.spent = False
