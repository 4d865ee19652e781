"""Finding out, by running the model on a few made-up samples, where the samples are in each layer."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from sluice.gradients.plan import Unit
from sluice.gradients.synthetic import Samples
from sluice.gradients.trees import apply, channels_last, leaves_in, tensors_in

#: For each tensor among a call's arguments, the axis that holds the samples, or None.
Axes = tuple[int | None, ...]


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Whatever happens inside leaves random number generators, buffers and training flags as they were.

    The fused inference kernels of torch's transformer layers are off inside: they go past the modules in them.
    """
    fast_path = torch.backends.mha.get_fastpath_enabled()
    states = random.getstate(), np.random.get_state()  # noqa: NPY002  (models may draw from the global one)
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    kept = [(module, module.training, dict(module._buffers)) for module in model.modules()]
    with torch.random.fork_rng():
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            yield
        finally:
            torch.backends.mha.set_fastpath_enabled(fast_path)
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
        bytes_per_sample: size of the units' inputs and outputs, roughly what a recorded forward pass keeps. Integers do
            not count: lists of words are as long as the longest one of the data, which must not decide how chunks are cut.
        largest_bytes: size of the largest of them, for one sample.
    """

    axes: dict[tuple[str, int], Axes]
    outputs: Axes
    bytes_per_sample: int
    largest_bytes: int


def layout(model: nn.Module, units: Mapping[nn.Module, Unit], samples: Samples) -> Layout:
    """Find out by running the model, without gradients, on two samples and on three.

    The axis whose size goes from two to three holds the samples. Where the size of an axis depends on the batch in
    another way (samples folded into another axis) none is reported.
    """
    two, three = _seen(model, units, samples.few(2)), _seen(model, units, samples.few(3))
    axes = {
        key: _axes(shapes, three.inputs[key])
        for key, shapes in two.inputs.items()
        if key in three.inputs and len(three.inputs[key]) == len(shapes)
    }
    outputs = _axes(two.outputs, three.outputs) if len(two.outputs) == len(three.outputs) else ()
    return Layout(axes=axes, outputs=outputs, bytes_per_sample=two.size // 2, largest_bytes=two.largest // 2)


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

    inputs: dict[tuple[str, int], list[torch.Size]]
    outputs: list[torch.Size]
    size: int = 0
    largest: int = 0


def _seen(model: nn.Module, units: Mapping[nn.Module, Unit], x: Any) -> _Seen:
    seen = _Seen(inputs={}, outputs=[])
    counts: dict[str, int] = {}

    def note(module: nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any], output: Any) -> None:
        unit = units.get(module)
        if unit is not None:
            number = counts.get(unit.name, 0)
            counts[unit.name] = number + 1
            tensors = leaves_in(inputs, keywords)
            seen.inputs[unit.name, number] = [tensor.shape for tensor in tensors]
            numbers = (t for t in (*tensors, *tensors_in(output)) if t.is_floating_point() or t.is_complex())
            sizes = [t.numel() * t.element_size() for t in numbers]
            seen.size += sum(sizes)
            seen.largest = max([seen.largest, *sizes])

    handle = register_module_forward_hook(note, with_kwargs=True)
    try:
        with undisturbed(model), torch.no_grad():
            seen.outputs = [tensor.shape for tensor in tensors_in(apply(model, x))]
    finally:
        handle.remove()
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
