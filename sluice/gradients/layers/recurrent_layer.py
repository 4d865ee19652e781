"""A recurrent layer as one autograd function that gives back pre-activation gradients and no weight gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sluice._base.errors import InputError
from sluice.gradients.layers.recurrent_cells import Cell, GRUCell, LSTMCell
from sluice.gradients.layers.recurrent_memory import Borrowed, Lengths, Memory, Weights
from sluice.gradients.native import recurrent


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
        borrowed: Borrowed,
        x: Tensor,
        h0: Tensor,
        c0: Tensor,
        offset: Tensor,
        state_offset: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        memory, lengths = borrowed.memory, borrowed.memory.lengths
        features = x.shape[2]
        ctx.cell, ctx.weights, ctx.borrowed, ctx.features = cell, weights, borrowed, features
        memory.h[:, 0] = h0
        if isinstance(cell, LSTMCell):
            memory.c[:, 0] = c0
        y = recurrent.forward(memory, weights, x) if memory.compiled else _forward(cell, memory, weights, x)
        c_n = lengths.last(memory.c) if isinstance(cell, LSTMCell) else x.new_empty(0)
        return y, lengths.last(memory.h), c_n

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        cell, weights, borrowed = ctx.cell, ctx.weights, ctx.borrowed
        if borrowed.spent:
            raise InputError("A recorded recurrent layer can be differentiated once; run the forward pass again.")
        borrowed.spent = True
        memory = borrowed.memory
        dy, dh_n, dc_n = gradients
        for buffer, given in ((memory.dh, dh_n), (memory.dc, dc_n)):
            buffer.zero_() if given is None else buffer.copy_(given)
        wants_x, dstates = ctx.needs_input_grad[3], None
        if memory.compiled:
            dx = recurrent.backward(memory, weights, dy, features=ctx.features, wants_x=wants_x)
        else:
            if ctx.needs_input_grad[7]:
                dstates = memory.z.new_zeros(*memory.z.shape[:3], memory.state)
            dx = _backward(cell, memory, weights, dy, dstates, features=ctx.features if wants_x else 0)
        dc = memory.dc.clone() if isinstance(cell, LSTMCell) else None
        return None, None, None, dx, memory.dh.clone(), dc, memory.z, dstates


recurrent_layer: Callable[..., tuple[Tensor, Tensor, Tensor]] = RecurrentLayer.apply


def _forward(cell: Cell, memory: Memory, weights: Weights, x: Tensor) -> Tensor:
    lengths, features, directions = memory.lengths, x.shape[2], weights.fused.shape[0]
    memory.inputs[0, :-1, :, :features] = x
    if directions == 2:
        lengths.copy_reversed(memory.inputs[1, :-1, :, :features], memory.inputs[0, :-1, :, :features])
    memory.inputs[:, -1, :, :features] = 0
    _forward_loop(cell, memory)(weights)
    states = memory.h[:, 1:]
    y = x.new_empty(*x.shape[:2], directions * memory.state)
    y[..., : memory.state] = states[0]
    if directions == 2:
        lengths.copy_reversed(y[..., memory.state :], states[1])
    return y


def _backward(
    cell: Cell, memory: Memory, weights: Weights, dy: Tensor | None, dstates: Tensor | None, *, features: int
) -> Tensor | None:
    """The derivative at the inputs, if ``features`` says how wide they are; those at states are left in memory."""
    directions, steps, n, _ = memory.z.shape
    if dy is not None:
        _by_direction(dy, memory.buffer("incoming", directions, steps, n, memory.state), memory.lengths)
    _backward_loop(cell, memory, has_dy=dy is not None, features=features)(weights, dstates)
    if not features:
        return None
    back = memory.buffer("back", directions, steps, n, features + memory.state)[..., :features]
    dx = back[0].clone(memory_format=torch.contiguous_format)
    if directions == 2:
        memory.lengths.add_reversed(dx, back[1])
    return dx


def _forward_loop(cell: Cell, memory: Memory) -> Callable[[Weights], None]:
    def make() -> Callable[[Weights], None]:
        lengths, advance = memory.lengths, cell.forward(memory)
        z, inputs, h = lengths.steps(memory.z), lengths.steps(memory.inputs), lengths.steps(memory.h, 1)
        unprojected = [] if memory.projected is None else lengths.steps(memory.projected)

        def run(weights: Weights) -> None:
            fused, bias, projection = weights.fused, weights.bias, weights.projection
            for t in range(len(z)):
                torch.baddbmm(bias, inputs[t], fused, out=z[t])
                advance(t)
                if projection is not None:
                    h[t].copy_(torch.bmm(unprojected[t], projection))

        return run

    return memory.cached(("forward",), make)


def _backward_loop(
    cell: Cell, memory: Memory, *, has_dy: bool, features: int
) -> Callable[[Weights, Tensor | None], None]:
    """From the last step to the first; ``features`` is the width of the input if its gradient is wanted, else 0."""

    def make() -> Callable[[Weights, Tensor | None], None]:
        lengths, retreat = memory.lengths, cell.backward(memory)
        directions, steps, total, _ = memory.z.shape
        incoming = lengths.steps(memory.buffer("incoming", directions, steps, total, memory.state)) if has_dy else None
        shape = (directions, steps if features else 1, total, features + memory.state)
        back = memory.buffer("back", *shape).expand(-1, steps, -1, -1)
        rows, onward = lengths.steps(back), lengths.steps(back[..., features:])
        z, running = lengths.steps(memory.z), lengths.running(memory.dh)
        passes_by = isinstance(cell, GRUCell)

        def run(weights: Weights, dstates: Tensor | None) -> None:
            transposed = weights.fused[:, -shape[-1] :].transpose(1, 2).contiguous()
            already_added = False
            for t in range(steps - 1, -1, -1):
                now = running[t]
                if incoming is not None and not already_added:
                    now.add_(incoming[t])
                if dstates is not None:
                    dstates[:, t, : now.shape[1]] = now
                retreat(t, now if weights.projection is None else torch.bmm(now, weights.projection.transpose(1, 2)))
                torch.bmm(z[t], transposed, out=rows[t])
                already_added = t > 0 and lengths.each is None and not passes_by
                if already_added and incoming is not None:
                    torch.add(onward[t], incoming[t - 1], out=now)
                elif passes_by:
                    now.add_(onward[t])
                else:
                    now.copy_(onward[t])

        return run

    return memory.cached(("backward", has_dy, features), make)


def _by_direction(dy: Tensor, into: Tensor, lengths: Lengths) -> None:
    state = into.shape[3]
    into[0] = dy[..., :state]
    if into.shape[0] == 2:
        lengths.copy_reversed(into[1], dy[..., state:])
