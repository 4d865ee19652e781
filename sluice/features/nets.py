"""Features from small nets that are trained to tell synthetic images apart."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch
from torch import Tensor
from torch.nn import functional

from sluice._base import validate
from sluice._base.errors import InputError
from sluice.features.base import SHOWN, Constants, Extractor, ImageFeature, ImageShape, stretched
from sluice.features.batches import in_batches
from sluice.features.constants import constants as kept_constants
from sluice.features.deskew import clean, deskew, rotate
from sluice.features.nets_training import CELLS, SyntheticClasses, pretrained
from sluice.features.synthetic.dead_leaves import dead_leaves
from sluice.features.synthetic.leaf_scenes import LeafScenes
from sluice.features.synthetic.pen_strokes import PenStrokes, pen_strokes
from sluice.features.synthetic.silhouettes import Silhouettes, silhouettes
from sluice.features.whitening import covariance, unit_rows, whitening_matrix

LAYERS = ("embedding", "map")

ANGLES = (-9.0, 9.0)
"""Degrees by which the views of an image are turned."""

_BATCH = 128
_REFERENCES = 3000
_REFERENCE_SEED = 10_000
_SMALLEST, _LARGEST = 16, 64


@dataclass(frozen=True, kw_only=True)
class SyntheticNet(ImageFeature):
    """A layer of a net that has seen synthetic images only: centred, whitened and scaled to norm 1.

    Features that differ in `layer` and `views` alone share one net, which is trained once.

    Attributes:
        layer: ``embedding``, the last one below the scores, or ``map``, the 3x3 cells below it.
        deskew: make each image upright first.
        views: the mean over two small rotations of the image instead of the image itself.
        channels: of the first convolution; the second has twice and the third four times as many, the embedding eight.
        classes: how many classes of synthetic images the net learns to tell apart.
        training_steps: batches of 256 images.
        seed: of the classes and of the net. Several nets with different seeds know more than one.
    """

    image_channels: ClassVar[tuple[int, ...]] = (1,)

    layer: str = "embedding"
    deskew: bool = False
    views: bool = False
    channels: int = 32
    classes: int = 1000
    training_steps: int = 1500
    seed: int = 0

    def __post_init__(self) -> None:
        validate.one_of(LAYERS, layer=self.layer)
        validate.positive_integer(channels=self.channels, classes=self.classes, training_steps=self.training_steps)
        if not 0 <= self.seed < _REFERENCE_SEED:
            raise InputError(f"seed={self.seed} is not allowed: it must be an integer from 0 to {_REFERENCE_SEED - 1}.")

    @abstractmethod
    def source(self, shape: ImageShape) -> SyntheticClasses:
        """The classes that the net learns."""

    @abstractmethod
    def references(self, shape: ImageShape) -> Tensor:
        """Fresh synthetic images, of which mean and covariance are taken."""

    def require_shape(self, shape: ImageShape) -> None:
        channels, height, width = shape
        if channels not in self.image_channels or not all(
            _SMALLEST <= length <= _LARGEST for length in (height, width)
        ):
            what = "grey" if self.image_channels == (1,) else "grey or colour"
            raise self.refuse_shape(shape, f"it takes {what} images of 16x16 to 64x64 pixels")

    def steps(self, shape: ImageShape) -> int:
        return self.training_steps if self == self._trained() else _REFERENCES

    def fit(self, shape: ImageShape, *, advance: Callable[[int], None]) -> dict[str, Tensor]:
        trained = self._trained()
        if self == trained:
            weights = pretrained(
                self.source(shape),
                inputs=shape[0],
                channels=self.channels,
                steps=self.training_steps,
                seed=self.seed,
                advance=advance,
            )
        else:
            kept = kept_constants(trained, shape)
            weights = {name: value for name, value in kept.items() if name not in ("mean", "whitening")}
        rows = self._activations(weights, clean(self.references(shape)))
        mean = rows.double().mean(dim=0)
        matrix = whitening_matrix(covariance(rows - mean))
        if self != trained:
            advance(_REFERENCES)
        return {**weights, "mean": mean.float(), "whitening": matrix}

    def extractor(self, shape: ImageShape, constants: Constants) -> Extractor:
        self.require_shape(shape)

        def rows_of(images: Tensor) -> Tensor:
            return unit_rows((self._layer(constants, images) - constants["mean"]) @ constants["whitening"])

        return lambda images: in_batches(rows_of, images, batch=_BATCH, width=len(constants["mean"]))

    def pictures(self, shape: ImageShape, constants: Constants) -> dict[str, Tensor]:
        return {
            "synthetic images": clean(self.references(shape)[:SHOWN]),
            "filters of the first layer": stretched(constants["first.weight"]),
        }

    def _trained(self) -> Self:
        """The one of all features with this net that trains it."""
        return replace(self, layer="embedding", views=False)

    def _activations(self, weights: Constants, images: Tensor) -> Tensor:
        width = weights["embedding.weight"].shape[0 if self.layer == "embedding" else 1]
        return in_batches(lambda part: self._layer(weights, part), images, batch=_BATCH, width=width)

    def _layer(self, weights: Constants, images: Tensor) -> Tensor:
        images = deskew(images) if self.deskew else clean(images)
        if not self.views:
            return self._forward(weights, images)
        first, second = (self._forward(weights, rotate(images, angle)) for angle in ANGLES)
        return (first + second) / 2

    def _forward(self, weights: Constants, images: Tensor) -> Tensor:
        values = images.contiguous(memory_format=torch.channels_last)
        values = functional.relu_(functional.conv2d(values, *_layer(weights, "first"), stride=2, padding=2))
        values = functional.relu_(functional.conv2d(values, *_layer(weights, "second"), padding=1))
        values = functional.max_pool2d(values, 2)
        values = functional.relu_(functional.conv2d(values, *_layer(weights, "third"), padding=1))
        cells = functional.adaptive_max_pool2d(values, CELLS).flatten(1)
        return cells if self.layer == "map" else functional.linear(cells, *_layer(weights, "embedding"))


@dataclass(frozen=True, kw_only=True)
class StrokeNet(SyntheticNet):
    """A net that tells random pen strokes apart: for what is written or drawn with a pen."""

    kind: ClassVar[str] = "stroke-net"

    def source(self, shape: ImageShape) -> SyntheticClasses:
        _, height, width = shape
        return PenStrokes(classes=self.classes, height=height, width=width, seed=self.seed, upright=self.deskew)

    def references(self, shape: ImageShape) -> Tensor:
        return pen_strokes(_REFERENCES, height=shape[1], width=shape[2], seed=_REFERENCE_SEED)


@dataclass(frozen=True, kw_only=True)
class SilhouetteNet(SyntheticNet):
    """A net that tells random silhouettes apart: for single things before a dark background."""

    kind: ClassVar[str] = "silhouette-net"

    classes: int = 1500
    training_steps: int = 800

    def source(self, shape: ImageShape) -> SyntheticClasses:
        return Silhouettes(classes=self.classes, height=shape[1], width=shape[2], seed=self.seed)

    def references(self, shape: ImageShape) -> Tensor:
        return silhouettes(_REFERENCES, height=shape[1], width=shape[2], seed=_REFERENCE_SEED)


@dataclass(frozen=True, kw_only=True)
class LeafNet(SyntheticNet):
    """A net that tells views of random scenes of dead leaves apart: for photographs, in grey or in colour."""

    kind: ClassVar[str] = "leaf-net"
    image_channels: ClassVar[tuple[int, ...]] = (1, 3)

    def source(self, shape: ImageShape) -> SyntheticClasses:
        channels, height, width = shape
        return LeafScenes(classes=self.classes, channels=channels, height=height, width=width, seed=self.seed)

    def references(self, shape: ImageShape) -> Tensor:
        channels, height, width = shape
        leaves = dead_leaves(_REFERENCES, height=height, width=width, channels=channels, seed=_REFERENCE_SEED)
        return leaves.float() / 255


def _layer(weights: Constants, name: str) -> tuple[Tensor, Tensor]:
    return weights[f"{name}.weight"], weights[f"{name}.bias"]


__all__ = ["ANGLES", "LAYERS", "LeafNet", "SilhouetteNet", "StrokeNet", "SyntheticNet"]
