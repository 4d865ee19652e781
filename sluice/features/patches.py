"""Features from dictionaries of patches of synthetic images, for colour and grey images."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from sluice._base import validate
from sluice._base.errors import InputError
from sluice.features.base import SHOWN, Constants, Extractor, ImageFeature, ImageShape, stretched
from sluice.features.patch_blocks import PatchBlock, blocks_of
from sluice.features.patch_dictionary import Dictionary
from sluice.features.patch_extractor import PatchExtractor, responses
from sluice.features.projection import ChannelComponents, JointComponents
from sluice.features.synthetic.dead_leaves import SIZES, dead_leaves

_SEED = 0
_SMALLEST_DICTIONARY = 16
#: Synthetic images that atoms are taken from, at most.
_IMAGES_FOR_ATOMS = 4000


@dataclass(frozen=True, kw_only=True)
class Patches(ImageFeature):
    """Responses to patches of dead leaves at several scales, reduced to principal components.

    An image and its mirror image have the same features, up to rounding.

    Attributes:
        dictionary: patches in the largest dictionaries, mirror images included; 0 for 2048 (colour) or 1024 (grey).
        images: how many synthetic images the constants are made from.
        components: principal components that are computed and kept.
        dimensions: how many of them, the largest first, the model sees.
        ridge: what is added to each component's share of the variance before they are scaled alike: with 0 all count the
            same, with a large number they keep their own variance.
    """

    kind: ClassVar[str] = "patches"
    finishing: ClassVar[frozenset[str]] = frozenset({"dimensions", "ridge"})

    dictionary: int = 0
    images: int = 8000
    components: int = 2048
    dimensions: int = 2048
    ridge: float = 1e-3

    def __post_init__(self) -> None:
        validate.positive_integer(images=self.images, components=self.components, dimensions=self.dimensions)
        validate.positive(ridge=self.ridge)
        size = self.dictionary
        if not isinstance(size, int) or (size != 0 and (size < _SMALLEST_DICTIONARY or size % 8)):
            raise InputError(
                f"dictionary={size!r} is not allowed: it must be a multiple of 8 from {_SMALLEST_DICTIONARY} on, or 0 for "
                "the size that suits the images."
            )
        if self.dimensions > self.components:
            raise InputError(
                f"dimensions={self.dimensions} is not allowed: no more than components={self.components} are computed."
            )

    def require_shape(self, shape: ImageShape) -> None:
        channels, *sides = shape
        if channels not in (1, 3) or not all(SIZES[0] <= side <= SIZES[1] for side in sides):
            raise self.refuse_shape(
                shape, f"they must have 1 or 3 channels and {SIZES[0]} to {SIZES[1]} pixels in height and width"
            )

    def steps(self, shape: ImageShape) -> int:
        return self.images * (1 + len(self._blocks(shape)))

    def fit(self, shape: ImageShape, *, advance: Callable[[int], None]) -> dict[str, Tensor]:
        self.require_shape(shape)
        channels, height, width = shape
        synthetic = dead_leaves(self.images, height=height, width=width, channels=channels, seed=_SEED).float() / 255
        advance(self.images)
        made: dict[str, Tensor] = {}
        reduced = []
        for number, block in enumerate(self._blocks(shape)):
            generator = torch.Generator().manual_seed(_SEED + number)
            prepared = block.prepare(synthetic[:_IMAGES_FOR_ATOMS])
            dictionary = Dictionary.fit(block.layout(shape), prepared, generator)
            components, values = ChannelComponents.fit(responses(dictionary, synthetic), block)
            reduced.append(values)
            made |= _written(block, dictionary, components)
            advance(self.images)
        joint = JointComponents.fit(torch.cat(reduced, 1), self.components)
        return made | {"joint": joint.matrix, "offset": joint.offset, "variances": joint.variances}

    def extractor(self, shape: ImageShape, constants: Constants) -> Extractor:
        self.require_shape(shape)
        blocks = self._blocks(shape)
        dictionaries = [
            Dictionary(
                layout=block.layout(shape),
                whitening=constants[f"{block.name}.whitening"],
                atoms=constants[f"{block.name}.atoms"],
                even=int(constants[f"{block.name}.even"]),
            )
            for block in blocks
        ]
        channels = [
            ChannelComponents(scale=constants[f"{block.name}.scale"], components=constants[f"{block.name}.components"])
            for block in blocks
        ]
        joint = JointComponents(matrix=constants["joint"], offset=constants["offset"], variances=constants["variances"])
        return PatchExtractor(shape, dictionaries, channels, joint)

    def finish(self, rows: Tensor, constants: Constants) -> Tensor:
        """Components of a chosen number, with variances made partly alike, scaled to rows of norm 1."""
        variances = constants["variances"].double()
        kept = min(self.dimensions, len(variances))
        factors = (variances / (variances / variances.sum() + self.ridge)).sqrt().float()
        finished = rows[:, :kept].float() * factors[:kept]
        # The norm in float64: what remains of the order of its sums does not reach float32.
        norms = finished.double().square().sum(1, keepdim=True).sqrt().clamp_min(1e-30)
        return finished / norms.float()

    def pictures(self, shape: ImageShape, constants: Constants) -> dict[str, Tensor]:
        channels, height, width = shape
        synthetic = dead_leaves(SHOWN, height=height, width=width, channels=channels, seed=_SEED)
        pictures = {"synthetic images": synthetic.float() / 255}
        for block in self._blocks(shape):
            # Atoms are in whitened coordinates: the patches nearest to them are drawn.
            whitening = constants[f"{block.name}.whitening"]
            patches = constants[f"{block.name}.atoms"][:SHOWN] @ torch.linalg.pinv(whitening)
            side = math.isqrt(patches.shape[1] // channels)
            pictures[f"atoms, {block.name}"] = stretched(patches.view(-1, channels, side, side))
        return pictures

    def _blocks(self, shape: ImageShape) -> tuple[PatchBlock, ...]:
        automatic = 2048 if shape[0] == 3 else 1024
        return blocks_of(shape[0], dictionary=self.dictionary or automatic)


def _written(block: PatchBlock, dictionary: Dictionary, components: ChannelComponents) -> dict[str, Tensor]:
    found = {
        "whitening": dictionary.whitening,
        "atoms": dictionary.atoms,
        "even": torch.tensor(dictionary.even),
        "scale": components.scale,
        "components": components.components,
    }
    return {f"{block.name}.{name}": value for name, value in found.items()}


__all__ = ["Patches"]
