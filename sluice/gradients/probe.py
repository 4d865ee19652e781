"""Finding out, by running the model on a few samples, where samples are and whether the gradients are right."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from sluice.gradients.plan import Unit
from sluice.gradients.trees import apply, channels_last, first_rows, leaves_in, tensors_in

#: For each tensor among a call's arguments, the axis that holds the samples, or None.
Axes = tuple[int | None, ...]
_Shapes = dict[tuple[str, int], list[torch.Size]]


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Whatever happens inside leaves random number generators, buffers and training flags as they were.

    The fused inference kernels of torch's transformer layers are off inside: they go past the modules in them.
    """
    fast_path = torch.backends.mha.get_fastpath_enabled()
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    modes = [(module, module.training) for module in model.modules()]
    with torch.random.fork_rng():
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            yield
        finally:
            torch.backends.mha.set_fastpath_enabled(fast_path)
            with torch.no_grad():
                for buffer, value in buffers:
                    buffer.copy_(value)
            for module, training in modes:
                module.training = training


@dataclass(frozen=True, kw_only=True)
class Layout:
    """What a model does with a batch.

    Attributes:
        axes: (unit name, number of the call) to the axes of its arguments that hold the samples.
        bytes_per_sample: size of the units' inputs and outputs, roughly what a recorded forward pass keeps.
    """

    axes: dict[tuple[str, int], Axes]
    bytes_per_sample: int


def layout(model: nn.Module, units: Mapping[nn.Module, Unit], x: Any) -> Layout:
    """Find out by running the model, without gradients, on two samples and on three.

    The axis whose size goes from two to three holds the samples. Where the size of an axis depends on the batch in
    another way (samples folded into another axis) none is reported.
    """
    (two, size_of_two), (three, _) = _shapes(model, units, first_rows(x, 2)), _shapes(model, units, first_rows(x, 3))
    axes = {
        key: tuple(_axis(a, b) for a, b in zip(shapes, three[key], strict=True))
        for key, shapes in two.items()
        if key in three and len(three[key]) == len(shapes)
    }
    return Layout(axes=axes, bytes_per_sample=size_of_two // 2)


def _axis(two: torch.Size, three: torch.Size) -> int | None:
    if len(two) != len(three):
        return None
    changed = [i for i, (a, b) in enumerate(zip(two, three, strict=True)) if a != b]
    return changed[0] if len(changed) == 1 and two[changed[0]] == 2 and three[changed[0]] == 3 else None


def _shapes(model: nn.Module, units: Mapping[nn.Module, Unit], x: Any) -> tuple[_Shapes, int]:
    seen: _Shapes = {}
    counts: dict[str, int] = {}
    size = 0

    def note(module: nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any], output: Any) -> None:
        nonlocal size
        unit = units.get(module)
        if unit is not None:
            number = counts.get(unit.name, 0)
            counts[unit.name] = number + 1
            tensors = leaves_in(inputs, keywords)
            seen[unit.name, number] = [tensor.shape for tensor in tensors]
            size += sum(t.numel() * t.element_size() for t in (*tensors, *tensors_in(output)))

    handle = register_module_forward_hook(note, with_kwargs=True)
    try:
        with undisturbed(model), torch.no_grad():
            apply(model, x)
    finally:
        handle.remove()
    return seen, size


def takes_channels_last(model: nn.Module, x: Any) -> bool:
    """Whether images can be stored channels last without anyone noticing.

    A model that calls ``view`` on feature maps cannot run so, and outputs that would be stored in another way could
    break the loss.
    """
    few = first_rows(x, 2)
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
