"""Kernels for convolution weights: per-sample correlations between an image and maps.

The per-sample gradient of a convolution's weight is ``W[o, c, k] = sum_t maps[o, t] * image[c, stride*t + dilation*k]``
with the padded input as the image and the output's derivative as the maps; a transposed convolution swaps the two.
Images come as ``[n, *sizes, channels]`` (channels last), maps as ``[n, positions, channels]``, in any strides.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional

from sluice.gradients.contributions import row_lengths
from sluice.gradients.native.kernels import Offsets


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """Shapes of a correlation: sizes of the image without its padding, and of the maps.

    ``padding`` zeros are meant on both sides of each axis; `padded` adds them where a kernel needs them stored.
    """

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    padding: tuple[int, ...]
    groups: int
    image: tuple[int, ...]
    maps: tuple[int, ...]
    image_channels: int
    map_channels: int

    @property
    def positions(self) -> int:
        return math.prod(self.maps)

    @property
    def pixels(self) -> int:
        return math.prod(self.image)

    @property
    def kernel_size(self) -> int:
        return math.prod(self.kernel)

    @property
    def weight_size(self) -> int:
        return self.map_channels * self.image_channels * self.kernel_size // self.groups


def padded_sizes(geometry: Geometry) -> list[int]:
    return [size + 2 * padding for size, padding in zip(geometry.image, geometry.padding, strict=True)]


def reached_sizes(geometry: Geometry) -> list[int]:
    """Sizes of the part of the padded image that windows reach."""
    axes = zip(geometry.maps, geometry.stride, geometry.kernel, geometry.dilation, strict=True)
    return [(positions - 1) * stride + (kernel - 1) * dilation + 1 for positions, stride, kernel, dilation in axes]


def padded(image: Tensor, geometry: Geometry) -> Tensor:
    if not any(geometry.padding):
        return image
    amounts = [p for padding in reversed(geometry.padding) for p in (padding, padding)]
    return functional.pad(image, (0, 0, *amounts))


def unfolded(image: Tensor, geometry: Geometry, axes: int) -> Tensor:
    """Windows of a padded image along its last ``axes`` spatial axes: ``[n, *rest, *maps, *kernel, channels]``, a view."""
    rank = len(geometry.kernel)
    first = rank - axes
    strides = image.stride()
    spatial = strides[1 + first : 1 + rank]
    steps = [s * step for s, step in zip(spatial, geometry.stride[first:], strict=True)]
    offsets = [s * d for s, d in zip(spatial, geometry.dilation[first:], strict=True)]
    size = (*image.shape[: 1 + first], *geometry.maps[first:], *geometry.kernel[first:], image.shape[-1])
    return image.as_strided(size, (*strides[: 1 + first], *steps, *offsets, strides[-1]), image.storage_offset())


@lru_cache(maxsize=256)
def pixel_offsets(geometry: Geometry) -> tuple[Tensor, Tensor, Tensor]:
    """Where pixels of a padded image are, counted from its first: those inside, those of the first window, and all windows."""
    inside, windows, places = (torch.zeros(1, dtype=torch.int64) for _ in range(3))
    sizes = padded_sizes(geometry)
    for axis, size in enumerate(sizes):
        step, padding = math.prod(sizes[axis + 1 :]), geometry.padding[axis]
        shifts = torch.arange(geometry.kernel[axis]) * (geometry.dilation[axis] * step)
        starts = torch.arange(geometry.maps[axis]) * (geometry.stride[axis] * step)
        pixels = torch.arange(padding, size - padding) * step
        inside, windows, places = (
            (old.unsqueeze(1) + new).flatten() for old, new in ((inside, pixels), (windows, shifts), (places, starts))
        )
    return inside, windows, places


@lru_cache(maxsize=256)
def offsets(geometry: Geometry) -> tuple[Offsets, Offsets]:
    """Where entries of a padded image are: (*kernel, c) of the first group of the first window, and all windows."""
    _, windows, places = pixel_offsets(geometry)
    channels = geometry.image_channels
    entries = (windows.unsqueeze(1) * channels + torch.arange(channels // geometry.groups)).flatten()
    return Offsets.of(entries), Offsets.of(places * channels)


def prefers_rows(geometry: Geometry) -> bool:
    """Whether `rows_product` applies and has columns enough for its products."""
    applies = len(geometry.kernel) == 2 and geometry.stride[0] == 1 and geometry.groups == 1
    return applies and geometry.kernel[-1] * geometry.image_channels >= 32


def windows_product(image: Tensor, maps: Tensor, geometry: Geometry, out: Tensor) -> None:
    """Per-sample gradients, into ``out``: ``[n, map channels, kernel * image channels]``, in order (*kernel, c); one group."""
    windows = unfolded(padded(image, geometry), geometry, len(geometry.kernel))
    torch.bmm(maps.transpose(1, 2), windows.reshape(image.shape[0], geometry.positions, -1), out=out)


def grouped_product(image: Tensor, maps: Tensor, geometry: Geometry, out: Tensor) -> None:
    """The same for several groups: the ordinary weight gradient, with every sample's channels as groups of their own."""
    n, rank = image.shape[0], len(geometry.kernel)
    # Output padding of a transposed convolution may leave pixels that no window reaches.
    image = padded(image, geometry)[(slice(None), *(slice(size) for size in reached_sizes(geometry)))]
    each = geometry.image_channels // geometry.groups
    channels_first = image.movedim(-1, 1).reshape(1, -1, *image.shape[1:-1])
    grads = maps.transpose(1, 2).reshape(1, -1, *geometry.maps)
    weight = image.new_empty(grads.shape[1], each, *geometry.kernel)
    stride, dilation, none = list(geometry.stride), list(geometry.dilation), [0] * rank
    _, formed, _ = torch.ops.aten.convolution_backward(
        *(grads, channels_first, weight, None, stride, none, dilation, False, none, n * geometry.groups),
        (False, True, False),
    )
    out.view(n, geometry.map_channels, *geometry.kernel, each).copy_(
        formed.view(n, -1, *weight.shape[1:]).movedim(2, -1)
    )


def rows_product(image: Tensor, maps: Tensor, geometry: Geometry, out: Tensor) -> None:
    """The same for two spatial axes, vertical stride 1 and one group: windows in width only, a product per kernel row.

    The rows that one kernel row sees are a contiguous slice of the buffer, so the copy is ``kernel height`` times
    smaller than that of all windows.
    """
    n = image.shape[0]
    height, width = geometry.maps
    rows = padded(image, geometry)
    columns = unfolded(rows, geometry, 1).reshape(n, rows.shape[1], width, -1)
    transposed = maps.transpose(1, 2)
    by_row = out.view(n, geometry.map_channels, geometry.kernel[0], -1)
    for i in range(geometry.kernel[0]):
        top = i * geometry.dilation[0]
        by_row[:, :, i] = torch.bmm(transposed, columns[:, top : top + height].flatten(1, 2))


def window_lengths(image: Tensor, maps: Tensor, geometry: Geometry) -> Tensor:
    """The lengths of the terms of which each gradient is the sum, one for each position, added up, ``[n]``, in float64."""
    rank, of_groups = len(geometry.kernel), (geometry.groups, -1)
    pixels, derivatives = (row_lengths(each.unflatten(-1, of_groups)).square_() for each in (image, maps))
    windows = unfolded(padded(pixels, geometry), geometry, rank).sum(tuple(range(rank + 1, 2 * rank + 1)))
    return windows.flatten(1, rank).mul_(derivatives).sum(2).sqrt_().sum(1)


def window_gram(image: Tensor, geometry: Geometry) -> Tensor:
    """Inner products of all pairs of windows, ``[n, positions, positions]``, from those of all pairs of pixels.

    Sums the pixels' Gram matrix over kernel offsets, one axis of the image after the other. Shifts are slices along
    the axes of the image: an offset into the flattened matrix would wrap around rows.
    """
    n = image.shape[0]
    pixels = image.reshape(n, -1, image.shape[-1])
    gram = torch.bmm(pixels, pixels.transpose(1, 2)).view(n, *geometry.image, *geometry.image)
    rank = len(geometry.kernel)
    for axis in range(rank):
        shape = list(gram.shape)
        shape[1 + axis] = shape[1 + rank + axis] = geometry.maps[axis]
        total = gram.new_zeros(shape)
        for source, target in _shifts(geometry, axis):
            taken, added = [slice(None)] * gram.dim(), [slice(None)] * gram.dim()
            taken[1 + axis] = taken[1 + rank + axis] = source
            added[1 + axis] = added[1 + rank + axis] = target
            total[tuple(added)] += gram[tuple(taken)]
        gram = total
    return gram.view(n, geometry.positions, geometry.positions)


def _shifts(geometry: Geometry, axis: int) -> list[tuple[slice, slice]]:
    """For each kernel offset on one axis: which pixels it sees, and at which positions; padding is left out."""
    stride, dilation, padding = geometry.stride[axis], geometry.dilation[axis], geometry.padding[axis]
    shifts = []
    for k in range(geometry.kernel[axis]):
        start = k * dilation - padding
        first = max(0, -(start // stride))
        last = min(geometry.maps[axis] - 1, (geometry.image[axis] - 1 - start) // stride)
        if last >= first:
            pixels = slice(first * stride + start, last * stride + start + 1, stride)
            shifts.append((pixels, slice(first, last + 1)))
    return shifts


def window_gram_from_windows(image: Tensor, geometry: Geometry) -> Tensor:
    """The same Gram matrix from the windows themselves: cheaper where there are few, for instance at large strides."""
    windows = unfolded(padded(image, geometry), geometry, len(geometry.kernel))
    columns = windows.reshape(image.shape[0], geometry.positions, -1)
    return torch.bmm(columns, columns.transpose(1, 2))
