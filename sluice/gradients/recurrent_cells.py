"""One step of an LSTM, GRU or plain recurrent cell, forward and backward, in place on buffers that hold all steps.

Everything is time-major with the directions of a layer stacked in front, ``[directions, time, n, features]``; the
backward direction has its time reversed on entry, for each sample at its own length. Input and previous state lie
side by side in one buffer, so a step is one batched product with the fused weight ``[in + hidden, gates * hidden]``,
in the forward loop and in the backward loop alike. The activations are overwritten by the pre-activation gradients.

Samples must be sorted by decreasing length: a step then works on the first ``active[t]`` of them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

_sigmoid_backward = torch.ops.aten.sigmoid_backward.grad_input
_tanh_backward = torch.ops.aten.tanh_backward.grad_input
_relu_backward = torch.ops.aten.threshold_backward.grad_input


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


class Cell(ABC):
    """One kind of recurrent cell.

    Attributes:
        gates: pre-activations for each hidden unit.
        input_order, state_order: which of the cell's pre-activation blocks are the blocks of ``weight_ih`` and of
            ``weight_hh``, in the order in which PyTorch stores those.
    """

    gates: int
    input_order: tuple[int, ...]
    state_order: tuple[int, ...]

    @abstractmethod
    def forward(self, memory: Memory, lengths: Lengths) -> Callable[[int], None]:
        """A function that turns step t's pre-activations into activations and writes the state after it."""

    @abstractmethod
    def backward(self, memory: Memory, lengths: Lengths) -> Callable[[int, Tensor], None]:
        """A function that turns step t's activations into pre-activation gradients, given that of the state, dh.

        A gradient that passes the cell by, on to the state before, is left in dh.
        """

    def columns(self, order: tuple[int, ...], hidden: int, device: torch.device) -> Tensor:
        """Indices that bring the cell's columns into PyTorch's order for one of the two weights."""
        within = torch.arange(hidden, device=device)
        return torch.cat([within + block * hidden for block in order])


class Memory:
    """What one layer's forward loop leaves for its backward loop.

    Attributes:
        inputs: ``[directions, time + 1, n, in + state]``; step t's input and the state before it.
        h: the states in it.
        z: ``[directions, time, n, gates * hidden]``: activations, then pre-activation gradients.
        c, tanh_c: an LSTM's cell states (``time + 1`` of them) and their tanh.
        dc: gradient of an LSTM's cell state during the backward loop.
        projected: an LSTM's states before the projection.
        spent: whether the backward loop has run, after which the activations are gone.
    """

    def __init__(self, cell: Cell, weights: Weights, steps: int, n: int, in_features: int, *, ragged: bool) -> None:
        directions, columns, width = weights.fused.shape
        self.hidden = width // cell.gates
        self.state = columns - in_features
        empty = weights.fused.new_empty
        # Steps after a sample's end are never computed, and must count as zero.
        padded = weights.fused.new_zeros if ragged else empty
        self.inputs = padded(directions, steps + 1, n, columns)
        self.h = self.inputs[..., in_features:]
        self.z = padded(directions, steps, n, width)
        self.projection = weights.projection
        self.projected = None if weights.projection is None else padded(directions, steps, n, self.hidden)
        self.spent = False
        is_lstm = isinstance(cell, LSTMCell)
        self.c = empty(directions, steps + 1, n, self.hidden if is_lstm else 0)
        self.tanh_c = empty(directions, steps, n, self.hidden if is_lstm else 0)
        self.dc = empty(0)

    def blocks(self, lengths: Lengths, first: int, count: int = 1) -> list[Tensor]:
        """Some neighbouring blocks of z, for each step."""
        return lengths.steps(self.z[..., first * self.hidden : (first + count) * self.hidden])

    def scratch(self, lengths: Lengths, blocks: int) -> list[list[Tensor]]:
        """A buffer of that many blocks that every step uses again: the whole of it, then block by block."""
        buffer = self.z.new_empty(self.z.shape[0], self.z.shape[2], blocks * self.hidden)
        return [lengths.running(buffer), *(lengths.running(part) for part in buffer.split(self.hidden, -1))]


class LSTMCell(Cell):
    """Blocks i, f, o, g: the three sigmoids are one contiguous run."""

    gates = 4
    input_order = (0, 1, 3, 2)
    state_order = (0, 1, 3, 2)

    def forward(self, memory: Memory, lengths: Lengths) -> Callable[[int], None]:
        i, f, o, g = (memory.blocks(lengths, block) for block in range(4))
        sigmoids = memory.blocks(lengths, 0, 3)
        before, c = lengths.steps(memory.c), lengths.steps(memory.c, 1)
        tanh_c, h = lengths.steps(memory.tanh_c), lengths.steps(memory.h, 1)
        unprojected = h if memory.projected is None else lengths.steps(memory.projected)
        projection = memory.projection

        def step(t: int) -> None:
            sigmoids[t].sigmoid_()
            g[t].tanh_()
            torch.mul(f[t], before[t], out=c[t]).addcmul_(i[t], g[t])
            torch.tanh(c[t], out=tanh_c[t])
            torch.mul(o[t], tanh_c[t], out=unprojected[t])
            if projection is not None:
                h[t].copy_(torch.bmm(unprojected[t], projection))

        return step

    def backward(self, memory: Memory, lengths: Lengths) -> Callable[[int, Tensor], None]:
        i, f, o, g = (memory.blocks(lengths, block) for block in range(4))
        sigmoids = memory.blocks(lengths, 0, 3)
        raw_sigmoids, raw_i, raw_f, raw_o = memory.scratch(lengths, 3)
        raw_g, _ = memory.scratch(lengths, 1)
        c, tanh_c, dcs = lengths.steps(memory.c), lengths.steps(memory.tanh_c), lengths.running(memory.dc)

        def step(t: int, dh: Tensor) -> None:
            dc, partial = dcs[t], raw_g[t]
            torch.mul(dh, tanh_c[t], out=raw_o[t])
            torch.mul(dh, o[t], out=partial)
            dc.add_(_tanh_backward(partial, tanh_c[t], grad_input=partial))
            torch.mul(dc, g[t], out=raw_i[t])
            torch.mul(dc, c[t], out=raw_f[t])
            torch.mul(dc, i[t], out=raw_g[t])
            dc.mul_(f[t])
            _sigmoid_backward(raw_sigmoids[t], sigmoids[t], grad_input=sigmoids[t])
            _tanh_backward(raw_g[t], g[t], grad_input=g[t])

        return step


class GRUCell(Cell):
    """Blocks r, z, n from the input, n from the state: the reset gate multiplies the latter alone."""

    gates = 4
    input_order = (0, 1, 2)
    state_order = (0, 1, 3)

    def forward(self, memory: Memory, lengths: Lengths) -> Callable[[int], None]:
        reset, update, new, from_state = (memory.blocks(lengths, block) for block in range(4))
        sigmoids = memory.blocks(lengths, 0, 2)
        before, h = lengths.steps(memory.h), lengths.steps(memory.h, 1)
        difference, _ = memory.scratch(lengths, 1)

        def step(t: int) -> None:
            sigmoids[t].sigmoid_()
            new[t].addcmul_(reset[t], from_state[t]).tanh_()
            torch.sub(before[t], new[t], out=difference[t])
            torch.addcmul(new[t], update[t], difference[t], out=h[t])

        return step

    def backward(self, memory: Memory, lengths: Lengths) -> Callable[[int, Tensor], None]:
        reset, update, new, from_state = (memory.blocks(lengths, block) for block in range(4))
        sigmoids = memory.blocks(lengths, 0, 2)
        before = lengths.steps(memory.h)
        raw_sigmoids, raw_reset, raw_update = memory.scratch(lengths, 2)
        raw_new, _ = memory.scratch(lengths, 1)

        def step(t: int, dh: Tensor) -> None:
            torch.sub(before[t], new[t], out=raw_update[t]).mul_(dh)
            torch.addcmul(dh, dh, update[t], value=-1, out=raw_new[t])
            dh.mul_(update[t])
            _tanh_backward(raw_new[t], new[t], grad_input=new[t])
            torch.mul(new[t], from_state[t], out=raw_reset[t])
            torch.mul(new[t], reset[t], out=from_state[t])
            _sigmoid_backward(raw_sigmoids[t], sigmoids[t], grad_input=sigmoids[t])

        return step


class PlainCell(Cell):
    """One block: tanh or relu."""

    gates = 1
    input_order = (0,)
    state_order = (0,)

    def __init__(self, nonlinearity: str) -> None:
        self.relu = nonlinearity == "relu"

    def forward(self, memory: Memory, lengths: Lengths) -> Callable[[int], None]:
        z, h = lengths.steps(memory.z), lengths.steps(memory.h, 1)

        def step(t: int) -> None:
            if self.relu:
                torch.clamp(z[t], min=0, out=h[t])
            else:
                torch.tanh(z[t], out=h[t])

        return step

    def backward(self, memory: Memory, lengths: Lengths) -> Callable[[int, Tensor], None]:
        z, h = lengths.steps(memory.z), lengths.steps(memory.h, 1)

        def step(t: int, dh: Tensor) -> None:
            if self.relu:
                _relu_backward(dh, h[t], 0, grad_input=z[t])
            else:
                _tanh_backward(dh, h[t], grad_input=z[t])

        return step


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
