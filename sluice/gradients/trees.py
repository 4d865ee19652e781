"""Batches and outputs as nested tuples, lists and dicts of tensors."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_leaves

from sluice._base.errors import InputError


def leaves_in(inputs: tuple[Any, ...], keywords: Mapping[str, Any]) -> list[Tensor]:
    """The tensors among a call's arguments, in a fixed order."""
    return [leaf for leaf in tree_leaves((inputs, dict(keywords))) if isinstance(leaf, Tensor)]


def tensors_in(tree: Any) -> Iterator[Tensor]:
    """All tensors of a nested structure, in order."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, Mapping):
        for value in tree.values():
            yield from tensors_in(value)
    elif isinstance(tree, PackedSequence):
        yield tree.data
    elif isinstance(tree, list | tuple):
        for value in tree:
            yield from tensors_in(value)
    elif dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        for entry in dataclasses.fields(tree):
            yield from tensors_in(getattr(tree, entry.name))


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
    if isinstance(tree, Tensor):
        return tree[rows]
    if isinstance(tree, dict):
        return {key: take(value, rows) for key, value in tree.items()}
    if isinstance(tree, tuple | list):
        return type(tree)(take(value, rows) for value in tree)
    if tree is None:
        return None
    raise InputError(
        f"A batch holds a {type(tree).__name__}, which is not allowed: give tensors with samples on the first axis, "
        "or tuples, lists or dicts of them."
    )


def batch_size(tree: Any) -> int:
    """The number of samples; all tensors must agree on it."""
    sizes = {tensor.shape[0] if tensor.dim() else None for tensor in tensors_in(tree)}
    if len(sizes) != 1 or None in sizes:
        shown = sorted(str(tuple(tensor.shape)) for tensor in tensors_in(tree))
        raise InputError(f"The batch's tensors must share their first axis, the samples; their shapes are {shown}.")
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
    if isinstance(x, dict):
        return module(**x)
    if isinstance(x, tuple | list):
        return module(*x)
    return module(x)


def channels_last(tree: Any) -> Any:
    """The same structure with every image batch (four axes, floating point) stored channels last."""
    if isinstance(tree, Tensor):
        return _channels_last(tree) if tree.dim() == 4 and tree.is_floating_point() else tree
    if isinstance(tree, dict):
        return {key: channels_last(value) for key, value in tree.items()}
    return type(tree)(channels_last(value) for value in tree) if isinstance(tree, tuple | list) else tree


def _channels_last(images: Tensor) -> Tensor:
    _, channels, height, width = images.shape
    if channels == 1 and images.is_contiguous():
        # The two layouts are the same memory; only these strides tell torch which one is meant.
        return images.as_strided(images.shape, (height * width, 1, width, 1))
    return images.contiguous(memory_format=torch.channels_last)
