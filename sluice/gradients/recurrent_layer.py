"""A recurrent layer as one autograd function that gives back pre-activation gradients and no weight gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sluice.errors import InputError
from sluice.gradients.recurrent_cells import Cell, GRUCell, Lengths, LSTMCell, Memory, Weights


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
            lengths.copy_reversed(memory.inputs[1, :-1, :, :features], memory.inputs[0, :-1, :, :features])
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
        y = x.new_empty(*x.shape[:2], directions * memory.state)
        y[..., : memory.state] = states[0]
        if directions == 2:
            lengths.copy_reversed(y[..., memory.state :], states[1])
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
        dx = None
        if wants_x:
            dx = back[0, ..., : ctx.features]
            if directions == 2:
                dx = dx.contiguous()
                lengths.add_reversed(dx, back[1, ..., : ctx.features])
        dc = memory.dc if isinstance(cell, LSTMCell) else None
        return None, None, None, None, dx, dh, dc, memory.z, dstates


def _by_direction(dy: Tensor, directions: int, lengths: Lengths) -> Tensor:
    if directions == 1:
        return dy.unsqueeze(0)
    state = dy.shape[2] // 2
    result = dy.new_empty(2, *dy.shape[:2], state)
    result[0] = dy[..., :state]
    lengths.copy_reversed(result[1], dy[..., state:])
    return result
