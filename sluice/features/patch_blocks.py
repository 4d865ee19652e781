"""Blocks of patches: which patches of an image are looked at, at which scale, and how they are grouped into cells."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional

from sluice.features.base import ImageShape

#: Images this large are halved first, so that a patch covers about the same part of an image of any size.
_LARGE = 48


@dataclass(frozen=True, kw_only=True)
class PatchBlock:
    """Square patches of one scale, and the size of their dictionary.

    Attributes:
        patch: numbers along a side of a patch.
        pairs: atoms of the dictionary; each comes with its mirror image.
        coordinates: numbers that a whitened patch is described by, at most.
        components: principal components that the responses in each cell are reduced to.
        weight: how much the block counts beside the others.
        grid: cells along a side, over which responses are averaged.
        spacing: distance of a patch's numbers in pixels. The image is averaged over as many pixels first.
        stride: distance of neighbouring patches.
        padding: pixels by which the image is continued, mirrored, on each side.
        side: the image is reduced to this height and width first.
        threshold: what a response must exceed to count.
        norm_floor: what is added to the mean square of whitened coordinates before patches are scaled to one length.
        contrast: whether a patch loses its mean and contrast. Otherwise colours and brightness are kept.
    """

    name: str
    patch: int
    pairs: int
    coordinates: int
    components: int
    weight: float = 1.0
    grid: int = 3
    spacing: int = 1
    stride: int = 1
    padding: int = 0
    side: int | None = None
    threshold: float = 0.25
    norm_floor: float = 0.1
    contrast: bool = True

    @property
    def cells(self) -> int:
        return self.grid * self.grid

    @property
    def responses(self) -> int:
        """Of one image: two signs for each atom and cell."""
        return self.cells * 2 * self.pairs

    def prepare(self, images: Tensor) -> Tensor:
        """The images that patches are read from, ``(n, channels, height, width)``."""
        height, width = images.shape[-2:]
        if min(height, width) >= _LARGE:
            images = functional.adaptive_avg_pool2d(images, ((height + 1) // 2, (width + 1) // 2))
        if self.side is not None:
            images = functional.adaptive_avg_pool2d(images, self.side)
        if self.spacing > 1:
            images = functional.avg_pool2d(images, self.spacing, stride=1)
        if self.padding:
            images = functional.pad(images, (self.padding,) * 4, mode="reflect")
        return images

    def layout(self, shape: ImageShape) -> Layout:
        channels, height, width = self.prepare(torch.zeros(1, *shape)).shape[1:]
        return Layout(block=self, channels=channels, height=height, width=width)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Where the patches of a block stand in a prepared image.

    Places are positions in the flattened image. Everything is symmetric: mirroring an image moves the patches of a cell
    to those of the mirrored cell.
    """

    block: PatchBlock
    channels: int
    height: int
    width: int

    @cached_property
    def places(self) -> Tensor:
        """Where the numbers of a patch stand, from its first: channel by channel, row by row."""
        steps = torch.arange(self.block.patch) * self.block.spacing
        planes = torch.arange(self.channels) * (self.height * self.width)
        return (planes[:, None, None] + steps[:, None] * self.width + steps).flatten()

    @cached_property
    def mirrored(self) -> Tensor:
        """Which number of a patch stands where this one does when the patch is mirrored."""
        numbers = torch.arange(len(self.places)).view(self.channels, self.block.patch, self.block.patch)
        return numbers.flip(2).flatten()

    @cached_property
    def starts(self) -> list[Tensor]:
        """Where patches begin, for each cell, row by row of cells."""
        rows, columns = self._along(self.height), self._along(self.width)
        return [(row[:, None] * self.width + column).flatten() for row in rows for column in columns]

    @property
    def mirrored_cells(self) -> Tensor:
        return torch.arange(self.block.cells).view(self.block.grid, self.block.grid).flip(1).flatten()

    def _along(self, length: int) -> list[Tensor]:
        """Where patches begin along one side, for each cell. One in the very middle may belong to two cells."""
        grid, room = self.block.grid, length - (self.block.patch - 1) * self.block.spacing - 1
        stride = self.block.stride if room % self.block.stride == 0 else 1
        begins = torch.arange(0, room + 1, stride)
        middles, count = (2 * torch.arange(len(begins)) + 1) * grid, 2 * len(begins)
        return [begins[(middles >= cell * count) & (middles <= (cell + 1) * count)] for cell in range(grid)]


def blocks_of(channels: int, *, dictionary: int) -> tuple[PatchBlock, ...]:
    """Fine, middle and coarse patches, and colours; grey images need fewer numbers and have no colours."""
    colour = channels == 3
    fine = PatchBlock(name="fine", patch=6, pairs=dictionary // 2, coordinates=48 if colour else 30, components=160)
    blocks = (
        fine,
        replace(fine, name="middle", spacing=2, padding=1),
        PatchBlock(
            name="coarse",
            patch=4,
            spacing=4,
            padding=4,
            stride=2,
            grid=2,
            pairs=dictionary // 4,
            coordinates=40 if colour else 14,
            components=128,
            weight=0.8,
        ),
    )
    colours = PatchBlock(
        name="colours",
        patch=2,
        side=8,
        pairs=dictionary // 8,
        coordinates=11,
        components=32,
        weight=0.5,
        threshold=0.3,
        norm_floor=0.3,
        contrast=False,
    )
    return (*blocks, colours) if colour else blocks


__all__ = ["Layout", "PatchBlock", "blocks_of"]
