"""From images to coordinates: responses to all dictionaries and their projection, a few images at a time."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from sluice._base.errors import InputError
from sluice.features.base import ImageShape
from sluice.features.native.patches import ROWS, NativeDictionary, library, packed, product
from sluice.features.patch_dictionary import Dictionary
from sluice.features.projection import ChannelComponents, JointComponents

#: In C: images whose responses, and whose reduced responses, are kept at a time. Multiples of the rows of a product.
_AT_ONCE, _TOGETHER = 24, 240
_PREPARED = 4 * _TOGETHER


class PatchExtractor:
    """Computes rows of images, by kernels in C where they can be built, else by matrix products.

    It uses as many threads as PyTorch is set to use, and about 10 MB for each beyond input and output.

    Guarantee:
        Row i is a function of image i and of public constants alone, bit for bit: kernels treat all images alike, and
        matrix products are made for one image at a time.
    """

    def __init__(
        self,
        shape: ImageShape,
        dictionaries: Sequence[Dictionary],
        channels: Sequence[ChannelComponents],
        joint: JointComponents,
    ) -> None:
        self.shape, self.dictionaries, self.channels, self.joint = shape, dictionaries, channels, joint
        self._kernels: list[NativeDictionary] = []
        if library() is not None:
            self._kernels = [NativeDictionary(each) for each in dictionaries]
            self._cells = [[packed(cell) for cell in each.matrices()] for each in channels]
            self._joint = packed(_spread(joint.matrix, channels))

    @property
    def width(self) -> int:
        return self.joint.matrix.shape[1]

    @torch.no_grad()
    def __call__(self, images: Tensor) -> Tensor:
        if images.dtype != torch.float32 or images.shape[1:] != self.shape:
            raise InputError(
                f"images ({images.dtype}, shape {tuple(images.shape)}) are not allowed: they must be torch.float32 of "
                f"shape (n, {', '.join(map(str, self.shape))})."
            )
        rows = torch.empty(len(images), self.width)
        for part, into in zip(images.cpu().split(_PREPARED), rows.split(_PREPARED), strict=True):
            if self._kernels and len(part):
                self._by_kernels(part, into)
            else:
                for image, row in zip(part.split(1), into.split(1), strict=True):
                    self._by_product(image, row)
        return rows

    def _by_kernels(self, images: Tensor, into: Tensor) -> None:
        prepared = [each.layout.block.prepare(images).contiguous() for each in self.dictionaries]
        threads = torch.get_num_threads()
        shares = zip(*(each.tensor_split(threads) for each in prepared), into.tensor_split(threads), strict=True)
        if threads == 1:
            self._share(*next(shares))
            return
        with ThreadPoolExecutor(threads) as workers:
            for done in [workers.submit(self._share, *share) for share in shares]:
                done.result()

    def _share(self, *prepared_and_into: Tensor) -> None:
        *prepared, into = prepared_and_into
        reduced = torch.zeros(_TOGETHER, self._joint.shape[1])
        product_of = torch.empty(_TOGETHER, self._joint.shape[0] * self._joint.shape[2])
        for first in range(0, len(into), _TOGETHER):
            here = into[first : first + _TOGETHER]
            self._reduce([each[first : first + _TOGETHER] for each in prepared], reduced)
            rows = _filled(len(here))
            product(reduced[:rows], self._joint, into=product_of[:rows])
            torch.sub(product_of[: len(here), : self.width], self.joint.offset, out=here)

    def _reduce(self, prepared: Sequence[Tensor], reduced: Tensor) -> None:
        column = 0
        for kernel, cells, planes in zip(self._kernels, self._cells, prepared, strict=True):
            responses = torch.zeros(_AT_ONCE, kernel.block.responses)
            across, wide = responses.shape[1] // len(cells), cells[0].shape[0] * cells[0].shape[2]
            for first in range(0, len(planes), _AT_ONCE):
                part = planes[first : first + _AT_ONCE]
                kernel(part, into=responses[: len(part)])
                rows = _filled(len(part))
                for cell, matrix in enumerate(cells):
                    at = column + cell * wide
                    out = reduced[first : first + rows, at : at + wide]
                    product(responses[:rows, cell * across : (cell + 1) * across], matrix, into=out)
            column += len(cells) * wide

    def _by_product(self, image: Tensor, into: Tensor) -> None:
        """One image alone: the last bits of a matrix product depend on its shape and on a row's place in it."""
        reduced = [
            components(dictionary.responses(dictionary.layout.block.prepare(image)).flatten(1))
            for dictionary, components in zip(self.dictionaries, self.channels, strict=True)
        ]
        torch.sub(torch.cat(reduced, 1) @ self.joint.matrix, self.joint.offset, out=into)


def responses(dictionary: Dictionary, images: Tensor) -> Tensor:
    """Responses of one block to images, ``(n, cells * 2 * pairs)``: what components are learned from."""
    block = dictionary.layout.block
    found = torch.empty(len(images), block.responses)
    kernel = None if library() is None else NativeDictionary(dictionary)
    for part, into in zip(images.split(_AT_ONCE), found.split(_AT_ONCE), strict=True):
        prepared = block.prepare(part).contiguous()
        if kernel is None:
            into.copy_(dictionary.responses(prepared).flatten(1))
        else:
            kernel(prepared, into=into)
    return found


def _filled(count: int) -> int:
    """Rows of a product: what stands in those beyond the count does not reach the others."""
    return -(-count // ROWS) * ROWS


def _spread(matrix: Tensor, channels: Sequence[ChannelComponents]) -> Tensor:
    """The joint matrix with rows of 0 where the numbers of a cell are filled up to whole panels."""
    parts, row = [], 0
    for each in channels:
        cells, kept = len(each.scale), each.components.shape[1]
        filled = packed(each.components)
        wide = filled.shape[0] * filled.shape[2]
        part = matrix.new_zeros(cells, wide, matrix.shape[1])
        part[:, :kept] = matrix[row : row + cells * kept].view(cells, kept, -1)
        parts.append(part.flatten(0, 1))
        row += cells * kept
    return torch.cat(parts)


__all__ = ["PatchExtractor", "responses"]
