"""Rows of norm 1 for linear models: blocks of features side by side, kept on disk, and centred if a mean was released."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from sluice._base.errors import InputError
from sluice._base.progress import progress
from sluice.features.base import Constants, ImageFeature, ImageShape
from sluice.features.building import image_feature
from sluice.features.cache import kept, name_of
from sluice.features.catalog import blocks_of
from sluice.features.constants import constants
from sluice.features.whitening import unit_rows

BIAS_INPUT = 0.3
"""The constant that stands at the end of each row: a bias whose gradient is smaller than that of the other weights."""

_KEY = "features"
_IMAGES_AT_ONCE = 1024
_ROWS_AT_ONCE = 1024


@dataclass(frozen=True, kw_only=True, eq=False)
class RowFeatures:
    """What an expression makes of images of one shape: rows of norm 1, each from its image and public constants alone.

    Attributes:
        expression: as the user wrote it.
        shape: of an image.
        blocks: weight, feature and constants of each block.
    """

    expression: str
    shape: ImageShape
    blocks: tuple[tuple[float, ImageFeature, Constants], ...]

    @classmethod
    def of(cls, expression: str, shape: ImageShape, *, show_progress: bool = True) -> RowFeatures:
        """Build what is not built yet."""
        features = [(block.weight, image_feature(block)) for block in blocks_of(expression)]
        for _, feature in features:
            feature.require_shape(shape)
        blocks = tuple(
            (weight, feature, constants(feature, shape, show_progress=show_progress)) for weight, feature in features
        )
        return cls(expression=expression, shape=shape, blocks=blocks)

    def of_images(self, images: Tensor, *, show_progress: bool = True, cache: bool = True) -> Tensor:
        """The rows of images, float16, ``(images, width)``.

        Args:
            images: ``(n, channels, height, width)``, or without channels where there is one; uint8, or floating point in 0..1.
            cache: keep what takes long under the user's cache; the file is as sensitive as the images.

        Guarantee:
            Row i is a function of image i and of public constants alone, so the rows cost no privacy.
        """
        images = images.unsqueeze(1) if images.dim() == 3 else images
        if images.dim() != 4 or tuple(images.shape[1:]) != self.shape:
            raise InputError(f"images of shape {tuple(images.shape)} are not allowed: they must be (n, *{self.shape}).")
        raw = [self._kept(feature, known, images, show_progress, cache) for _, feature, known in self.blocks]
        total = sum(weight**2 for weight, _, _ in self.blocks) ** 0.5
        rows: Tensor | None = None
        for start in range(0, max(1, len(images)), _ROWS_AT_ONCE):
            parts = []
            for (weight, feature, known), each in zip(self.blocks, raw, strict=True):
                finish = partial(feature.finish, constants=known)
                parts.append(fixed_rows(finish, each[start : start + _ROWS_AT_ONCE].float()) * (weight / total))
            joined = torch.cat(parts, dim=1).to(torch.float16)
            if rows is None:
                rows = torch.empty(len(images), joined.shape[1], dtype=torch.float16)
            rows[start : start + len(joined)] = joined
        assert rows is not None
        return rows

    def _kept(
        self, feature: ImageFeature, known: Constants, images: Tensor, show_progress: bool, cache: bool
    ) -> Tensor:
        extract = feature.extractor(self.shape, known)
        width = extract(torch.zeros(1, *self.shape)).shape[1]

        def parts() -> Iterator[Tensor]:
            with progress(feature.written(), total=len(images), shown=show_progress) as advance:
                for part in images.split(_IMAGES_AT_ONCE):
                    yield extract(_scaled(part)).to(torch.float16)
                    advance(len(part))

        if not cache or len(images) == 0:
            return torch.cat([torch.empty(0, width, dtype=torch.float16), *parts()])
        settings = {**feature.identity(), "shape": list(images.shape), "type": str(images.dtype)}
        return kept(name_of({"rows": settings}, images), (len(images), width), parts=parts)

    def tensors(self) -> dict[str, Tensor]:
        """All constants under one name each, for a file that makes a published model complete."""
        return {
            f"{number}.{name}": value
            for number, (_, _, known) in enumerate(self.blocks)
            for name, value in known.items()
        }

    def metadata(self) -> dict[str, str]:
        """What `from_tensors` needs beside the tensors, under one key: several would stand in random order."""
        versions = [feature.version for _, feature, _ in self.blocks]
        return {_KEY: json.dumps({"features": self.expression, "shape": self.shape, "versions": versions})}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> RowFeatures:
        """The inverse of `tensors` and `metadata`: nothing is built."""
        described = json.loads(metadata[_KEY])
        blocks = []
        for number, block in enumerate(blocks_of(described["features"])):
            prefix = f"{number}."
            known = {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
            blocks.append((block.weight, image_feature(block), known))
        channels, height, width = described["shape"]
        if described["versions"] != [feature.version for _, feature, _ in blocks]:
            raise InputError(
                f"features={described['features']!r} were made by another version of Sluice than this one: use that."
            )
        return cls(expression=described["features"], shape=(channels, height, width), blocks=tuple(blocks))


def presented(rows: Tensor, centre: Tensor | None) -> Tensor:
    """What a model sees of rows: less the released mean, if there is one, of norm 1 again, with the constant at the end.

    Guarantee:
        Row i of the result is a function of row i and of the released mean alone, bit for bit.
    """
    seen = torch.empty(len(rows), rows.shape[1] + 1, dtype=torch.float16)
    seen[:, -1] = BIAS_INPUT
    for start in range(0, len(rows), _ROWS_AT_ONCE):
        part = rows[start : start + _ROWS_AT_ONCE].float()
        if centre is not None:
            part = fixed_rows(lambda values: unit_rows(values - centre), part)
        seen[start : start + len(part), :-1] = part
    return seen


def fixed_rows(function: Callable[[Tensor], Tensor], rows: Tensor, *, count: int = _ROWS_AT_ONCE) -> Tensor:
    """A function of rows, always called with this many: how many there are cannot change how one is rounded."""
    if len(rows) < count:
        filled = torch.zeros(count, *rows.shape[1:], dtype=rows.dtype)
        filled[: len(rows)] = rows
        return function(filled)[: len(rows)]
    return function(rows)


def _scaled(images: Tensor) -> Tensor:
    return images.to(torch.float32).div_(255.0) if images.dtype == torch.uint8 else images.to(torch.float32)


__all__ = ["BIAS_INPUT", "RowFeatures", "fixed_rows", "presented"]
