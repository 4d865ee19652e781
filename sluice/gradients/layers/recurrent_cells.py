"""One step of an LSTM, GRU or plain recurrent cell, forward and backward, in place on buffers that hold all steps.

Input and previous state lie side by side in one buffer, so a step is one batched product with the fused weight
``[in + hidden, gates * hidden]``, in the forward loop and in the backward loop alike. The activations are overwritten
by the pre-activation gradients.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor

from sluice.gradients.layers.recurrent_memory import Memory

_sigmoid_backward = torch.ops.aten.sigmoid_backward.grad_input
_tanh_backward = torch.ops.aten.tanh_backward.grad_input
_relu_backward = torch.ops.aten.threshold_backward.grad_input


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
    def forward(self, memory: Memory) -> Callable[[int], None]:
        """A function that turns step t's pre-activations into activations and writes the state after it."""

    @abstractmethod
    def backward(self, memory: Memory) -> Callable[[int, Tensor], None]:
        """A function that turns step t's activations into pre-activation gradients, given that of the state, dh.

        A gradient that passes the cell by, on to the state before, is left in dh.
        """

    def columns(self, order: tuple[int, ...], hidden: int, device: torch.device) -> Tensor:
        """Indices that bring the cell's columns into PyTorch's order for one of the two weights."""
        within = torch.arange(hidden, device=device)
        return torch.cat([within + block * hidden for block in order])


class LSTMCell(Cell):
    """Blocks i, f, o, g: the three sigmoids are one contiguous run."""

    gates = 4
    input_order = (0, 1, 3, 2)
    state_order = (0, 1, 3, 2)

    def forward(self, memory: Memory) -> Callable[[int], None]:
        i, f, o, g = (memory.blocks(block) for block in range(4))
        sigmoids = memory.blocks(0, 3)
        before, c = memory.lengths.steps(memory.c), memory.lengths.steps(memory.c, 1)
        tanh_c, h = memory.lengths.steps(memory.tanh_c), memory.lengths.steps(memory.h, 1)
        unprojected = h if memory.projected is None else memory.lengths.steps(memory.projected)

        def step(t: int) -> None:
            sigmoids[t].sigmoid_()
            g[t].tanh_()
            torch.mul(f[t], before[t], out=c[t]).addcmul_(i[t], g[t])
            torch.tanh(c[t], out=tanh_c[t])
            torch.mul(o[t], tanh_c[t], out=unprojected[t])

        return step

    def backward(self, memory: Memory) -> Callable[[int, Tensor], None]:
        i, f, o, g = (memory.blocks(block) for block in range(4))
        sigmoids = memory.blocks(0, 3)
        raw_sigmoids, raw_i, raw_f, raw_o = memory.scratch(3)
        raw_g, _ = memory.scratch(1)
        c, tanh_c, dcs = (
            memory.lengths.steps(memory.c),
            memory.lengths.steps(memory.tanh_c),
            memory.lengths.running(memory.dc),
        )

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
    """Blocks n from the input, r, z, n from the state: the reset gate multiplies the last alone.

    The blocks that the input has a part in lie side by side, and so do those of the state.
    """

    gates = 4
    input_order = (1, 2, 0)
    state_order = (1, 2, 3)

    def forward(self, memory: Memory) -> Callable[[int], None]:
        new, reset, update, from_state = (memory.blocks(block) for block in range(4))
        sigmoids = memory.blocks(1, 2)
        before, h = memory.lengths.steps(memory.h), memory.lengths.steps(memory.h, 1)
        difference, _ = memory.scratch(1)

        def step(t: int) -> None:
            sigmoids[t].sigmoid_()
            new[t].addcmul_(reset[t], from_state[t]).tanh_()
            torch.sub(before[t], new[t], out=difference[t])
            torch.addcmul(new[t], update[t], difference[t], out=h[t])

        return step

    def backward(self, memory: Memory) -> Callable[[int, Tensor], None]:
        new, reset, update, from_state = (memory.blocks(block) for block in range(4))
        sigmoids = memory.blocks(1, 2)
        before = memory.lengths.steps(memory.h)
        raw_sigmoids, raw_reset, raw_update = memory.scratch(2)
        raw_new, _ = memory.scratch(1)

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

    def forward(self, memory: Memory) -> Callable[[int], None]:
        z, h = memory.lengths.steps(memory.z), memory.lengths.steps(memory.h, 1)

        def step(t: int) -> None:
            if self.relu:
                torch.clamp(z[t], min=0, out=h[t])
            else:
                torch.tanh(z[t], out=h[t])

        return step

    def backward(self, memory: Memory) -> Callable[[int, Tensor], None]:
        z, h = memory.lengths.steps(memory.z), memory.lengths.steps(memory.h, 1)

        def step(t: int, dh: Tensor) -> None:
            if self.relu:
                _relu_backward(dh, h[t], 0, grad_input=z[t])
            else:
                _tanh_backward(dh, h[t], grad_input=z[t])

        return step
