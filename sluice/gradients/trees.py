"""Batches and outputs as nested tuples, lists, dicts and dataclasses of tensors."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_leaves

from sluice._base.errors import InputError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arguments:
    """A call with keywords.

    Attributes:
        constants: keywords that hold no tensor, such as switches: the same for all samples.
    """

    positional: tuple[Any, ...]
    keywords: dict[str, Any]
    constants: dict[str, Any]

    @classmethod
    def of(cls, positional: tuple[Any, ...], keywords: Mapping[str, Any]) -> Arguments:
        # A container without a tensor, such as a list of texts, has entries for samples that nobody could tell apart.
        constants = {
            name: value
            for name, value in keywords.items()
            if not isinstance(value, Tensor | list | tuple | Mapping) and next(tensors_in(value), None) is None
        }
        batch = {name: value for name, value in keywords.items() if name not in constants}
        return cls(positional=positional, keywords=batch, constants=constants)

    @property
    def every_keyword(self) -> dict[str, Any]:
        return {**self.keywords, **self.constants}


def leaves_in(inputs: tuple[Any, ...], keywords: Mapping[str, Any]) -> list[Tensor]:
    """The tensors among a call's arguments, in a fixed order."""
    if not keywords and all(isinstance(value, Tensor) for value in inputs):
        return list(inputs)  # as most modules are called; looking for structures takes longer than some of them
    return [leaf for leaf in tree_leaves((inputs, dict(keywords))) if isinstance(leaf, Tensor)]


def tensors_in(tree: Any) -> Iterator[Tensor]:
    """All tensors of a nested structure, in order."""
    if isinstance(tree, Tensor):
        yield tree
    elif dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        for entry in dataclasses.fields(tree):
            yield from tensors_in(getattr(tree, entry.name))
    elif isinstance(tree, Mapping):
        for value in tree.values():
            yield from tensors_in(value)
    elif isinstance(tree, PackedSequence):
        yield tree.data
    elif isinstance(tree, list | tuple):
        for value in tree:
            yield from tensors_in(value)


def mapped(tree: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The same structure with every tensor changed, in the order of `tensors_in`."""
    if isinstance(tree, Tensor):
        return change(tree)
    if isinstance(tree, PackedSequence):
        return tree._replace(data=change(tree.data))
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(mapped(value, change) for value in tree))
    if isinstance(tree, list | tuple):
        return type(tree)(mapped(value, change) for value in tree)
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        parts = {entry.name: mapped(getattr(tree, entry.name), change) for entry in dataclasses.fields(tree)}
        if isinstance(tree, dict):  # outputs of Hugging Face's models are both
            return type(tree)(**{name: part for name, part in parts.items() if part is not None})
        return dataclasses.replace(tree, **parts)
    if isinstance(tree, Mapping):
        return type(tree)({key: mapped(value, change) for key, value in tree.items()})  # type: ignore[call-arg]
    return tree


def take(tree: Any, rows: slice | Tensor) -> Any:
    """The same structure with only some of the samples. Samples are on the first axis of every tensor."""
    require_tensors(tree)
    return mapped(tree, lambda tensor: tensor[rows])


def require_tensors(tree: Any) -> None:
    """Refuse a batch of anything but tensors."""
    if tree is None or isinstance(tree, Tensor):
        return
    if isinstance(tree, Arguments):
        parts: Iterable[Any] = (tree.positional, tree.keywords)
    elif isinstance(tree, PackedSequence) or not isinstance(tree, Mapping | tuple | list):
        raise InputError(
            f"A batch holds a {type(tree).__name__}, which is not allowed: give tensors with samples on the first axis, "
            "or tuples, lists or dicts of them."
        )
    else:
        parts = tree.values() if isinstance(tree, Mapping) else tree
    for part in parts:
        require_tensors(part)


def batch_size(tree: Any) -> int:
    """The number of samples; all tensors must agree on it."""
    sizes = {tensor.shape[0] if tensor.dim() else None for tensor in tensors_in(tree)}
    if len(sizes) != 1 or None in sizes:
        shown = sorted(str(tuple(tensor.shape)) for tensor in tensors_in(tree))
        raise InputError(
            f"The batch's tensors must share their first axis, the samples; their shapes are {shown}. A tensor that is the "
            "same for all samples belongs into a buffer of the model."
        )
    return int(sizes.pop())  # type: ignore[arg-type]


def padded(tree: Any, count: int) -> Any:
    """The same structure with ``count`` samples: the first one is repeated as often as it takes."""
    size = batch_size(tree)
    if size >= count:
        return tree
    rows = torch.zeros(count, dtype=torch.int64)
    rows[:size] = torch.arange(size)
    return take(tree, rows)


def apply(module: nn.Module, x: Any) -> Any:
    """Call the module on a batch: a dict as keywords, a tuple or list as positional arguments."""
    if isinstance(x, Arguments):
        return module(*x.positional, **x.every_keyword)
    if isinstance(x, Mapping):
        return module(**x)
    if isinstance(x, tuple | list):
        return module(*x)
    return module(x)


def channels_last(tree: Any) -> Any:
    """The same structure with every image batch (four axes, floating point) stored channels last."""
    return mapped(tree, _channels_last)


def _channels_last(images: Tensor) -> Tensor:
    if images.dim() != 4 or not images.is_floating_point():
        return images
    _, channels, height, width = images.shape
    if channels == 1 and images.is_contiguous():
        # The two layouts are the same memory; only these strides tell torch which one is meant.
        return images.as_strided(images.shape, (height * width, 1, width, 1))
    return images.contiguous(memory_format=torch.channels_last)
