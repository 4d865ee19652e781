"""Finding out, by running the model on a few made-up samples, where the samples are in each layer."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from sluice._base.errors import SluiceError, UnsupportedModuleError
from sluice.gradients.eager import as_written, forget_removed_hooks
from sluice.gradients.functional.trace import Event, NotFollowedError, Tracer, UnitCall, events
from sluice.gradients.plan import Unit
from sluice.gradients.synthetic import Samples
from sluice.gradients.trees import apply, channels_last, leaves_in, tensors_in

#: For each tensor among a call's arguments, the axis that holds the samples, or None.
Axes = tuple[int | None, ...]


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Whatever happens inside leaves random number generators, buffers and training flags as they were.

    Modules run as they are written (`as_written`).
    """
    states = random.getstate(), np.random.get_state()  # noqa: NPY002  (models may draw from the global one)
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    kept = [(module, module.training, dict(module._buffers)) for module in model.modules()]
    with torch.random.fork_rng(), as_written():
        try:
            yield
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])  # noqa: NPY002
            for module, training, own in kept:
                module.training = training
                module._buffers.clear()
                module._buffers.update(own)
            with torch.no_grad():
                for buffer, value in buffers:
                    buffer.copy_(value)


def seed(value: int) -> None:
    """Start every generator that a model may draw from at the same place."""
    torch.default_generator.manual_seed(value)  # torch.manual_seed notes a stack trace for each device that is absent
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(value)
    random.seed(value)
    np.random.seed(value)  # noqa: NPY002


@dataclass(frozen=True, kw_only=True)
class Layout:
    """What a model does with a batch.

    Attributes:
        axes: (unit name, number of the call) to the axes of its arguments that hold the samples.
        outputs: for each tensor of the output, in the order of `tensors_in`, the axis that holds the samples.
        bytes_per_sample: size of the inputs and outputs of units, and of other modules with parameters (frozen ones, say):
            roughly what a recorded forward pass keeps, and how long it takes. Integers do not count: lists of words are as
            long as the longest one of the data, which must not decide how chunks are cut.
        largest_bytes: size of the largest of them, for one sample.
        followed: calls of units that no rule can record, since no argument has the samples on an axis of their own (an
            embedding of positions, samples folded into another axis): their parameters are followed instead.
        events: what parameters go through outside units.
    """

    axes: dict[UnitCall, Axes]
    outputs: Axes
    bytes_per_sample: int
    largest_bytes: int = 0
    followed: frozenset[UnitCall] = frozenset()
    events: tuple[Event, ...] = ()

    @property
    def steps(self) -> int:
        """How many calls are recorded: what a pass takes that does not depend on the number of samples."""
        return len(self.axes) + len(self.events)


def layout(
    model: nn.Module, units: Mapping[nn.Module, Unit], samples: Samples, *, names: Mapping[Tensor, str]
) -> Layout:
    """Find out by running the model on two samples and on three.

    The axis whose size goes from two to three holds the samples. Where the size of an axis depends on the batch in
    another way (samples folded into another axis) none is reported.

    Args:
        names: trainable parameters to their names.
    """
    two, three = (_seen(model, units, samples.few(count), names) for count in (2, 3))
    axes = {
        key: _axes(shapes, three.inputs[key])
        for key, shapes in two.inputs.items()
        if key in three.inputs and len(three.inputs[key]) == len(shapes)
    }
    outputs = _axes(two.outputs, three.outputs) if len(two.outputs) == len(three.outputs) else ()
    finding_axes = {unit.name for unit in units.values() if not unit.rule.owns_batch_axis}
    followed = frozenset(
        key
        for key, shapes in two.inputs.items()
        if three.inputs.get(key) == shapes
        or (key[0] in finding_axes and not any(a is not None for a in axes.get(key, ())))
    )
    return Layout(
        axes=axes,
        outputs=outputs,
        bytes_per_sample=two.size // 2,
        largest_bytes=two.largest // 2,
        followed=followed,
        events=events(two.tracer, three.tracer, followed=followed),
    )


def refuse_routing(
    model: nn.Module, units: Mapping[nn.Module, Unit], samples: Samples, *, names: Mapping[Tensor, str]
) -> None:
    """Raise if shapes inside the model, or which modules are called, depend on what samples hold, as where they are routed.

    What was seen of made-up samples says nothing about others then.
    """
    batches = (samples.few(4), samples.others(4), samples.rows(0, 0, 0, 0), samples.rows(5, 5, 5, 5))
    first, *others = (_seen(model, units, x, names) for x in batches)
    for other in others:
        _refuse_difference(first.inputs, other.inputs, units, reason="is called on other shapes")


def _refuse_difference(
    first: Mapping[UnitCall, object], other: Mapping[UnitCall, object], units: Mapping[nn.Module, Unit], *, reason: str
) -> None:
    # Packed sequences are as long as their samples; their layers find the samples themselves.
    own = {unit.name for unit in units.values() if unit.rule.owns_batch_axis}
    for key in {**first, **other}:
        if key[0] not in own and first.get(key) != other.get(key):
            error = UnsupportedModuleError(
                f"Module '{key[0]}' {reason} when samples hold other values, so that what it computes cannot be recorded in one "
                f"piece. Set GradientOptions(strategy={{{key[0].rpartition('.')[0]!r}: 'loop'}}) for the module that calls it."
            )
            error.module = key[0]
            raise error


def refuse_deciding(
    model: nn.Module, units: Mapping[nn.Module, Unit], samples: Samples, usual: Layout, *, names: Mapping[Tensor, str]
) -> None:
    """Raise if parameters are used in another way where nothing is masked, or everything.

    A model that leaves out a mask without effect decides for the whole batch by the values of all its records, and what was
    seen of made-up samples does not hold for such a batch.

    Args:
        usual: what was found for the samples as they are.
    """
    if all(t.is_floating_point() or t.is_complex() for t in tensors_in(samples.pool)):
        return
    for value in (0, 1):
        try:
            found = layout(model, units, samples.constant(value), names=names)
        except SluiceError:
            raise
        except Exception:  # whatever a model raises on such values: records that hold them would raise it, too
            continue
        _refuse_difference(usual.axes, found.axes, units, reason="gets other arguments")
        for event, other in zip_longest(usual.events, found.events):
            if event != other:
                raise NotFollowedError(
                    (event or other or usual.events[0]).names,
                    "it is used in another way when samples hold other values, as where a mask that hides nothing is left out. "
                    "Compute the same functions of parameters whatever samples hold.",
                )


def _axes(two: list[torch.Size], three: list[torch.Size]) -> Axes:
    return tuple(_axis(a, b) for a, b in zip(two, three, strict=True))


def _axis(two: torch.Size, three: torch.Size) -> int | None:
    if len(two) != len(three):
        return None
    changed = [i for i, (a, b) in enumerate(zip(two, three, strict=True)) if a != b]
    return changed[0] if len(changed) == 1 and two[changed[0]] == 2 and three[changed[0]] == 3 else None


@dataclass(kw_only=True)
class _Seen:
    """Shapes in one forward pass."""

    inputs: dict[UnitCall, list[torch.Size]]
    outputs: list[torch.Size]
    tracer: Tracer
    size: int = 0
    largest: int = 0


def _seen(model: nn.Module, units: Mapping[nn.Module, Unit], x: Any, names: Mapping[Tensor, str]) -> _Seen:
    seen = _Seen(inputs={}, outputs=[], tracer=Tracer(names))
    counts: dict[str, int] = {}
    under_way: list[UnitCall] = []

    def enter(module: nn.Module, inputs: tuple[Any, ...]) -> None:
        unit = units.get(module)
        if unit is not None and torch.is_grad_enabled():
            number = counts.get(unit.name, 0)
            counts[unit.name] = number + 1
            under_way.append((unit.name, number))
            seen.tracer.unit = under_way[0]

    def leave(module: nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any], output: Any) -> None:
        tensors = leaves_in(inputs, keywords)
        is_unit = module in units and torch.is_grad_enabled()
        if is_unit:
            seen.inputs[under_way.pop()] = [tensor.shape for tensor in tensors]
            seen.tracer.unit = under_way[0] if under_way else None
        if is_unit or (module._parameters and not under_way):
            # Attributes only: functions would be taken for the model's.
            numbers = (t for t in (*tensors, *tensors_in(output)) if t.dtype.is_floating_point or t.dtype.is_complex)
            sizes = [math.prod(t.shape) * t.dtype.itemsize for t in numbers]
            seen.size += sum(sizes)
            seen.largest = max([seen.largest, *sizes])

    handles = [
        register_module_forward_pre_hook(enter),
        register_module_forward_hook(leave, with_kwargs=True),
    ]
    try:
        with undisturbed(model), torch.enable_grad(), seen.tracer:
            seen.outputs = [tensor.shape for tensor in tensors_in(apply(model, x))]
    finally:
        for handle in handles:
            handle.remove()
        forget_removed_hooks()
    return seen


def takes_channels_last(model: nn.Module, samples: Samples) -> bool:
    """Whether images can be stored channels last without anyone noticing.

    A model that calls ``view`` on feature maps cannot run so, and outputs that would be stored in another way could
    break the loss.
    """
    few = samples.few(2)
    with undisturbed(model), torch.no_grad():
        expected = apply(model, few)
    try:
        with undisturbed(model), torch.no_grad():
            found = apply(model, channels_last(few))
    except RuntimeError:
        return False
    return [t.stride() for t in tensors_in(expected)] == [t.stride() for t in tensors_in(found)]


def probing_loss(output_tensors: list[Tensor]) -> Tensor:
    """A function of the outputs that has a different, non-zero derivative at each of their entries."""
    terms = [(t.double() * torch.sin(t.double() + 1.0)).sum() for t in output_tensors if t.is_floating_point()]
    return torch.stack(terms).sum() if terms else torch.zeros(())
