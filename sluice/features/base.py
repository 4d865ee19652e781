"""What a feature of images is: public constants, made from synthetic images, and a function of one image at a time."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from torch import Tensor

from sluice._base.errors import InputError
from sluice.features.catalog import written

ImageShape = tuple[int, int, int]
"""Channels, height and width of an image."""

Constants = Mapping[str, Tensor]
"""What a feature knows from synthetic images, by name; tensors on the CPU."""

Extractor = Callable[[Tensor], Tensor]
"""From images, float32 in 0..1 of shape ``(n, channels, height, width)``, to rows, float32 of shape ``(n, width)``."""

SHOWN = 48
"""How many images of a kind are drawn on a sheet."""


@dataclass(frozen=True, kw_only=True)
class ImageFeature(ABC):
    """One kind of features and its options, which are its fields: all public.

    A subclass says how its constants are made and how rows are computed. Options are what a user may write behind the
    name (``patches:dimensions=1536``): strings, numbers, or flags that are off by default.

    Attributes:
        kind: what users type; `sluice.features.catalog` says what it is and which synthetic images made its constants.
        version: raised with every change that changes constants or rows.
        finishing: the options that only `finish` reads: rows that differ in these alone share one cache file.

    Guarantee:
        Constants come from synthetic images and the seed of the version; no record of any data set enters them. Row i of
        the extractor's result, and of `finish`, is a function of row i and of constants alone, bit for bit: it does not
        depend on how many images there are or on what the others show. So features cost no privacy.
    """

    kind: ClassVar[str]
    version: ClassVar[int] = 1
    finishing: ClassVar[frozenset[str]] = frozenset()

    @abstractmethod
    def require_shape(self, shape: ImageShape) -> None:
        """Refuse images that these features cannot be made of."""

    @abstractmethod
    def steps(self, shape: ImageShape) -> int:
        """How many steps `fit` makes, for a progress bar; 0 where there is nothing to make."""

    @abstractmethod
    def fit(self, shape: ImageShape, *, advance: Callable[[int], None]) -> dict[str, Tensor]:
        """Make the constants for images of this shape. The same bytes each time; calls ``advance`` as steps are done.

        Runs with one thread and fixed seeds, so that a machine makes the same bytes each time.
        """

    @abstractmethod
    def extractor(self, shape: ImageShape, constants: Constants) -> Extractor:
        """What computes rows: the expensive part, whose result is kept in a file."""

    def finish(self, rows: Tensor, constants: Constants) -> Tensor:
        """The cheap part, from kept rows to what the model sees: rows of norm 1."""
        return rows

    def pictures(self, shape: ImageShape, constants: Constants) -> dict[str, Tensor]:
        """What `sluice features show` draws, by title: images in 0..1, ``(n, channels, height, width)``."""
        return {}

    def identity(self) -> dict[str, Any]:
        """What the constants depend on, beside the shape of the images: part of a cache file's name."""
        options = {name: value for name, value in asdict(self).items() if name not in self.finishing}
        return {"kind": self.kind, "version": self.version, **options}

    def written(self) -> str:
        """The name with the options that are not the default, as a user would type it."""
        return written(self.kind, self)

    def refuse_shape(self, shape: ImageShape, allowed: str) -> InputError:
        return InputError(f"features={self.kind!r} is not allowed for images of shape {shape}: {allowed}.")


def stretched(images: Tensor) -> Tensor:
    """Images of any values, each from black at its smallest to white at its largest, to be drawn."""
    flat = images.flatten(1).float()
    low, high = flat.amin(1, keepdim=True), flat.amax(1, keepdim=True)
    return ((flat - low) / (high - low).clamp(min=1e-12)).view(images.shape)


__all__ = ["SHOWN", "Constants", "Extractor", "ImageFeature", "ImageShape", "stretched"]
