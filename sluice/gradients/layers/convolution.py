"""Conv1d, Conv2d, Conv3d and their transposes, with any stride, padding, dilation and groups."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from sluice._base.errors import UnsupportedModuleError
from sluice.gradients import costs
from sluice.gradients.contributions import (
    Contribution,
    Tap,
    not_below_terms,
    squared_norms,
    sum_over_positions,
    weighted,
    working,
    zero_rows,
)
from sluice.gradients.gram import gram, gram_norms
from sluice.gradients.layers.correlation import (
    Geometry,
    grouped_product,
    offsets,
    padded,
    prefers_rows,
    reached_sizes,
    rows_product,
    window_gram,
    window_gram_from_windows,
    window_lengths,
    windows_product,
)
from sluice.gradients.native import grouped, kernels
from sluice.gradients.options import GradientOptions
from sluice.gradients.rules import Call, Rule, register
from sluice.gradients.workspace import Lender

#: Windows are copied for a few samples at a time, so that the copy stays in the processor's cache.
_BLOCK_BYTES = 4 * 2**20

Tensors = Callable[[Tensor], tuple[Tensor, Tensor]]


class CorrelationContribution(Contribution):
    """The weight of a convolution, plain or transposed.

    Args:
        source: from the tap's gradient to ``(image, maps)`` with channels last: ``[n, *sizes, c]``, ``[n, *maps, o]``.
    """

    def __init__(
        self,
        parameter: Tensor,
        tap: Tap,
        source: Tensors,
        *,
        geometry: Geometry,
        strategy: str,
        options: GradientOptions,
        lender: Lender,
    ) -> None:
        super().__init__(parameter, lender=lender)
        self._tap = tap
        self._source = source
        self._geometry = geometry
        self._strategy = strategy
        self._options = options
        self._pair: tuple[Tensor, Tensor] | None = None
        self._gradients: Tensor | None = None

    def _image_and_maps(self) -> tuple[Tensor, Tensor]:
        if self._pair is None:
            image, maps = self._source(self._tap.gradient)
            self._pair = working(image).contiguous(), working(maps).flatten(1, -2)
        return self._pair

    def norms_squared(self, *, keep: bool) -> Tensor:
        image, maps = self._image_and_maps()
        compiled = self._options.compiled and kernels.available(image, maps)
        kernel = self._kernel(keep, compiled)
        if kernel == "explicit":
            squares = self._explicit_norms(image, maps, keep=keep, compiled=compiled)
            return squares if self._gradients is not None else not_below_terms(squares, self.term_lengths())
        windows = window_gram if kernel == "pixel_gram" else window_gram_from_windows
        return gram_norms(
            lambda rows: windows(image[rows].double(), self._geometry), lambda rows: gram(maps[rows]), maps
        )

    def term_lengths(self) -> Tensor:
        return window_lengths(*self._image_and_maps(), self._geometry)

    def _kernel(self, keep: bool, compiled: bool) -> str:
        geometry = self._geometry
        if self._strategy == "auto":
            return costs.kernel_for(geometry, then_sum=keep, compiled=compiled)
        if self._strategy == "gram" and geometry.groups == 1:
            return "pixel_gram" if costs.pixel_gram(geometry) < costs.window_gram(geometry) else "window_gram"
        return "explicit"

    def _explicit_norms(self, image: Tensor, maps: Tensor, *, keep: bool, compiled: bool) -> Tensor:
        n, geometry = image.shape[0], self._geometry
        keep = keep and n * geometry.weight_size * image.element_size() <= self._options.kept_bytes
        outputs, inputs = self._each
        if compiled:
            formed = None
            if keep:
                formed = self.memory((n, inputs, outputs), maps)
                self._gradients = formed.transpose(1, 2)
            return self._compiled_norms(image, maps, into=formed)
        if keep:
            self._gradients = self.memory((n, outputs, inputs), maps)
            self._form(image, maps, self._gradients)
            return squared_norms(self._gradients)
        parts = [squared_norms(self._formed(image[rows], maps[rows])) for rows in self._blocks(image)]
        return torch.cat(parts) if parts else squared_norms(maps)

    def _compiled_norms(self, image: Tensor, maps: Tensor, *, into: Tensor | None) -> Tensor:
        geometry, n = self._geometry, image.shape[0]
        if grouped.suits(geometry):
            return grouped.correlate(image, maps, geometry, into=into)
        windows, places = offsets(geometry)
        # Padding is a copy, made for a few samples at a time as well.
        block = max(1, _BLOCK_BYTES // max(1, image[:1].numel() * 4)) if any(geometry.padding) else max(1, n)
        squares = maps.new_empty(n)
        for start in range(0, n, block):
            rows = slice(start, min(start + block, n))
            part = None if into is None else into[rows]
            squares[rows] = kernels.correlate(
                padded(image[rows], geometry), windows, places, maps[rows], into=part, groups=geometry.groups
            )[0]
        return squares

    @property
    def _each(self) -> tuple[int, int]:
        """Shape in which one gradient is formed."""
        channels = self._geometry.map_channels
        return channels, self._geometry.weight_size // channels

    def _formed(self, image: Tensor, maps: Tensor) -> Tensor:
        out = maps.new_empty(image.shape[0], *self._each)
        self._form(image, maps, out)
        return out

    def _form(self, image: Tensor, maps: Tensor, out: Tensor) -> None:
        product = rows_product if prefers_rows(self._geometry) else windows_product
        if self._geometry.groups > 1:
            product = grouped_product
        for rows in self._blocks(image):
            product(image[rows], maps[rows], self._geometry, out[rows])

    def _blocks(self, image: Tensor) -> list[slice]:
        geometry, n = self._geometry, image.shape[0]
        window = geometry.kernel[-1] if prefers_rows(geometry) else geometry.kernel_size
        copied = geometry.positions * geometry.image_channels * window * image.element_size()
        block = max(1, _BLOCK_BYTES // max(1, copied))
        return [slice(i, min(i + block, n)) for i in range(0, n, block)]

    def per_sample(self, samples: slice) -> Tensor:
        image, maps = self._image_and_maps()
        return self._shaped(self._formed(image[samples], maps[samples]))

    def _shaped(self, gradients: Tensor) -> Tensor:
        """From (..., o, *kernel, c) to the parameter's order (..., o, c, *kernel)."""
        geometry = self._geometry
        leading = gradients.shape[:-2]
        each = geometry.image_channels // geometry.groups
        split = gradients.reshape(*leading, geometry.map_channels, *geometry.kernel, each)
        return split.movedim(-1, len(leading) + 1)

    def weighted_sum(self, weights: Tensor) -> Tensor:
        if self._gradients is not None:
            return self._shaped(weighted(self._gradients, weights)).reshape(self.shape)
        image, maps = self._image_and_maps()
        geometry = self._geometry
        scaled = maps * weights.to(maps.dtype).view(-1, 1, 1)
        n, rank = image.shape[0], len(geometry.kernel)
        grads = scaled.view(n, *geometry.maps, -1).movedim(-1, 1)
        padding = list(geometry.padding)
        if not self._is_plain():
            # Output padding of a transposed convolution may leave pixels that no window reaches.
            image, padding = padded(image, geometry), [0] * rank
            image = image[(slice(None), *(slice(size) for size in reached_sizes(geometry)))]
        weight = self.parameter.detach().to(image.dtype)
        summed: Tensor
        _, summed, _ = torch.ops.aten.convolution_backward(
            grads,
            image.movedim(-1, 1),
            weight,
            None,
            list(geometry.stride),
            padding,
            list(geometry.dilation),
            False,
            [0] * rank,
            geometry.groups,
            (False, True, False),
        )
        return summed

    def _is_plain(self) -> bool:
        """Whether a convolution of the image has exactly the maps' sizes."""
        g = self._geometry
        sizes = zip(g.image, g.padding, reached_sizes(g), g.stride, strict=True)
        return all(0 <= size + 2 * padding - used < stride for size, padding, used, stride in sizes)

    def drop(self, samples: Tensor) -> None:
        image, maps = self._image_and_maps()
        self._pair = zero_rows(image, samples), zero_rows(maps, samples)
        if self._gradients is not None:
            self._gradients = zero_rows(self._gradients, samples)


class _ConvolutionRule(Rule):
    """What plain and transposed convolutions share."""

    def record(self, module: Any, call: Call) -> Tensor:
        if call.batch_axis != 0:
            raise UnsupportedModuleError(
                f"Module '{call.name}' got the samples on axis {call.batch_axis}, where a convolution has channels or "
                "pixels, so it mixes samples. Put the samples on the first axis."
            )
        z, tap = call.tap(call.output)
        if call.trainable(module.weight):
            source, geometry = self.correlation(module, call.save(call.argument(0, "input")), z)
            call.contribute(
                CorrelationContribution(
                    module.weight,
                    tap,
                    source,
                    geometry=geometry,
                    strategy=call.strategy,
                    options=call.options,
                    lender=call.lender,
                )
            )
        if call.trainable(module.bias):
            call.contribute(sum_over_positions(module.bias, tap, lambda gradient: gradient.flatten(2).transpose(1, 2)))
        return z

    @abstractmethod
    def correlation(self, module: Any, a: Tensor, z: Tensor) -> tuple[Tensors, Geometry]:
        """Which of input and output's derivative is the image and which the maps."""


class ConvolutionRule(_ConvolutionRule):
    def correlation(self, module: Any, a: Tensor, z: Tensor) -> tuple[Tensors, Geometry]:
        amounts = list(module._reversed_padding_repeated_twice)
        padding = tuple(reversed(amounts[::2]))
        if module.padding_mode != "zeros" or amounts[::2] != amounts[1::2]:
            mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
            a = functional.pad(a, amounts, mode=mode)
            padding = (0,) * len(padding)
        return lambda b: (a.movedim(1, -1), b.movedim(1, -1)), _geometry(module, padding, image=a, maps=z)


class TransposedConvolutionRule(_ConvolutionRule):
    def correlation(self, module: Any, a: Tensor, z: Tensor) -> tuple[Tensors, Geometry]:
        geometry = _geometry(module, tuple(module.padding), image=z, maps=a)
        return lambda b: (b.movedim(1, -1), a.movedim(1, -1)), geometry


def _geometry(module: Any, padding: tuple[int, ...], *, image: Tensor, maps: Tensor) -> Geometry:
    return Geometry(
        kernel=tuple(module.kernel_size),
        stride=tuple(module.stride),
        dilation=tuple(module.dilation),
        padding=padding,
        groups=module.groups,
        image=tuple(image.shape[2:]),
        maps=tuple(maps.shape[2:]),
        image_channels=image.shape[1],
        map_channels=maps.shape[1],
    )


for _plain in (nn.Conv1d, nn.Conv2d, nn.Conv3d):
    register(_plain, ConvolutionRule())
for _transposed in (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d):
    register(_transposed, TransposedConvolutionRule())
