"""A layer of an LSTM or a GRU, both directions and all steps, in one call of a compiled kernel."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from sluice.gradients.layers.recurrent_memory import Memory, Weights
from sluice.gradients.native.kernels import require, succeed
from sluice.gradients.native.loading import loaded_library

_integer, _pointer = ctypes.c_int64, ctypes.c_void_p


class _Layer(ctypes.Structure):
    """The struct of the same name in recurrent.h."""

    _fields_ = (
        *((name, _integer) for name in ("n", "steps", "features", "hidden", "directions")),
        *((name, _pointer) for name in ("lengths", "weights", "bias", "inputs", "gates", "cells", "tanh_cells")),
        *(
            (f"{tensor}{part}", kind)
            for tensor in ("x", "y", "dy", "dx")
            for part, kind in (("", _pointer), ("_time", _integer), ("_sample", _integer))
        ),
        *((name, _pointer) for name in ("dh", "dc")),
        ("threads", ctypes.c_int),
    )


def forward(memory: Memory, weights: Weights, x: Tensor) -> Tensor:
    """The output ``[time, n, directions * hidden]``, from inputs ``[time, n, features]`` and the first states in memory."""
    y = _by_time(memory, x, memory.z.shape[0] * memory.hidden)
    _run("forward", memory, weights, x.shape[2], x=_rows(x), y=y)
    return y


def backward(memory: Memory, weights: Weights, dy: Tensor | None, *, features: int, wants_x: bool) -> Tensor | None:
    """The derivative at the inputs, if wanted; those at gates and first states are left in memory."""
    dx = _by_time(memory, memory.z, features) if wants_x else None
    _run("backward", memory, weights, features, dy=None if dy is None else _rows(dy), dx=dx)
    return dx


def _by_time(memory: Memory, like: Tensor, width: int) -> Tensor:
    """``[time, n, width]``, stored sample by sample; zero where samples have ended."""
    _, steps, n, _ = memory.z.shape
    make = like.new_empty if memory.lengths.each is None else like.new_zeros
    return make(n, steps, width).transpose(0, 1)


def _rows(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(2) == 1 else tensor.contiguous()


def _run(name: str, memory: Memory, weights: Weights, features: int, **by_time: Tensor | None) -> None:
    directions, steps, n, width = memory.z.shape
    hidden, each = memory.hidden, memory.lengths.each
    cell = "lstm" if memory.lstm else "gru"
    own = {"inputs": memory.inputs, "gates": memory.z, "cells": memory.c, "tanh_cells": memory.tanh_c}
    cells = hidden if memory.lstm else 0
    shapes = {"inputs": (steps + 1, features + hidden), "gates": (steps, 4 * hidden), "cells": (steps + 1, cells)}
    shapes["tanh_cells"] = steps, cells
    for key, tensor in own.items():
        stored = tensor.transpose(1, 2)
        require(stored.shape == (directions, n, *shapes[key]) and stored.is_contiguous())
    require(weights.fused.shape == (directions, features + hidden, width) and weights.fused.is_contiguous())
    require(weights.bias.shape == (directions, 1, width) and weights.bias.is_contiguous())
    for tensor, size in ((memory.dh, hidden), (memory.dc, cells)):
        require(tensor.shape == (directions, n, size) and tensor.is_contiguous())
    widths = {"x": features, "y": directions * hidden, "dy": directions * hidden, "dx": features}
    given = {key: tensor for key, tensor in by_time.items() if tensor is not None}
    require(all(t.shape == (steps, n, widths[key]) and 1 in (t.stride(2), t.shape[2]) for key, t in given.items()))
    everything = (*own.values(), *given.values(), weights.fused, weights.bias, memory.dh, memory.dc)
    require(all(t.dtype is torch.float32 and t.device.type == "cpu" for t in everything))
    if each is not None:
        require(each.shape == (n,) and each.dtype is torch.int64 and each.is_contiguous())
        require(n == 0 or (bool((each[1:] <= each[:-1]).all()) and int(each[0]) <= steps))
    layer = _Layer(n=n, steps=steps, features=features, hidden=hidden, directions=directions)
    pointers = {**own, "weights": weights.fused, "bias": weights.bias, "dh": memory.dh, "dc": memory.dc}
    for key, tensor in {**pointers, **given, **({} if each is None else {"lengths": each})}.items():
        setattr(layer, key, tensor.data_ptr())
    for key, tensor in given.items():
        setattr(layer, f"{key}_time", tensor.stride(0))
        setattr(layer, f"{key}_sample", tensor.stride(1))
    layer.threads = torch.get_num_threads()
    succeed(getattr(loaded_library(), f"{cell}_{name}")(ctypes.byref(layer)))
