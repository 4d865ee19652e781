"""Linear layers with many inputs and few outputs by compiled kernels. See `kernels`."""

from __future__ import annotations

import torch
from torch import Tensor

from sluice.gradients.native.kernels import available, require
from sluice.gradients.native.loading import library, loaded_library


def reads(a: Tensor) -> bool:
    """Whether the kernels read inputs of this type: float32, or float16 where the compiler knows it."""
    stored_in_half = a.dtype is torch.float16 and a.device.type == "cpu" and library() is not None
    return bool(loaded_library().reads_half()) if stored_in_half else available(a)


def forward(a: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """``a @ weight.T + bias``, and the squared norm of each row of ``a`` in float64. The last axis of ``a`` is contiguous.

    All is computed in float32, whatever the type of ``a``.
    """
    n, inputs = a.shape
    outputs = weight.shape[0]
    require(reads(a) and available(weight) and weight.shape == (outputs, inputs) and weight.is_contiguous())
    require(_has_rows(a))
    require(bias is None or (available(bias) and bias.shape == (outputs,) and bias.is_contiguous()))
    output, squares = weight.new_empty(n, outputs), weight.new_empty(n, dtype=torch.float64)
    loaded_library().narrow_forward(
        *(n, inputs, outputs, a.data_ptr(), a.element_size(), a.stride(0), weight.data_ptr()),
        *(0 if bias is None else bias.data_ptr(), output.data_ptr(), squares.data_ptr(), torch.get_num_threads()),
    )
    return output, squares


def weight_gradient(a: Tensor, b: Tensor, *, block: int) -> Tensor:
    """``b.T @ a``, ``[outputs, inputs]``, as a sum of sums over ``block`` rows. The last axis of ``a`` is contiguous."""
    b = b.contiguous()
    n, inputs = a.shape
    require(reads(a) and available(b) and b.dim() == 2 and b.shape[0] == n)
    require(_has_rows(a) and block > 0)
    into = b.new_empty(b.shape[1], inputs)
    loaded_library().narrow_sum(
        *(n, inputs, b.shape[1], block, a.data_ptr(), a.element_size(), a.stride(0), b.data_ptr(), into.data_ptr()),
        torch.get_num_threads(),
    )
    return into


def _has_rows(a: Tensor) -> bool:
    return a.stride(1) == 1 or a.shape[1] == 1
