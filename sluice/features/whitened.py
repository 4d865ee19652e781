"""Scattering coefficients, centred and whitened by what synthetic images say about them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from sluice._base import validate
from sluice.features.base import SHOWN, Constants, Extractor, ImageFeature, ImageShape
from sluice.features.batches import in_batches
from sluice.features.deskew import clean, deskew
from sluice.features.normalise import GroupNormalisation
from sluice.features.scattering import COEFFICIENTS, Scattering
from sluice.features.synthetic.pen_strokes import pen_strokes
from sluice.features.synthetic.silhouettes import silhouettes
from sluice.features.whitening import kronecker_covariances, unit_rows, whitening_matrix

PRIORS = ("dead-leaves", "pen-strokes", "silhouettes")

_BATCH = 96
_SEED = 20_000
_SMALLEST, _LARGEST = 16, 64


@dataclass(frozen=True, kw_only=True)
class WhitenedScattering(ImageFeature):
    """Square roots of scattering coefficients, normalised in groups, centred, whitened and scaled to norm 1.

    Whitening is by channel and by place: (channels)^-1/4 x (places)^-1/4 with covariances of synthetic images.

    Attributes:
        prior: the synthetic images: ``pen-strokes`` or ``silhouettes`` for grey images, ``dead-leaves`` for any.
        deskew: make each image upright first.
        references: how many synthetic images.
    """

    kind: ClassVar[str] = "whitened-scattering"

    prior: str = "silhouettes"
    deskew: bool = False
    references: int = 5000

    def __post_init__(self) -> None:
        validate.one_of(PRIORS, prior=self.prior)
        validate.positive_integer(references=self.references)

    def require_shape(self, shape: ImageShape) -> None:
        channels, height, width = shape
        if channels not in (1, 3) or not all(_SMALLEST <= length <= _LARGEST for length in (height, width)):
            raise self.refuse_shape(shape, "it takes grey or colour images of 16x16 to 64x64 pixels")
        if channels == 3 and self.prior != "dead-leaves":
            raise self.refuse_shape(shape, f"prior={self.prior!r} is of grey images; use prior=dead-leaves")

    def steps(self, shape: ImageShape) -> int:
        return self.references

    def fit(self, shape: ImageShape, *, advance: Callable[[int], None]) -> dict[str, Tensor]:
        images = self._synthetic(shape)
        normalised = _Normalised(shape, deskewed=self.deskew)
        maps = []
        for part in images.split(_BATCH):
            maps.append(in_batches(normalised, part, batch=_BATCH, width=normalised.width))
            advance(len(part))
        rows = torch.cat(maps)
        mean = rows.double().mean(dim=0)
        channels, places = kronecker_covariances((rows - mean).view(-1, *normalised.map_shape))
        return {
            "mean": mean.float(),
            "channels": whitening_matrix(channels),
            "places": whitening_matrix(places),
        }

    def extractor(self, shape: ImageShape, constants: Constants) -> Extractor:
        self.require_shape(shape)
        normalised = _Normalised(shape, deskewed=self.deskew)

        def rows_of(images: Tensor) -> Tensor:
            maps = (normalised(images) - constants["mean"]).view(-1, *normalised.map_shape)
            whitened = constants["channels"] @ (maps @ constants["places"])
            return unit_rows(whitened.flatten(1))

        return lambda images: in_batches(rows_of, images, batch=_BATCH, width=normalised.width)

    def pictures(self, shape: ImageShape, constants: Constants) -> dict[str, Tensor]:
        return {"synthetic images": clean(replace(self, references=SHOWN)._synthetic(shape))}

    def _synthetic(self, shape: ImageShape) -> Tensor:
        channels, height, width = shape
        if self.prior == "dead-leaves":
            from sluice.features.synthetic.dead_leaves import dead_leaves

            leaves: Tensor = dead_leaves(self.references, height=height, width=width, channels=channels, seed=_SEED)
            return leaves
        draw = pen_strokes if self.prior == "pen-strokes" else silhouettes
        return draw(self.references, height=height, width=width, seed=_SEED)


class _Normalised:
    """From images to rows of normalised coefficients."""

    def __init__(self, shape: ImageShape, *, deskewed: bool) -> None:
        channels, height, width = shape
        self._transform = Scattering(height=height, width=width)
        self._groups = GroupNormalisation()
        self._deskewed = deskewed
        down, across = self._transform.output_size
        self.map_shape = (channels * COEFFICIENTS, down * across)
        self.width = channels * COEFFICIENTS * down * across

    def __call__(self, images: Tensor) -> Tensor:
        images = deskew(images) if self._deskewed else clean(images)
        coefficients = self._transform(images.contiguous()).clamp(min=0.0).sqrt()
        return self._groups(coefficients).flatten(1)


__all__ = ["PRIORS", "WhitenedScattering"]
