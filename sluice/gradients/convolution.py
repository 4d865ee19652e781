"""Conv1d, Conv2d, Conv3d and their transposes, with any stride, padding, dilation and groups."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from sluice.gradients import costs
from sluice.gradients.contributions import Contribution, Tap, squared_norms, sum_over_positions, working, zero_rows
from sluice.gradients.correlation import (
    Geometry,
    rows_product,
    window_gram,
    window_gram_from_windows,
    windows_product,
)
from sluice.gradients.gram import gram_norms
from sluice.gradients.rules import Call, Rule, register

#: Windows are copied for a few samples at a time, so that the copy stays in the processor's cache.
_BLOCK_BYTES = 2 * 2**20

Tensors = Callable[[Tensor], tuple[Tensor, Tensor]]


class CorrelationContribution(Contribution):
    """The weight of a convolution, plain or transposed.

    Args:
        source: from the tap's gradient to ``(image, maps)`` with channels last: ``[n, *sizes, c]`` without padding,
            and ``[n, *maps, o]``.
        pad: adds the padding to an image.
        geometry: sizes, the image's with padding.
    """

    def __init__(
        self,
        parameter: Tensor,
        tap: Tap,
        source: Tensors,
        *,
        pad: Callable[[Tensor], Tensor],
        geometry: Geometry,
        strategy: str,
        kept_bytes: int,
    ) -> None:
        super().__init__(parameter)
        self._tap = tap
        self._source = source
        self._pad = pad
        self._geometry = geometry
        self._strategy = strategy
        self._kept_bytes = kept_bytes
        self._pair: tuple[Tensor, Tensor] | None = None
        self._gradients: Tensor | None = None

    def _image_and_maps(self) -> tuple[Tensor, Tensor]:
        if self._pair is None:
            image, maps = self._source(self._tap.gradient)
            self._pair = self._pad(working(image)).contiguous(), working(maps).flatten(1, -2)
        return self._pair

    def norms_squared(self, *, keep: bool) -> Tensor:
        image, maps = self._image_and_maps()
        kernel = self._kernel(keep)
        if kernel == "explicit":
            return self._explicit_norms(image, maps, keep=keep)
        gram = window_gram if kernel == "pixel_gram" else window_gram_from_windows
        return gram_norms(lambda rows: gram(image[rows], self._geometry), maps, self.per_sample)

    def _kernel(self, keep: bool) -> str:
        geometry = self._geometry
        if self._strategy == "auto":
            return costs.kernel_for(geometry, then_sum=keep)
        if self._strategy == "gram" and geometry.groups == 1:
            return "pixel_gram" if costs.pixel_gram(geometry) < costs.window_gram(geometry) else "window_gram"
        return "explicit"

    def _explicit_norms(self, image: Tensor, maps: Tensor, *, keep: bool) -> Tensor:
        n = image.shape[0]
        bytes_each = self._geometry.weight_size * image.element_size()
        if keep and n * bytes_each <= self._kept_bytes:
            self._gradients = maps.new_empty(
                n, self._geometry.map_channels, self._geometry.weight_size // self._geometry.map_channels
            )
        norms = maps.new_empty(n)
        for rows in self._blocks(n, image.element_size()):
            gradients = self._product(image[rows], maps[rows])
            norms[rows] = squared_norms(gradients)
            if self._gradients is not None:
                self._gradients[rows] = gradients
        return norms

    def _product(self, image: Tensor, maps: Tensor) -> Tensor:
        geometry = self._geometry
        by_rows = len(geometry.kernel) == 2 and geometry.stride[0] == 1 and geometry.groups == 1
        return (rows_product if by_rows else windows_product)(image, maps, geometry)

    def _blocks(self, n: int, element_size: int) -> list[slice]:
        geometry = self._geometry
        window = geometry.positions * geometry.image_channels * geometry.kernel_size
        block = max(1, _BLOCK_BYTES // max(1, window * element_size))
        return [slice(i, min(i + block, n)) for i in range(0, n, block)]

    def per_sample(self, samples: slice) -> Tensor:
        image, maps = self._image_and_maps()
        image, maps = image[samples], maps[samples]
        parts = [self._product(image[rows], maps[rows]) for rows in self._blocks(image.shape[0], image.element_size())]
        return self._shaped(torch.cat(parts)) if parts else maps.new_zeros(0, *self.shape)

    def _shaped(self, gradients: Tensor) -> Tensor:
        """From (..., o, *kernel, c) to the parameter's order (..., o, c, *kernel)."""
        geometry = self._geometry
        leading = gradients.shape[:-2]
        each = geometry.image_channels // geometry.groups
        split = gradients.reshape(*leading, geometry.map_channels, *geometry.kernel, each)
        return split.movedim(-1, len(leading) + 1)

    def weighted_sum(self, weights: Tensor) -> Tensor:
        if self._gradients is not None:
            flat = self._gradients.flatten(1)
            total = weights.to(flat.dtype) @ flat
            return self._shaped(total.view(self._gradients.shape[1:])).reshape(self.shape)
        image, maps = self._image_and_maps()
        geometry = self._geometry
        scaled = maps * weights.to(maps.dtype).view(-1, 1, 1)
        n, rank = image.shape[0], len(geometry.kernel)
        grads = scaled.view(n, *geometry.maps, -1).movedim(-1, 1)
        # Output padding of a transposed convolution leaves rows that no window reaches.
        used = [
            (t - 1) * s + (k - 1) * d + 1
            for t, s, k, d in zip(geometry.maps, geometry.stride, geometry.kernel, geometry.dilation, strict=True)
        ]
        seen = image[(slice(None), *(slice(u) for u in used))].movedim(-1, 1)
        weight = self.parameter.detach().to(seen.dtype)
        zeros = [0] * rank
        return torch.ops.aten.convolution_backward(
            grads,
            seen,
            weight,
            None,
            list(geometry.stride),
            zeros,
            list(geometry.dilation),
            False,
            zeros,
            geometry.groups,
            (False, True, False),
        )[1]

    def drop(self, samples: Tensor) -> None:
        image, maps = self._image_and_maps()
        self._pair = zero_rows(image, samples), zero_rows(maps, samples)
        if self._gradients is not None:
            self._gradients = zero_rows(self._gradients, samples)


class ConvolutionRule(Rule):
    def record(self, module: Any, call: Call) -> Tensor:
        rank = len(module.kernel_size)
        z, tap = call.tap(call.output)
        if call.trainable(module.weight):
            a = call.save(call.argument(0, "input"))
            mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
            amounts = module._reversed_padding_repeated_twice

            def pad(image: Tensor) -> Tensor:
                if not any(amounts):
                    return image
                if mode == "constant":
                    return functional.pad(image, (0, 0, *amounts))
                return functional.pad(image.movedim(-1, 1), amounts, mode=mode).movedim(1, -1)

            sizes = tuple(
                size + amounts[2 * (rank - 1 - i)] + amounts[2 * (rank - 1 - i) + 1]
                for i, size in enumerate(a.shape[2:])
            )
            call.contribute(
                CorrelationContribution(
                    module.weight,
                    tap,
                    lambda gradient: (a.movedim(1, -1), gradient.movedim(1, -1)),
                    pad=pad,
                    geometry=_geometry(module, image=sizes, maps=tuple(z.shape[2:]), channels=(a.shape[1], z.shape[1])),
                    strategy=call.strategy,
                    kept_bytes=call.options.kept_bytes,
                )
            )
        if call.trainable(module.bias):
            call.contribute(sum_over_positions(module.bias, tap, lambda gradient: gradient.flatten(2).transpose(1, 2)))
        return z


class TransposedConvolutionRule(Rule):
    def record(self, module: Any, call: Call) -> Tensor:
        z, tap = call.tap(call.output)
        if call.trainable(module.weight):
            a = call.save(call.argument(0, "input"))
            amounts = [p for padding in reversed(module.padding) for p in (padding, padding)]
            sizes = tuple(size + 2 * padding for size, padding in zip(z.shape[2:], module.padding, strict=True))
            call.contribute(
                CorrelationContribution(
                    module.weight,
                    tap,
                    lambda gradient: (gradient.movedim(1, -1), a.movedim(1, -1)),
                    pad=lambda image: functional.pad(image, (0, 0, *amounts)),
                    geometry=_geometry(module, image=sizes, maps=tuple(a.shape[2:]), channels=(z.shape[1], a.shape[1])),
                    strategy=call.strategy,
                    kept_bytes=call.options.kept_bytes,
                )
            )
        if call.trainable(module.bias):
            call.contribute(sum_over_positions(module.bias, tap, lambda gradient: gradient.flatten(2).transpose(1, 2)))
        return z


def _geometry(module: Any, *, image: tuple[int, ...], maps: tuple[int, ...], channels: tuple[int, int]) -> Geometry:
    return Geometry(
        kernel=tuple(module.kernel_size),
        stride=tuple(module.stride),
        dilation=tuple(module.dilation),
        groups=module.groups,
        image=image,
        maps=maps,
        image_channels=channels[0],
        map_channels=channels[1],
    )


for _plain in (nn.Conv1d, nn.Conv2d, nn.Conv3d):
    register(_plain, ConvolutionRule())
for _transposed in (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d):
    register(_transposed, TransposedConvolutionRule())
