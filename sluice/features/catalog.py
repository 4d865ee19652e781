"""Features by the name a user types, and what can be written with these names. Known without torch.

An expression joins blocks by ``+``; a block is a name, options behind a colon, and a weight before a ``*``::

    patches
    stroke-net:deskew + 0.5 * whitened-scattering:deskew,prior=pen-strokes
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from sluice._base import validate
from sluice._base.errors import InputError

Domain = Literal["images", "texts", "records"]

_BLOCK = re.compile(r"(?:(?P<weight>[0-9.e-]+)\*)?(?P<name>[a-z][a-z0-9-]*)(?::(?P<options>[^:+*]+))?")


@dataclass(frozen=True, kw_only=True)
class FeatureEntry:
    """What is known of a feature without building it.

    Attributes:
        summary: what it is, in a few words.
        domain: what it is made of.
        prior: which synthetic images its constants are made from; None where it needs none.
        implementation: ``module:class`` in `sluice.features`; None for those that `sluice.experiments.preparing` reads
            from the data as they are.
    """

    summary: str
    domain: Domain
    prior: str | None = None
    implementation: str | None = None

    @property
    def origin(self) -> str:
        """Where the feature's constants come from: what a certificate says of it."""
        if self.domain == "texts":
            return (
                "Which words there are, and how frequent, comes from a word index that is taken to be public; each text is "
                "transformed by itself."
            )
        if self.prior is None:
            return "It has no constants that were learned from data; each record is transformed by itself."
        return f"Its constants were made from synthetic images ({self.prior}). No record of any data set enters them."


FEATURES: dict[str, FeatureEntry] = {
    "plain": FeatureEntry(summary="the records as they are", domain="records"),
    "scattering": FeatureEntry(summary="scattering coefficients, normalised within each image", domain="images"),
    "bag-of-words": FeatureEntry(summary="which frequent words a text holds", domain="texts"),
    "weighted-words": FeatureEntry(
        summary="words of texts, weighted by place, negation and public rank",
        domain="texts",
        implementation="words:WeightedWords",
    ),
    "whitened-scattering": FeatureEntry(
        summary="scattering coefficients, centred and whitened by synthetic images",
        domain="images",
        prior="pen strokes, silhouettes or dead leaves",
        implementation="whitened:WhitenedScattering",
    ),
    "stroke-net": FeatureEntry(
        summary="a net that was trained to tell random pen strokes apart",
        domain="images",
        prior="pen strokes",
        implementation="nets:StrokeNet",
    ),
    "silhouette-net": FeatureEntry(
        summary="a net that was trained to tell random silhouettes apart",
        domain="images",
        prior="silhouettes",
        implementation="nets:SilhouetteNet",
    ),
    "leaf-net": FeatureEntry(
        summary="a net that was trained to tell scenes of dead leaves apart",
        domain="images",
        prior="dead leaves",
        implementation="nets:LeafNet",
    ),
    "patches": FeatureEntry(
        summary="dictionaries of patches at several scales, whitened and pooled",
        domain="images",
        prior="dead leaves",
        implementation="patches:Patches",
    ),
}


@dataclass(frozen=True, kw_only=True)
class Block:
    """One block of an expression, as it was written: options are not checked here beyond their form."""

    name: str
    weight: float = 1.0
    options: Mapping[str, str | bool] = field(default_factory=dict)

    @property
    def entry(self) -> FeatureEntry:
        return FEATURES[self.name]


def blocks_of(expression: str) -> tuple[Block, ...]:
    """The blocks of an expression such as ``stroke-net:deskew + 0.5 * scattering``.

    Blocks that are computed from records as they are (``plain``, ``scattering``, ``bag-of-words``) and texts stand alone.
    """
    blocks = tuple(_block(part, expression) for part in "".join(expression.split()).split("+"))
    if len(blocks) > 1:
        for block in blocks:
            if block.entry.domain != "images" or block.entry.implementation is None:
                raise _refused(expression, f"{block.name!r} cannot be joined with others")
    return blocks


def has_rows(expression: str) -> bool:
    """Whether an expression makes rows of norm 1 of images."""
    return all(block.entry.domain == "images" and block.entry.implementation for block in blocks_of(expression))


def written(kind: str, options: Any) -> str:
    """A feature as a user would type it: its name, with those of its options (fields) that are not the default."""
    given = []
    for each in fields(options):
        value = getattr(options, each.name)
        if value != each.default:
            given.append(each.name if value is True else f"{each.name}={value}")
    return f"{kind}:{','.join(given)}" if given else kind


def _block(text: str, expression: str) -> Block:
    match = _BLOCK.fullmatch(text)
    if match is None:
        raise _refused(expression, f"{text!r} is not of the form [WEIGHT*]NAME[:OPTION,...]")
    validate.one_of(tuple(FEATURES), features=match["name"])
    try:
        weight = float(match["weight"] or 1.0)
    except ValueError:
        raise _refused(expression, f"{match['weight']!r} is not a number") from None
    if not (math.isfinite(weight) and weight > 0):
        raise _refused(expression, f"the weight {weight:g} must be positive")
    options: dict[str, str | bool] = {}
    for item in (match["options"] or "").split(",") if match["options"] else ():
        name, equals, value = item.partition("=")
        if not name or name in options or (equals and not value):
            raise _refused(expression, f"{item!r} must be an option that stands once: NAME or NAME=VALUE")
        options[name.replace("-", "_")] = value if equals else True
    return Block(name=match["name"], weight=weight, options=options)


def _refused(expression: str, why: str) -> InputError:
    return InputError(f"features={expression!r} is not allowed: {why}. See 'sluice features list'.")


__all__ = ["FEATURES", "Block", "Domain", "FeatureEntry", "blocks_of", "has_rows", "written"]
