"""Functional forms of layers: normalisations, PReLU, embeddings."""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from sluice.gradients.contributions import ExplicitContribution, working
from sluice.gradients.functional.meeting import Meeting
from sluice.gradients.functional.pullback import Value
from sluice.gradients.functional.rules import plain, rule, substituted
from sluice.gradients.functional.trace import Place
from sluice.gradients.layers.embedding import Lookups, RowContribution, uses


@rule("layer_norm", "rms_norm")
def _trailing_norm(meeting: Meeting, func: Any, *args: Any, **kwargs: Any) -> Any:
    known = F.layer_norm if func is F.layer_norm else F.rms_norm
    given = _bound(known, func, args, kwargs)
    if given is None:
        return NotImplemented
    normalise = partial(known, normalized_shape=tuple(given["normalized_shape"]), eps=given["eps"])
    return _normalised(meeting, given["input"], normalise, given["weight"], given.get("bias"))


def _normalised(meeting: Meeting, x: Tensor, normalise: Any, weight: Any, bias: Any) -> Any:
    """Normalisation over the last axes, scaled and shifted. What is multiplied with the scale is computed once more."""
    place, shape = meeting.place(x), normalise.keywords["normalized_shape"]
    if place is None or place.axis >= x.dim() - len(shape) or meeting.place(weight) or meeting.place(bias):
        return NotImplemented
    affine = {"weight": plain(weight)} | ({} if bias is None else {"bias": plain(bias)})
    z, tap = meeting.tap(normalise(x, **affine))

    def summed(values: Tensor) -> Tensor:
        flat = values.flatten(values.dim() - len(shape))
        return meeting.by_position(flat, place).sum(1).reshape(-1, *shape)

    if isinstance(weight, Value):
        kept = meeting.save(x)
        meeting.contribute(
            weight,
            lambda parameter: ExplicitContribution(parameter, tap, lambda b: summed(b * normalise(working(kept)))),
        )
    meeting.contribute(bias, lambda parameter: ExplicitContribution(parameter, tap, summed))
    return z


@rule("group_norm")
def _group_norm(meeting: Meeting, func: Any, *args: Any, **kwargs: Any) -> Any:
    given = _bound(F.group_norm, func, args, kwargs)
    if given is None:
        return NotImplemented
    return _by_channel(meeting, F.group_norm(given["input"], given["num_groups"], eps=given["eps"]), given)


@rule("batch_norm")
def _batch_norm(meeting: Meeting, func: Any, *args: Any, **kwargs: Any) -> Any:
    """With public statistics. (vmap gives wrong gradients for one sample that is stored channels last.)"""
    given = _bound(F.batch_norm, func, args, kwargs)
    if given is None or given["training"]:
        return NotImplemented
    x, mean, variance = given["input"], given["running_mean"], given["running_var"]
    return _by_channel(meeting, F.batch_norm(x, mean, variance, eps=given["eps"]), given)


@rule("instance_norm")
def _instance_norm(meeting: Meeting, func: Any, *args: Any, **kwargs: Any) -> Any:
    given = _bound(F.instance_norm, func, args, kwargs)
    if given is None or given["running_mean"] is not None:
        return NotImplemented
    return _by_channel(meeting, F.instance_norm(given["input"], eps=given["eps"]), given)


def _by_channel(meeting: Meeting, normalised: Tensor, given: dict[str, Any]) -> Any:
    weight, bias = (_for_channels(given[name], normalised) for name in ("weight", "bias"))
    return _scaled(meeting, normalised, weight, bias)


def _bound(known: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any] | None:
    """The arguments of a call by name, if it is a call of the function that is known and its input has the samples."""
    if func is not known:
        return None
    bound = inspect.signature(known).bind(*args, **kwargs)
    bound.apply_defaults()
    return None if isinstance(bound.arguments["input"], Value) else bound.arguments


def _for_channels(value: Any, x: Tensor) -> Any:
    """One number for each channel, the second axis, to broadcast against x."""
    if value is None:
        return None
    shape = (-1, *[1] * (x.dim() - 2))
    return value.derived(value.tensor.view(shape)) if isinstance(value, Value) else value.view(shape)


def _scaled(meeting: Meeting, x: Tensor, weight: Any, bias: Any) -> Any:
    for function, arg in ((torch.mul, weight), (torch.add, bias)):
        if arg is not None:
            x = substituted(meeting, function, (x, arg), {}, place=meeting.output, axes=x.dim())  # type: ignore[arg-type]
            if x is NotImplemented:
                return x
    return x


@rule("prelu")
def _prelu(meeting: Meeting, func: Any, input: Any, weight: Any) -> Any:
    place = meeting.output
    if not isinstance(weight, Value) or isinstance(input, Value) or place is None:
        return NotImplemented
    slope = _for_channels(weight, input) if weight.tensor.numel() > 1 else weight.derived(weight.tensor.reshape(()))
    negative = substituted(meeting, torch.mul, (input, slope), {}, place=place, axes=input.dim())
    return negative if negative is NotImplemented else torch.where(input > 0, input, negative)


@rule("embedding")
def _embedding(meeting: Meeting, func: Any, *args: Any, **kwargs: Any) -> Any:
    given = _bound(F.embedding, func, args, kwargs)
    if given is None or given["max_norm"] is not None:
        return NotImplemented
    ids, padding, by_frequency = given["input"], given["padding_idx"], given["scale_grad_by_freq"]
    return _rows(meeting, ids, meeting.place(ids), given["weight"], padding=padding, by_frequency=by_frequency)


@rule("__getitem__")
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
    tokens = indices.reshape(-1).long()
    height, width = table.tensor.shape
    kept = slice(None) if padding is None else tokens != padding % height
    lookups = Lookups(tokens=tokens[kept], owners=owners[kept], factors=None, batch_size=meeting.samples)

    def by_lookup(gradient: Tensor) -> Tensor:
        return meeting.by_position(gradient, place).reshape(-1, width)[kept]

    meeting.contribute(
        table,
        lambda parameter: RowContribution(
            parameter, uses(tap, lookups, by_lookup), by_frequency=by_frequency, compiled=meeting.options.compiled
        ),
    )
    return z
