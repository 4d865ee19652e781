"""From a block of an expression to the feature that it names, with its options as their fields want them."""

from __future__ import annotations

import json
from dataclasses import fields
from importlib import import_module
from typing import TYPE_CHECKING, Any, get_type_hints

from sluice._base import codec
from sluice._base.errors import InputError
from sluice.features.catalog import Block

if TYPE_CHECKING:
    from sluice.features.base import ImageFeature
    from sluice.features.words import WeightedWords


def image_feature(block: Block) -> ImageFeature:
    """The feature of images that a block names."""
    if block.entry.domain != "images":
        raise InputError(f"features={block.name!r} is not allowed here: it makes no rows of images.")
    feature: ImageFeature = _built(block)
    return feature


def text_feature(block: Block) -> WeightedWords:
    """The feature of texts that a block names."""
    if block.entry.domain != "texts":
        raise InputError(f"features={block.name!r} is not allowed here: it makes no rows of texts.")
    feature: WeightedWords = _built(block)
    return feature


def _built(block: Block) -> Any:
    if block.entry.implementation is None:
        raise InputError(f"features={block.name!r} is not allowed here: it has nothing to build.")
    module, name = block.entry.implementation.split(":")
    feature = getattr(import_module(f"sluice.features.{module}"), name)
    hints = get_type_hints(feature)
    kinds = {
        option.name: hints[option.name] for option in fields(feature) if option.init
    }  # constants of the class are none
    unknown = sorted(set(block.options) - set(kinds))
    if unknown:
        allowed = f"it has {', '.join(sorted(kinds))}" if kinds else "it has none"
        raise InputError(f"features={block.name!r} has no option {', '.join(unknown)}: {allowed}.")
    return feature(**{option: _typed(option, value, kinds[option]) for option, value in block.options.items()})


def _typed(name: str, value: str | bool, kind: Any) -> Any:
    """An option as its field wants it: numbers are written as JSON writes them."""
    try:
        read = json.loads(value) if isinstance(value, str) and kind is not str else value
    except ValueError:
        read = value
    typed = codec.decode(kind, read, what=name)
    return float(typed) if kind is float else typed


__all__ = ["image_feature", "text_feature"]
