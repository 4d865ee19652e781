"""The arguments of a function: mostly tensors and numbers, sometimes lists of them or other structures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from sluice.gradients.functional.pullback import Value

#: What holds nothing else. Looking for it in structures takes longer than many a function.
_LEAVES = (Tensor, Value, int, float, str, type(None), torch.dtype, torch.device)


def leaves(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """All that the arguments hold, in a fixed order."""
    given = [*args, *kwargs.values()]
    return given if _hold_nothing(given) else tree_leaves((args, kwargs))


def changed_leaves(
    change: Callable[[Any], Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The same arguments with each of their `leaves` changed."""
    if _hold_nothing([*args, *kwargs.values()]):
        return tuple(map(change, args)), {name: change(value) for name, value in kwargs.items()}
    changed: tuple[tuple[Any, ...], dict[str, Any]] = tree_map(change, (args, kwargs))
    return changed


def tensors_among(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors that the arguments hold, in the order of `leaves`."""
    return [leaf for leaf in leaves(args, kwargs) if isinstance(leaf, Tensor)]


def _hold_nothing(given: list[Any]) -> bool:
    return all(isinstance(each, _LEAVES) for each in given)
