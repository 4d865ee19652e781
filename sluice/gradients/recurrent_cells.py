"""Recurrent layers as one autograd function that gives back pre-activation gradients and no weight gradients.

Everything is time-major with the directions of a layer stacked in front, ``[directions, time, n, features]``; the
backward direction has its time reversed on entry, for each sample at its own length. Input and previous state lie
side by side in one buffer, so a step is one batched product with the fused weight ``[in + hidden, gates * hidden]``,
in the forward loop and in the backward loop alike. The activations are overwritten by the pre-activation gradients.

Samples must be sorted by decreasing length: a step then works on the first ``active[t]`` of them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
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
    def forward(self, z: Tensor, memory: Memory, t: int, n: int) -> None:
        """Turn pre-activations z ``[directions, n, gates * hidden]`` into activations and write the new state."""

    @abstractmethod
    def backward(self, dh: Tensor, z: Tensor, memory: Memory, t: int, n: int) -> None:
        """Turn activations z into pre-activation gradients. A gradient that passes the state by stays in ``dh``."""

    def columns(self, order: tuple[int, ...], hidden: int, device: torch.device) -> Tensor:
        """Indices that bring the cell's columns into PyTorch's order for one of the two weights."""
        within = torch.arange(hidden, device=device)
        return torch.cat([within + block * hidden for block in order])


class Memory:
    """What one layer's forward loop leaves for its backward loop.

    Attributes:
        inputs: ``[directions, time + 1, n, in + state]``; step t's input and the state before it.
        z: ``[directions, time, n, gates * hidden]``: activations, then pre-activation gradients.
        c, tanh_c: an LSTM's cell states (``time + 1`` of them) and their tanh.
        projected: an LSTM's states before the projection.
    """

    def __init__(self, cell: Cell, weights: Weights, steps: int, n: int, in_features: int, *, ragged: bool) -> None:
        directions, columns, width = weights.fused.shape
        self.hidden = width // cell.gates
        self.state = columns - in_features
        new = weights.fused.new_zeros if ragged else weights.fused.new_empty
        self.inputs = new(directions, steps + 1, n, columns)
        self.h = self.inputs[..., in_features:]
        self.z = new(directions, steps, n, width)
        self.projection = weights.projection
        self.projected = None if weights.projection is None else new(directions, steps, n, self.hidden)
        self.spent = False
        self.dc = self.c = self.tanh_c = self.z[:0]
        if isinstance(cell, LSTMCell):
            self.c = new(directions, steps + 1, n, self.hidden)
            self.tanh_c = new(directions, steps, n, self.hidden)
        self.scratch = weights.fused.new_empty(directions, n, width)


class LSTMCell(Cell):
    """Blocks i, f, o, g: the three sigmoids are one contiguous run."""

    gates = 4
    input_order = (0, 1, 3, 2)
    state_order = (0, 1, 3, 2)

    def forward(self, z: Tensor, memory: Memory, t: int, n: int) -> None:
        hidden = memory.hidden
        i, f, o, g = z.split(hidden, -1)
        z[..., : 3 * hidden].sigmoid_()
        g.tanh_()
        c = memory.c[:, t + 1, :n]
        torch.mul(f, memory.c[:, t, :n], out=c)
        c.addcmul_(i, g)
        tanh_c = torch.tanh(c, out=memory.tanh_c[:, t, :n])
        if memory.projected is None:
            torch.mul(o, tanh_c, out=memory.h[:, t + 1, :n])
        else:
            assert memory.projection is not None
            projected = torch.mul(o, tanh_c, out=memory.projected[:, t, :n])
            memory.h[:, t + 1, :n] = torch.bmm(projected, memory.projection)

    def backward(self, dh: Tensor, z: Tensor, memory: Memory, t: int, n: int) -> None:
        hidden = memory.hidden
        i, f, o, g = z.split(hidden, -1)
        raw = memory.scratch[:, :n]
        raw_i, raw_f, raw_o, raw_g = raw.split(hidden, -1)
        tanh_c, dc = memory.tanh_c[:, t, :n], memory.dc[:, :n]
        torch.mul(dh, tanh_c, out=raw_o)
        # raw_i is free until dc is complete.
        through_h = _tanh_backward(torch.mul(dh, o, out=raw_i), tanh_c, grad_input=raw_i)
        dc.add_(through_h)
        torch.mul(dc, g, out=raw_i)
        torch.mul(dc, memory.c[:, t, :n], out=raw_f)
        torch.mul(dc, i, out=raw_g)
        dc.mul_(f)
        sigmoids = z[..., : 3 * hidden]
        _sigmoid_backward(raw[..., : 3 * hidden], sigmoids, grad_input=sigmoids)
        _tanh_backward(raw_g, g, grad_input=g)


class GRUCell(Cell):
    """Blocks r, z, n from the input, n from the state: the reset gate multiplies the latter alone."""

    gates = 4
    input_order = (0, 1, 2)
    state_order = (0, 1, 3)

    def forward(self, z: Tensor, memory: Memory, t: int, n: int) -> None:
        hidden = memory.hidden
        reset, update, new, from_state = z.split(hidden, -1)
        z[..., : 2 * hidden].sigmoid_()
        new.addcmul_(reset, from_state).tanh_()
        difference = memory.scratch[:, :n, :hidden]
        torch.sub(memory.h[:, t, :n], new, out=difference)
        torch.addcmul(new, update, difference, out=memory.h[:, t + 1, :n])

    def backward(self, dh: Tensor, z: Tensor, memory: Memory, t: int, n: int) -> None:
        hidden = memory.hidden
        reset, update, new, from_state = z.split(hidden, -1)
        raw = memory.scratch[:, :n]
        raw_reset, raw_update, raw_new, passed = raw.split(hidden, -1)
        torch.sub(memory.h[:, t, :n], new, out=raw_update).mul_(dh)
        torch.mul(dh, update, out=passed)
        torch.sub(dh, passed, out=raw_new)
        dh.copy_(passed)
        _tanh_backward(raw_new, new, grad_input=new)
        torch.mul(new, from_state, out=raw_reset)
        torch.mul(new, reset, out=from_state)
        sigmoids = z[..., : 2 * hidden]
        _sigmoid_backward(raw[..., : 2 * hidden], sigmoids, grad_input=sigmoids)


class PlainCell(Cell):
    """One block: tanh or relu."""

    gates = 1
    input_order = (0,)
    state_order = (0,)

    def __init__(self, nonlinearity: str) -> None:
        self.relu = nonlinearity == "relu"

    def forward(self, z: Tensor, memory: Memory, t: int, n: int) -> None:
        if self.relu:
            torch.clamp(z, min=0, out=memory.h[:, t + 1, :n])
        else:
            torch.tanh(z, out=memory.h[:, t + 1, :n])

    def backward(self, dh: Tensor, z: Tensor, memory: Memory, t: int, n: int) -> None:
        state = memory.h[:, t + 1, :n]
        if self.relu:
            _relu_backward(dh, state, 0, grad_input=z)
        else:
            _tanh_backward(dh, state, grad_input=z)


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """How long each sample is; samples are sorted by decreasing length.

    Attributes:
        active: number of samples that are still running at each step.
        each: length of each sample, ``[n]``; None where all are as long as the longest.
    """

    active: tuple[int, ...]
    each: Tensor | None

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
        for t, n in enumerate(lengths.active):
            z = memory.z[:, t, :n]
            torch.baddbmm(weights.bias, memory.inputs[:, t, :n], weights.fused, out=z)
            cell.forward(z, memory, t, n)
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
            empty = memory.z.new_zeros(directions, total, memory.hidden)
            memory.dc = empty if dc_n is None else dc_n.clone()
        incoming = None if dy is None else _by_direction(dy, directions, lengths)
        keeps_dh = ctx.needs_input_grad[8]
        dstates = memory.z.new_zeros(directions, steps, total, memory.state) if keeps_dh else None
        wants_x = ctx.needs_input_grad[4]
        transposed = (weights.fused if wants_x else weights.fused[:, ctx.features :]).transpose(1, 2).contiguous()
        skipped = ctx.features if wants_x else 0
        dinputs = memory.z.new_zeros if lengths.each is not None else memory.z.new_empty
        back = dinputs(directions, steps if wants_x else 1, total, transposed.shape[2])
        passes_by = isinstance(cell, GRUCell)
        for t in range(steps - 1, -1, -1):
            n = lengths.active[t]
            z, now = memory.z[:, t, :n], dh[:, :n]
            if incoming is not None:
                now.add_(incoming[:, t, :n])
            if dstates is not None:
                dstates[:, t, :n] = now
            into_cell = now if weights.projection is None else torch.bmm(now, weights.projection.transpose(1, 2))
            cell.backward(into_cell, z, memory, t, n)
            row = torch.bmm(z, transposed, out=back[:, t if wants_x else 0, :n])
            if passes_by:
                now.add_(row[..., skipped:])
            else:
                now.copy_(row[..., skipped:])
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
