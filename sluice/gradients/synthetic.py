"""Inputs and targets made up from shapes and types alone, for checks that must not depend on anybody's record.

Values come from a generator of their own with a fixed seed, so that a model that is refused is refused for what it is, in
every run, and random numbers of the program are not used up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor

from sluice.gradients.trees import Arguments, batch_size, mapped, take, tensors_in

#: Samples that are made up at once: the first half for one batch, the second half to take its place.
POOL = 8

Maker = Callable[[tuple[int, ...], torch.Generator], Tensor]


@dataclass(frozen=True, kw_only=True)
class Samples:
    """A few samples to check a model on: made up, or an example that the user calls public."""

    pool: Any

    @classmethod
    def of(cls, batch: Any) -> Samples:
        """The samples of a batch, over and over; in the second half each one's place is taken by the next."""
        places = torch.arange(POOL)
        return cls(pool=take(batch, (places + places // (POOL // 2)) % batch_size(batch)))

    def rows(self, *indices: int) -> Any:
        return take(self.pool, torch.tensor(indices))

    def few(self, count: int) -> Any:
        return self.rows(*range(count))

    def constant(self, value: int) -> Samples:
        """Samples whose integers and booleans are all this value: nothing masked, say, or everything."""
        return Samples(pool=mapped(self.pool, lambda t: t if _kind(t) == "float" else torch.full_like(t, value)))

    def others(self, count: int, *, but: int | None = None) -> Any:
        """As many other samples; one of them may be the same, and in the same place, as in `few`."""
        return self.rows(*(i if i == but else POOL // 2 + i for i in range(count)))


def signature(tree: Any) -> Any:
    """Everything about a batch but its values and its size: structure, types, devices, and the axes of one sample."""
    return _described(tree, lambda t: (t.dtype, str(t.device), tuple(t.shape[1:])))


def form(tree: Any) -> Any:
    """The same without the lengths of axes."""
    return _described(tree, lambda t: (t.dtype, str(t.device), t.dim()))


def _described(tree: Any, leaf: Callable[[Tensor], Any]) -> Any:
    if isinstance(tree, Tensor):
        return leaf(tree)
    if isinstance(tree, Arguments):
        constants = tuple((key, repr(value)) for key, value in tree.constants.items())
        return _described(tree.positional, leaf), _described(tree.keywords, leaf), constants
    if isinstance(tree, Mapping):
        return tuple((key, _described(value, leaf)) for key, value in tree.items())
    if isinstance(tree, tuple | list):
        return tuple(_described(value, leaf) for value in tree)
    return type(tree)


def inputs_like(x: Any) -> Iterator[Samples]:
    """Made-up inputs in the form of a batch, the likeliest to be valid first."""
    for makers in _choices(x, {"float": _FLOATS, "integer": _INTEGERS, "bool": _BOOLEANS}):
        yield Samples(pool=_made(x, makers))


def targets_like(y: Any, *, classes: Sequence[int]) -> Iterator[Samples]:
    """Made-up targets in the form of a batch's.

    Args:
        classes: numbers of classes that the model's output may stand for; a target is below it.
    """
    integers: list[Maker] = []
    for high in classes:
        integers += [_below(high), _partly_ignored(high)]
    for makers in _choices(y, {"float": _TARGET_FLOATS, "integer": integers, "bool": _BOOLEANS[:1]}):
        yield Samples(pool=_made(y, makers))


def _choices(tree: Any, makers: dict[str, Sequence[Maker]]) -> Iterator[dict[str, Maker]]:
    """Every combination of makers for the kinds of numbers that the tree holds."""
    kinds = sorted({_kind(t) for t in tensors_in(tree)})
    for chosen in product(*(makers[kind] for kind in kinds)):
        yield dict(zip(kinds, chosen, strict=True))


def _kind(tensor: Tensor) -> str:
    if tensor.dtype is torch.bool:
        return "bool"
    return "float" if tensor.is_floating_point() or tensor.is_complex() else "integer"


def _made(tree: Any, makers: dict[str, Maker]) -> Any:
    generator = torch.Generator().manual_seed(20270301)

    def made(part: Tensor) -> Tensor:
        values = makers[_kind(part)]((POOL, *part.shape[1:]), generator)
        return values.to(dtype=part.dtype, device=part.device)

    return mapped(tree, made)


def _normal(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator)


def _uniform(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.rand(shape, generator=generator)


def _flat(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """One number for each sample."""
    return torch.rand(shape[0], *[1] * (len(shape) - 1), generator=generator).expand(shape)


def _below(high: int, *, low: int = 0) -> Maker:
    def make(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        return torch.randint(low, high, shape, generator=generator)

    return make


def _partly_ignored(high: int) -> Maker:
    """Some entries, never a sample's first, are the index that losses ignore by default. Labels without axes have none."""

    def make(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        values = torch.randint(0, high, shape, generator=generator)
        ignored = torch.rand(shape, generator=generator) < 0.4
        if len(shape) < 2 or not shape[-1]:
            return values
        ignored[..., 0] = False
        return values.masked_fill(ignored, -100)

    return make


def _constant(value: int) -> Maker:
    return lambda shape, _: torch.full(shape, value)


def _bits(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Zeros and ones: valid for any embedding. Sequences begin with a one, since zero often means padding."""
    values = torch.randint(0, 2, shape, generator=generator)
    if len(shape) > 1 and shape[-1] > 1:
        values[..., 0] = 1
    return values


def _flags(first: bool) -> Maker:
    """Masks that hide a few entries whichever way they are read, never the first one of a sequence."""

    def make(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        values = (torch.rand(shape, generator=generator) < 0.3) ^ first
        if len(shape) > 1 and shape[-1] > 1:
            values[..., 0] = first
        return values

    return make


_FLOATS: tuple[Maker, ...] = (_normal, _uniform, _flat)
_INTEGERS: tuple[Maker, ...] = (_bits, _below(3, low=1), _constant(1), _constant(0))
_BOOLEANS: tuple[Maker, ...] = (_flags(False), _flags(True), _constant(0), _constant(1))
_TARGET_FLOATS: tuple[Maker, ...] = (_normal, _uniform, lambda shape, g: _bits(shape, g).float())
