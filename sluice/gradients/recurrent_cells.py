"""Recurrent layers as one autograd function that gives back pre-activation gradients and no weight gradients.

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
from typing import Any

import torch
from torch import Tensor

from sluice.errors import InputError

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
        if self.relu:
            return lambda t: torch.clamp(z[t], min=0, out=h[t])
        return lambda t: torch.tanh(z[t], out=h[t])

    def backward(self, memory: Memory, lengths: Lengths) -> Callable[[int, Tensor], None]:
        z, h = lengths.steps(memory.z), lengths.steps(memory.h, 1)
        if self.relu:
            return lambda t, dh: _relu_backward(dh, h[t], 0, grad_input=z[t])
        return lambda t, dh: _tanh_backward(dh, h[t], grad_input=z[t])


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

    def reversed(self, x: Tensor) -> Tensor:
        """x ``[time, n, features]`` with each sample's own steps in reverse order; its padding stays where it is."""
        if self.each is None:
            return x.flip(0)
        steps = torch.arange(x.shape[0], device=x.device).unsqueeze(1)
        mirrored = self.each - 1 - steps
        index = torch.where(mirrored >= 0, mirrored, steps)
        return x.gather(0, index.unsqueeze(2).expand_as(x))

    def last(self, states: Tensor) -> Tensor:
        """The state after each sample's own last step, from ``[directions, time + 1, n, features]``."""
        if self.each is None:
            return states[:, -1].clone()
        return states[:, self.each, torch.arange(self.each.shape[0], device=states.device)]


class RecurrentLayer(torch.autograd.Function):
    """``y, h_n, c_n`` of one layer (c_n is empty unless it is an LSTM).

    ``offset`` stands for a zero that is added to the pre-activations: its gradient is the pre-activation gradient,
    ``[directions, time, n, gates * hidden]``. ``state_offset`` is the same for the projected states of an LSTM.
    """

    @staticmethod
    def forward(
        ctx: Any,
        cell: Cell,
        weights: Weights,
        lengths: Lengths,
        memory: Memory,
        x: Tensor,
        h0: Tensor,
        c0: Tensor,
        offset: Tensor,
        state_offset: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        features, directions = x.shape[2], weights.fused.shape[0]
        memory.inputs[0, :-1, :, :features] = x
        if directions == 2:
            memory.inputs[1, :-1, :, :features] = lengths.reversed(x)
        memory.inputs[:, -1, :, :features] = 0
        memory.h[:, 0] = h0
        if isinstance(cell, LSTMCell):
            memory.c[:, 0] = c0
        z, inputs, advance = lengths.steps(memory.z), lengths.steps(memory.inputs), cell.forward(memory, lengths)
        for t in range(len(lengths.active)):
            torch.baddbmm(weights.bias, inputs[t], weights.fused, out=z[t])
            advance(t)
        ctx.cell, ctx.weights, ctx.lengths, ctx.memory, ctx.features = cell, weights, lengths, memory, features
        states = memory.h[:, 1:]
        y = states[0].clone() if directions == 1 else torch.cat([states[0], lengths.reversed(states[1])], -1)
        c_n = lengths.last(memory.c) if isinstance(cell, LSTMCell) else x.new_empty(0)
        return y, lengths.last(memory.h), c_n

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        cell, weights, lengths, memory = ctx.cell, ctx.weights, ctx.lengths, ctx.memory
        if memory.spent:
            raise InputError("A recorded recurrent layer can be differentiated once; run the forward pass again.")
        memory.spent = True
        dy, dh_n, dc_n = gradients
        directions, steps, total, _ = memory.z.shape
        dh = memory.z.new_zeros(directions, total, memory.state) if dh_n is None else dh_n.clone()
        if isinstance(cell, LSTMCell):
            zero = memory.z.new_zeros
            memory.dc = zero(directions, total, memory.hidden) if dc_n is None else dc_n.clone()
        incoming = None if dy is None else lengths.steps(_by_direction(dy, directions, lengths))
        dstates = memory.z.new_zeros(directions, steps, total, memory.state) if ctx.needs_input_grad[8] else None
        wants_x = ctx.needs_input_grad[4]
        skipped = ctx.features if wants_x else 0
        transposed = weights.fused[:, ctx.features - skipped :].transpose(1, 2).contiguous()
        new = memory.z.new_zeros if lengths.each is not None else memory.z.new_empty
        back = new(directions, steps if wants_x else 1, total, transposed.shape[2])
        rows = lengths.steps(back if wants_x else back.expand(-1, steps, -1, -1))
        onward = lengths.steps((back if wants_x else back.expand(-1, steps, -1, -1))[..., skipped:])
        z, running, retreat = lengths.steps(memory.z), lengths.running(dh), cell.backward(memory, lengths)
        passes_by = isinstance(cell, GRUCell)
        for t in range(steps - 1, -1, -1):
            now = running[t]
            if incoming is not None:
                now.add_(incoming[t])
            if dstates is not None:
                dstates[:, t, : now.shape[1]] = now
            retreat(t, now if weights.projection is None else torch.bmm(now, weights.projection.transpose(1, 2)))
            torch.bmm(z[t], transposed, out=rows[t])
            if passes_by:
                now.add_(onward[t])
            else:
                now.copy_(onward[t])
        dx = None
        if wants_x:
            dx = back[0, ..., : ctx.features]
            if directions == 2:
                dx = dx + lengths.reversed(back[1, ..., : ctx.features])
        dc = memory.dc if isinstance(cell, LSTMCell) else None
        return None, None, None, None, dx, dh, dc, memory.z, dstates


def _by_direction(dy: Tensor, directions: int, lengths: Lengths) -> Tensor:
    if directions == 1:
        return dy.unsqueeze(0)
    forward, backward = dy.chunk(2, -1)
    return torch.stack([forward, lengths.reversed(backward)])
