"""What happens where a function is given samples together with something computed from parameters alone.

A rule is called with the function's own arguments, in which `Value` stands for what was computed from parameters. It
returns the function's result, after saying what it contributes to the per-sample gradients of the values; or
NotImplemented, and the function runs under `torch.func.vmap`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from sluice.gradients.contributions import sum_over_positions
from sluice.gradients.functional.meeting import Meeting
from sluice.gradients.functional.pullback import Value
from sluice.gradients.functional.trace import Place
from sluice.gradients.layers.convolution import CorrelationContribution
from sluice.gradients.layers.correlation import Geometry
from sluice.gradients.layers.embedding import Lookups, RowContribution
from sluice.gradients.positions import LinearContribution

FunctionRule = Callable[..., Any]

RULES: dict[str, FunctionRule] = {}


def _rule(*names: str) -> Callable[[FunctionRule], FunctionRule]:
    def register(rule: FunctionRule) -> FunctionRule:
        RULES.update(dict.fromkeys(names, rule))
        return rule

    return register


def _plain(value: Any) -> Any:
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


@_rule(
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
    return _substituted(meeting, func, args, kwargs, place=place, axes=axes)


@_rule("scaled_dot_product_attention")
def _attention(meeting: Meeting, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A learned bias of the attention, or one key or query for all samples."""
    place = meeting.output
    if place is None or place.axis != 0:
        return NotImplemented
    axes = max(arg.dim() for arg in args if isinstance(arg, Tensor))
    return _substituted(meeting, func, args, kwargs, place=place, axes=axes)


def _substituted(
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


@_rule("linear")
def _linear(meeting: Meeting, func: Any, input: Any, weight: Any, bias: Any = None) -> Any:
    if isinstance(input, Value) or meeting.place(weight) or meeting.place(bias) or _plain(weight).dim() != 2:
        return NotImplemented
    return _linear_map(meeting, input, meeting.place(input), weight, bias)


def _linear_map(meeting: Meeting, x: Tensor, place: Place | None, weight: Any, bias: Any = None) -> Any:
    """``x W^T + b`` over the last axis of x, which has the samples at this place."""
    if place is None or place.axis == x.dim() - 1:
        return NotImplemented
    z, tap = meeting.tap(F.linear(x, _plain(weight), _plain(bias)))

    def by_position(tensor: Tensor) -> Tensor:
        return meeting.by_position(tensor, place)

    if isinstance(weight, Value):
        a = by_position(meeting.save(x))
        meeting.contribute(
            weight,
            lambda parameter: LinearContribution(
                parameter, tap, a, view=by_position, options=meeting.options, lender=meeting.lender
            ),
        )
    meeting.contribute(bias, lambda parameter: sum_over_positions(parameter, tap, by_position))
    return z


def _transposed(matrix: Any) -> Any:
    return matrix.derived(matrix.tensor.t()) if isinstance(matrix, Value) else matrix.t()


@_rule("matmul", "mm", "mv", "__matmul__", "__rmatmul__")
def _matmul(meeting: Meeting, func: Any, first: Any, second: Any) -> Any:
    if getattr(func, "__name__", "") == "__rmatmul__":
        first, second = second, first
    if isinstance(first, Value) == isinstance(second, Value):
        return NotImplemented
    axes = len(_plain(first).shape), len(_plain(second).shape)
    if isinstance(second, Value) and axes[1] == 1:
        z = _linear_map(meeting, first, meeting.place(first), second.derived(second.tensor.unsqueeze(0)))
        return z if z is NotImplemented else z.squeeze(-1)
    if isinstance(second, Value) and axes[1] == 2:
        return _linear_map(meeting, first, meeting.place(first), _transposed(second))
    if isinstance(first, Value) and axes[0] == 2 and axes[1] > 1:
        return _matrix_first(meeting, first, second)
    place = meeting.output
    if place is None or place.axis >= max(axes) - 2:
        return NotImplemented
    return _substituted(meeting, torch.matmul, (first, second), {}, place=place, axes=max(axes))


def _matrix_first(meeting: Meeting, matrix: Value, x: Tensor) -> Any:
    """``W x`` with columns of x as positions."""
    place, last = meeting.place(x), x.dim() - 1
    if place is None or place.axis == last - 1:
        return NotImplemented
    axis = last - 1 if place.axis == last else place.axis
    z = _linear_map(meeting, x.transpose(-1, -2), Place(axis=axis, fold=place.fold), matrix)
    return z if z is NotImplemented else z.transpose(-1, -2)


@_rule("addmm")
def _addmm(meeting: Meeting, func: Any, input: Any, mat1: Any, mat2: Any, *, beta: Any = 1, alpha: Any = 1) -> Any:
    if beta != 1 or alpha != 1 or isinstance(mat1, Value) or _plain(input).dim() != 1 or meeting.place(mat2):
        return NotImplemented
    return _linear_map(meeting, mat1, meeting.place(mat1), _transposed(mat2), input)


@_rule("einsum")
def _einsum(meeting: Meeting, func: Any, equation: Any, *operands: Any) -> Any:
    """A matrix of values applied to the samples; anything else that an equation can say goes by vmap."""
    given = operands[0] if len(operands) == 1 and isinstance(operands[0], list | tuple) else operands
    if not isinstance(equation, str) or "." in equation or "->" not in equation or len(given) != 2:
        return NotImplemented
    terms, _, out = equation.replace(" ", "").partition("->")
    letters = terms.split(",")
    if isinstance(given[0], Value):
        given, letters = given[::-1], letters[::-1]
    (x, value), (of_x, of_value) = given, letters
    place = meeting.place(x)
    if not isinstance(value, Value) or place is None:
        return NotImplemented
    inside = [i for i in of_value if i in of_x and i not in out]
    kept = [i for i in of_value if i in out and i not in of_x]
    rest = [i for i in of_x if i not in inside]
    distinct = all(len(set(term)) == len(term) for term in (of_x, of_value, out))
    covered = len(inside) + len(kept) == len(of_value) and {*rest, *kept} == set(out)
    if not distinct or not covered or of_x[place.axis] in inside:
        return NotImplemented
    sizes = {**dict(zip(of_x, x.shape, strict=True)), **dict(zip(of_value, value.tensor.shape, strict=True))}
    width = math.prod(sizes[i] for i in inside)
    rows = x.permute(*(of_x.index(i) for i in (*rest, *inside))).reshape(*(sizes[i] for i in rest), width)
    matrix = value.tensor.permute(*(of_value.index(i) for i in (*kept, *inside))).reshape(-1, width)
    at = Place(axis=rest.index(of_x[place.axis]), fold=place.fold)
    z = _linear_map(meeting, rows, at, value.derived(matrix))
    if z is NotImplemented:
        return z
    found = [*rest, *kept]
    return z.reshape(*(sizes[i] for i in found)).permute(*(found.index(i) for i in out))


@_rule("conv1d", "conv2d", "conv3d")
def _convolution(
    meeting: Meeting,
    func: Any,
    input: Any,
    weight: Any,
    bias: Any = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Any:
    place, rank = meeting.place(input), _plain(weight).dim() - 2
    if place != Place(axis=0, fold=1) or isinstance(padding, str) or meeting.place(weight) or meeting.place(bias):
        return NotImplemented
    stride, padding, dilation = (_each(size, rank) for size in (stride, padding, dilation))
    z, tap = meeting.tap(func(input, _plain(weight), _plain(bias), stride, padding, dilation, groups))
    if isinstance(weight, Value):
        a = meeting.save(input)
        geometry = Geometry(
            kernel=tuple(weight.tensor.shape[2:]),
            stride=stride,
            dilation=dilation,
            padding=padding,
            groups=groups,
            image=tuple(a.shape[2:]),
            maps=tuple(z.shape[2:]),
            image_channels=a.shape[1],
            map_channels=z.shape[1],
        )
        meeting.contribute(
            weight,
            lambda parameter: CorrelationContribution(
                parameter,
                tap,
                lambda b: (a.movedim(1, -1), b.movedim(1, -1)),
                geometry=geometry,
                strategy="auto",
                options=meeting.options,
                lender=meeting.lender,
            ),
        )
    meeting.contribute(
        bias, lambda parameter: sum_over_positions(parameter, tap, lambda b: b.flatten(2).transpose(1, 2))
    )
    return z


def _each(size: Any, rank: int) -> tuple[int, ...]:
    return (size,) * rank if isinstance(size, int) else tuple(size) * (rank if len(size) == 1 else 1)


@_rule("layer_norm")
def _layer_norm(
    meeting: Meeting,
    func: Any,
    input: Any,
    normalized_shape: Any,
    weight: Any = None,
    bias: Any = None,
    eps: Any = 1e-5,
    *_: Any,
) -> Any:
    if isinstance(input, Value):
        return NotImplemented
    return _scaled(meeting, F.layer_norm(input, tuple(normalized_shape), eps=eps), weight, bias)


@_rule("rms_norm")
def _rms_norm(
    meeting: Meeting, func: Any, input: Any, normalized_shape: Any, weight: Any = None, eps: Any = None
) -> Any:
    if isinstance(input, Value):
        return NotImplemented
    return _scaled(meeting, F.rms_norm(input, tuple(normalized_shape), eps=eps), weight, None)


@_rule("group_norm")
def _group_norm(
    meeting: Meeting,
    func: Any,
    input: Any,
    num_groups: int,
    weight: Any = None,
    bias: Any = None,
    eps: Any = 1e-5,
    *_: Any,
) -> Any:
    if isinstance(input, Value):
        return NotImplemented
    weight, bias = (_for_channels(each, input) for each in (weight, bias))
    return _scaled(meeting, F.group_norm(input, num_groups, eps=eps), weight, bias)


@_rule("batch_norm")
def _batch_norm(
    meeting: Meeting,
    func: Any,
    input: Any,
    running_mean: Any,
    running_var: Any,
    weight: Any = None,
    bias: Any = None,
    training: bool = False,
    momentum: Any = 0.1,
    eps: Any = 1e-5,
    *_: Any,
) -> Any:
    """With public statistics. (vmap gives wrong gradients for one sample that is stored channels last.)"""
    if training or isinstance(input, Value):
        return NotImplemented
    weight, bias = (_for_channels(each, input) for each in (weight, bias))
    return _scaled(meeting, F.batch_norm(input, running_mean, running_var, eps=eps), weight, bias)


@_rule("instance_norm")
def _instance_norm(
    meeting: Meeting,
    func: Any,
    input: Any,
    running_mean: Any = None,
    running_var: Any = None,
    weight: Any = None,
    bias: Any = None,
    use_input_stats: bool = True,
    momentum: Any = 0.1,
    eps: Any = 1e-5,
    *_: Any,
) -> Any:
    if isinstance(input, Value) or running_mean is not None:
        return NotImplemented
    weight, bias = (_for_channels(each, input) for each in (weight, bias))
    return _scaled(meeting, F.instance_norm(input, eps=eps), weight, bias)


def _for_channels(value: Any, x: Tensor) -> Any:
    """One number for each channel, the second axis, to broadcast against x."""
    if value is None:
        return None
    shape = (-1, *[1] * (x.dim() - 2))
    return value.derived(value.tensor.view(shape)) if isinstance(value, Value) else value.view(shape)


def _scaled(meeting: Meeting, x: Tensor, weight: Any, bias: Any) -> Any:
    for function, arg in ((torch.mul, weight), (torch.add, bias)):
        if arg is not None:
            x = _substituted(meeting, function, (x, arg), {}, place=meeting.output, axes=x.dim())  # type: ignore[arg-type]
            if x is NotImplemented:
                return x
    return x


@_rule("prelu")
def _prelu(meeting: Meeting, func: Any, input: Any, weight: Any) -> Any:
    place = meeting.output
    if not isinstance(weight, Value) or isinstance(input, Value) or place is None:
        return NotImplemented
    slope = _for_channels(weight, input) if weight.tensor.numel() > 1 else weight.derived(weight.tensor.reshape(()))
    negative = _substituted(meeting, torch.mul, (input, slope), {}, place=place, axes=input.dim())
    return negative if negative is NotImplemented else torch.where(input > 0, input, negative)


@_rule("embedding")
def _embedding(
    meeting: Meeting,
    func: Any,
    input: Any,
    weight: Any,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    if max_norm is not None:
        return NotImplemented
    return _rows(meeting, input, meeting.place(input), weight, padding=padding_idx, by_frequency=scale_grad_by_freq)


@_rule("__getitem__")
def _indexed(meeting: Meeting, func: Any, table: Any, index: Any) -> Any:
    """Rows of a table that each sample chooses: ``table[ids]``."""
    integers = isinstance(index, Tensor) and index.dtype in (torch.int64, torch.int32)
    if not integers or not isinstance(table, Value) or table.tensor.dim() != 2:
        return NotImplemented
    ids = torch.where(index < 0, index + table.tensor.shape[0], index)
    return _rows(meeting, ids, meeting.place(index), table)


def _rows(
    meeting: Meeting,
    ids: Tensor,
    place: Place | None,
    table: Any,
    *,
    padding: int | None = None,
    by_frequency: bool = False,
) -> Any:
    """The rows of a table that samples ask for."""
    if place is None or not isinstance(table, Value):
        return NotImplemented
    z, tap = meeting.tap(F.embedding(ids, table.plain))
    indices = meeting.by_position(meeting.save(ids).unsqueeze(-1), place).squeeze(-1)
    owners = torch.arange(meeting.samples, device=indices.device).repeat_interleave(indices.shape[1])
    everywhere = Lookups(tokens=indices.reshape(-1).long(), samples=owners, factors=None, batch_size=meeting.samples)
    height, width = table.tensor.shape
    lookups, kept = everywhere.without(padding if padding is None else padding % height)

    def by_lookup(gradient: Tensor) -> Tensor:
        each = meeting.by_position(gradient, place).reshape(-1, width)
        return each if kept is None else each[kept]

    meeting.contribute(
        table,
        lambda parameter: RowContribution(
            parameter, tap, lookups, by_lookup, by_frequency=by_frequency, compiled=meeting.options.compiled
        ),
    )
    return z


@_rule("__setitem__")
def _written(meeting: Meeting, func: Any, target: Any, index: Any, value: Any) -> Any:
    """A part of every sample is overwritten: ``x[:, 0] = token``."""
    first, place = index[0] if isinstance(index, tuple) else index, Place(axis=0, fold=1)
    if isinstance(target, Value) or meeting.place(target) != place or first != slice(None):
        return NotImplemented
    return _substituted(meeting, func, (target, index, value), {}, place=place, axes=target[index].dim())
