"""Linear layers with many inputs and few outputs by compiled kernels. See `kernels`."""

from __future__ import annotations

import torch
from torch import Tensor

from sluice.gradients.native.kernels import available, require
from sluice.gradients.native.loading import loaded_library


def forward(a: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """``a @ weight.T + bias``, and the squared norm of each row of ``a`` in float64. The last axis of ``a`` is contiguous."""
    n, inputs = a.shape
    outputs = weight.shape[0]
    require(available(a, weight) and weight.shape == (outputs, inputs) and weight.is_contiguous())
    require(_has_rows(a))
    require(bias is None or (available(bias) and bias.shape == (outputs,) and bias.is_contiguous()))
    output, squares = a.new_empty(n, outputs), a.new_empty(n, dtype=torch.float64)
    loaded_library().narrow_forward(
        *(n, inputs, outputs, a.data_ptr(), a.stride(0), weight.data_ptr(), 0 if bias is None else bias.data_ptr()),
        *(output.data_ptr(), squares.data_ptr(), torch.get_num_threads()),
    )
    return output, squares


def weight_gradient(a: Tensor, b: Tensor, *, block: int) -> Tensor:
    """``b.T @ a``, ``[outputs, inputs]``, as a sum of sums over ``block`` rows. The last axis of ``a`` is contiguous."""
    b = b.contiguous()
    n, inputs = a.shape
    require(available(a, b) and b.dim() == 2 and b.shape[0] == n)
    require(_has_rows(a) and block > 0)
    into = a.new_empty(b.shape[1], inputs)
    loaded_library().narrow_sum(
        *(n, inputs, b.shape[1], block, a.data_ptr(), a.stride(0), b.data_ptr(), into.data_ptr()),
        torch.get_num_threads(),
    )
    return into


def _has_rows(a: Tensor) -> bool:
    return a.stride(1) == 1 or a.shape[1] == 1
