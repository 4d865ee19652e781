"""Matrix products and convolutions by weights that are computed from parameters."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from sluice.gradients.contributions import sum_over_positions
from sluice.gradients.functional.meeting import Meeting
from sluice.gradients.functional.pullback import Value
from sluice.gradients.functional.rules import plain, rule, substituted
from sluice.gradients.functional.trace import Place
from sluice.gradients.layers.convolution import CorrelationContribution
from sluice.gradients.layers.correlation import Geometry
from sluice.gradients.positions import LinearContribution


@rule("linear")
def _linear(meeting: Meeting, func: Any, input: Any, weight: Any, bias: Any = None) -> Any:
    if isinstance(input, Value) or meeting.place(weight) or meeting.place(bias) or plain(weight).dim() != 2:
        return NotImplemented
    return _linear_map(meeting, input, meeting.place(input), weight, bias)


def _linear_map(meeting: Meeting, x: Tensor, place: Place | None, weight: Any, bias: Any = None) -> Any:
    """``x W^T + b`` over the last axis of x, which has the samples at this place."""
    if place is None or place.axis == x.dim() - 1:
        return NotImplemented
    z, tap = meeting.tap(F.linear(x, plain(weight), plain(bias)))

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


@rule("matmul", "mm", "mv", "__matmul__", "__rmatmul__")
def _matmul(meeting: Meeting, func: Any, first: Any, second: Any) -> Any:
    if getattr(func, "__name__", "") == "__rmatmul__":
        first, second = second, first
    if isinstance(first, Value) == isinstance(second, Value):
        return NotImplemented
    axes = len(plain(first).shape), len(plain(second).shape)
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
    return substituted(meeting, torch.matmul, (first, second), {}, place=place, axes=max(axes))


def _matrix_first(meeting: Meeting, matrix: Value, x: Tensor) -> Any:
    """``W x`` with columns of x as positions."""
    place, last = meeting.place(x), x.dim() - 1
    if place is None or place.axis == last - 1:
        return NotImplemented
    axis = last - 1 if place.axis == last else place.axis
    z = _linear_map(meeting, x.transpose(-1, -2), Place(axis=axis, fold=place.fold), matrix)
    return z if z is NotImplemented else z.transpose(-1, -2)


@rule("addmm")
def _addmm(meeting: Meeting, func: Any, input: Any, mat1: Any, mat2: Any, *, beta: Any = 1, alpha: Any = 1) -> Any:
    if beta != 1 or alpha != 1 or isinstance(mat1, Value) or plain(input).dim() != 1 or meeting.place(mat2):
        return NotImplemented
    return _linear_map(meeting, mat1, meeting.place(mat1), _transposed(mat2), input)


@rule("einsum")
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


@rule("conv1d", "conv2d", "conv3d")
def _convolution(
    meeting: Meeting, func: Any, input: Any, weight: Any, bias: Any = None, *spacing: Any, **named: Any
) -> Any:
    stride, padding, dilation, groups = _spacing(*spacing, **named)
    place, rank = meeting.place(input), plain(weight).dim() - 2
    if place != Place(axis=0, fold=1) or isinstance(padding, str) or meeting.place(weight) or meeting.place(bias):
        return NotImplemented
    stride, padding, dilation = (_each(size, rank) for size in (stride, padding, dilation))
    z, tap = meeting.tap(func(input, plain(weight), plain(bias), stride, padding, dilation, groups))
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


def _spacing(stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1) -> tuple[Any, Any, Any, int]:
    """The last arguments of a convolution."""
    return stride, padding, dilation, groups


def _each(size: Any, rank: int) -> tuple[int, ...]:
    return (size,) * rank if isinstance(size, int) else tuple(size) * (rank if len(size) == 1 else 1)
