"""Convolutions in small groups of channels: per-sample gradients of their weights by a compiled kernel."""

from __future__ import annotations

import ctypes
import math

import torch
from torch import Tensor

from sluice.gradients.layers.correlation import Geometry, padded_sizes, pixel_offsets
from sluice.gradients.native.kernels import available, require, succeed
from sluice.gradients.native.loading import loaded_library

_integer, _pointer = ctypes.c_int64, ctypes.c_void_p
#: Groups with fewer maps than this leave most of a tile of `kernels.correlate` empty.
_FEW_MAPS = 8


class _Grouped(ctypes.Structure):
    """The struct of the same name in grouped.c."""

    _fields_ = (
        *((name, _integer) for name in ("n", "pixels", "padded_pixels", "positions", "kernel")),
        *((name, _integer) for name in ("groups", "image_channels", "map_channels")),
        *((name, _pointer) for name in ("inside", "windows", "places")),
        ("row_length", _integer),
        *((name, _pointer) for name in ("image", "maps")),
        *((name, _integer) for name in ("maps_step", "position_step", "channel_step")),
        *((name, _pointer) for name in ("gradients", "squares")),
        ("threads", ctypes.c_int),
    )


def suits(geometry: Geometry) -> bool:
    """Whether this kernel is the one for such groups: several maps, of different groups, are worked on together."""
    return geometry.groups > 1 and geometry.map_channels // geometry.groups < _FEW_MAPS


def correlate(image: Tensor, maps: Tensor, geometry: Geometry, *, into: Tensor | None = None) -> Tensor:
    """Squared norms of the gradients of a weight ``[map channels, image channels / groups, *kernel]``, ``[n]``.

    Args:
        image: ``[n, *sizes, image channels]``, without padding.
        maps: ``[n, positions, map channels]``, any strides.
        into: ``[n, kernel * image channels / groups, map channels]``, where the gradients themselves are wanted.
    """
    n, positions, outputs = maps.shape
    inside, windows, places = pixel_offsets(geometry)
    padded = math.prod(padded_sizes(geometry))
    require(available(image, maps) and image.is_contiguous())
    require(image.shape == (n, *geometry.image, geometry.image_channels) and outputs == geometry.map_channels)
    require(positions == geometry.positions and inside.shape == (geometry.pixels,))
    require(all(channels % geometry.groups == 0 for channels in (outputs, geometry.image_channels)))
    each = geometry.weight_size // outputs
    if into is not None:
        require(into.shape == (n, each, outputs) and into.dtype is torch.float32 and into.is_contiguous())
    squares = torch.zeros(n)
    if n == 0 or positions == 0:
        if into is not None:
            into.zero_()
        return squares
    require(int(windows[-1] + places[-1]) < padded)
    steps = dict(zip(("maps_step", "position_step", "channel_step"), maps.stride(), strict=True))
    tensors = {"inside": inside, "windows": windows, "places": places, "image": image, "maps": maps, "squares": squares}
    call = _Grouped(
        **{"n": n, "pixels": geometry.pixels, "padded_pixels": padded, "positions": positions, **steps},
        kernel=geometry.kernel_size,
        groups=geometry.groups,
        row_length=geometry.maps[-1],
        image_channels=geometry.image_channels,
        map_channels=outputs,
        threads=torch.get_num_threads(),
        **{name: tensor.data_ptr() for name, tensor in tensors.items()},
        gradients=None if into is None else into.data_ptr(),
    )
    succeed(loaded_library().correlate_groups(ctypes.byref(call)))
    return squares
