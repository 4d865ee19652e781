"""What happens where a function is given samples together with something computed from parameters alone.

A rule is called with the function's own arguments, in which `Value` stands for what was computed from parameters. It
returns the function's result, after saying what it contributes to the per-sample gradients of the values; or
NotImplemented, and the function runs under `torch.func.vmap`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sluice.gradients.functional.meeting import Meeting
from sluice.gradients.functional.pullback import Value
from sluice.gradients.functional.trace import Place

FunctionRule = Callable[..., Any]

RULES: dict[str, FunctionRule] = {}


def rule(*names: str) -> Callable[[FunctionRule], FunctionRule]:
    def register(function: FunctionRule) -> FunctionRule:
        RULES.update(dict.fromkeys(names, function))
        return function

    return register


def plain(value: Any) -> Any:
    return value.plain if isinstance(value, Value) else value


#: Functions that only arrange the entries of one tensor anew, or leave some out.
_ARRANGING = frozenset(
    (
        *(
            "view",
            "reshape",
            "view_as",
            "reshape_as",
            "flatten",
            "unflatten",
            "ravel",
            "squeeze",
            "unsqueeze",
            "__get__",
        ),
        *(
            "transpose",
            "swapaxes",
            "swapdims",
            "t",
            "permute",
            "movedim",
            "moveaxis",
            "select",
            "narrow",
            "chunk",
            "split",
        ),
        *("unbind", "tensor_split", "contiguous", "clone", "alias", "flip", "roll", "rot90", "neg", "float", "double"),
    )
)


def keeps_norms(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float | None:
    """The factor by which a gradient's norm changes on the way back through a function of one value, if it is one factor.

    Only an arrangement of a value's entries, in which each of them occurs at most once, has one.
    """
    if name in _ARRANGING:
        return 1.0
    if name == "__getitem__":
        index = args[1] if isinstance(args[1], tuple) else (args[1],)
        return 1.0 if all(isinstance(i, int | slice | None) or i is Ellipsis for i in index) else None
    if name == "embedding" and isinstance(args[0], Tensor):
        distinct = torch.unique(args[0]).numel() == args[0].numel()
        plain = kwargs.get("padding_idx") is None and not kwargs.get("scale_grad_by_freq") and len(args) == 2
        return 1.0 if distinct and plain else None
    if name in ("mul", "div") and len(args) == 2 and not kwargs:
        numbers = [arg for arg in args if isinstance(arg, int | float)]
        if len(numbers) == 1 and isinstance(args[0], Value) and numbers[0] != 0:
            return abs(numbers[0]) if name == "mul" else 1 / abs(numbers[0])
    return None


@rule(
    *("add", "add_", "sub", "sub_", "subtract", "rsub", "__rsub__", "mul", "mul_", "multiply", "div", "div_", "divide"),
    *("true_divide", "__rdiv__", "__rtruediv__", "pow", "__pow__", "__rpow__", "where", "maximum", "minimum", "lerp"),
    *("addcmul", "addcdiv", "atan2", "hypot", "logaddexp", "fmod", "remainder", "__iadd__", "__isub__", "__imul__"),
)
def _broadcasting(meeting: Meeting, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Entry by entry: each sample has its own value, which broadcasts against the other tensors."""
    place = meeting.output
    tensors = [arg for arg in (*args, *kwargs.values()) if isinstance(arg, Tensor)]
    values = [arg.tensor for arg in (*args, *kwargs.values()) if isinstance(arg, Value)]
    if place is None:
        return NotImplemented
    axes = max(tensor.dim() for tensor in (*tensors, *values))
    return substituted(meeting, func, args, kwargs, place=place, axes=axes)


@rule("scaled_dot_product_attention")
def _attention(meeting: Meeting, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A learned bias of the attention, or one key or query for all samples."""
    place = meeting.output
    if place is None or place.axis != 0:
        return NotImplemented
    axes = max(arg.dim() for arg in args if isinstance(arg, Tensor))
    return substituted(meeting, func, args, kwargs, place=place, axes=axes)


def substituted(
    meeting: Meeting,
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    place: Place,
    axes: int,
) -> Any:
    """The function of the same arguments, where each sample has its own values."""
    values = [arg for arg in (*args, *kwargs.values()) if isinstance(arg, Value)]
    if not all(meeting.fits(value, place=place, axes=axes) for value in values):
        return NotImplemented

    def own(arg: Any) -> Any:
        return meeting.for_each_sample(arg, place=place, axes=axes) if isinstance(arg, Value) else arg

    return func(*(own(arg) for arg in args), **{name: own(arg) for name, arg in kwargs.items()})


@rule("__setitem__")
def _written(meeting: Meeting, func: Any, target: Any, index: Any, value: Any) -> Any:
    """A part of every sample is overwritten: ``x[:, 0] = token``."""
    first, place = index[0] if isinstance(index, tuple) else index, Place(axis=0, fold=1)
    if isinstance(target, Value) or meeting.place(target) != place or first != slice(None):
        return NotImplemented
    return substituted(meeting, func, (target, index, value), {}, place=place, axes=target[index].dim())
