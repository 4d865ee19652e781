"""LayerNorm and GroupNorm whose backward pass gives the derivatives of scale and shift for each sample."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sluice.gradients.native.kernels import available, require, succeed
from sluice.gradients.native.loading import loaded_library

_integer, _pointer = ctypes.c_int64, ctypes.c_void_p


class _Norm(ctypes.Structure):
    """The struct of the same name in normalisation.c."""

    _fields_ = (
        *((name, _integer) for name in ("n", "positions", "channels", "groups")),
        *((name, _pointer) for name in ("x", "dy", "scale", "mean", "rstd", "dx", "dscale", "dshift")),
        ("threads", ctypes.c_int),
    )


class _RowsNorm(torch.autograd.Function):
    """Normalises over the last axes of ``[n, ..., *scale.shape[1:]]``; scale and shift are each sample's own copy."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, shift: Tensor, eps: float) -> Tensor:
        x = x.contiguous()
        y, mean, rstd = torch.native_layer_norm(x, scale.shape[1:], scale[0], shift[0], eps)
        ctx.save_for_backward(x, mean, rstd, scale)
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor, Tensor, None]:
        x, _, _, scale = ctx.saved_tensors
        width = math.prod(scale.shape[1:])
        positions = math.prod(x.shape[1:]) // width
        dx, dscale, dshift = _backward("rows_norm_backward", ctx, gradients[0].contiguous(), positions, width)
        return dx, dscale.view(scale.shape), dshift.view(scale.shape), None


class _GroupNorm(torch.autograd.Function):
    """Normalises groups of channels of ``[n, channels, ...]``; scale and shift are each sample's own copy."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, shift: Tensor, groups: int, eps: float) -> Tensor:
        layout = _layout(x)
        x = x.contiguous(memory_format=layout)
        n, channels = x.shape[:2]
        positions = math.prod(x.shape[2:])
        y, mean, rstd = torch.native_group_norm(x, scale[0], shift[0], n, channels, positions, groups, eps)
        ctx.save_for_backward(x, mean, rstd, scale)
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor, Tensor, None, None]:
        x = ctx.saved_tensors[0]
        layout = _layout(x)
        name = "group_norm_backward" + ("_channels_last" if layout is torch.channels_last else "")
        dy = gradients[0].contiguous(memory_format=layout)
        return *_backward(name, ctx, dy, math.prod(x.shape[2:]), x.shape[1]), None, None


def _layout(x: Tensor) -> torch.memory_format:
    last = x.dim() == 4 and not x.is_contiguous() and x.is_contiguous(memory_format=torch.channels_last)
    return torch.channels_last if last else torch.contiguous_format


def _backward(name: str, ctx: Any, dy: Tensor, positions: int, channels: int) -> tuple[Tensor | None, Tensor, Tensor]:
    x, mean, rstd, scale = ctx.saved_tensors
    require(dy.shape == x.shape)
    # Both are dense in one layout; strides along axes of length one say nothing and may differ.
    dy = dy.as_strided(x.shape, x.stride())
    n, groups = x.shape[0], mean.shape[1] if name != "rows_norm_backward" else 1
    scale = scale[0].flatten().contiguous()
    dx = torch.empty_like(x) if ctx.needs_input_grad[0] else None
    dscale, dshift = x.new_empty(n, channels), x.new_empty(n, channels)
    mean, rstd = mean.contiguous(), rstd.contiguous()
    statistics = n * (positions if name == "rows_norm_backward" else groups)
    require(available(x, dy, scale, mean, rstd))
    require(x.numel() == n * positions * channels and scale.shape == (channels,) and channels % groups == 0)
    require(mean.numel() == rstd.numel() == statistics)
    tensors = {"x": x, "dy": dy, "scale": scale, "mean": mean, "rstd": rstd, "dscale": dscale, "dshift": dshift}
    call = _Norm(
        n=n,
        positions=positions,
        channels=channels,
        groups=groups,
        **{key: tensor.data_ptr() for key, tensor in tensors.items()},
        dx=None if dx is None else dx.data_ptr(),
        threads=torch.get_num_threads(),
    )
    succeed(getattr(loaded_library(), name)(ctypes.byref(call)))
    return dx, dscale, dshift


rows_norm: Callable[[Tensor, Tensor, Tensor, float], Tensor] = _RowsNorm.apply
group_norm: Callable[[Tensor, Tensor, Tensor, int, float], Tensor] = _GroupNorm.apply
