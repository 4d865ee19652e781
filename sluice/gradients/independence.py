"""Does a model treat samples one by one? A trial, since a module's type cannot tell."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from sluice._base.errors import InputError, UnsupportedModuleError
from sluice.gradients.probe import seed, undisturbed
from sluice.gradients.trees import apply, batch_size, take, tensors_in
from sluice.gradients.validation import refuse_mixing

#: With equal shapes, equal numbers are computed in the same order, so that differences are hardly rounding.
TOLERANCE = 1e-5


def check_independence(module: nn.Module, example: Any) -> None:
    """Raise if the outputs for the first sample change when the other samples do.

    The model runs twice, in its present mode and with the same random numbers: on the example, and on the first sample
    followed by the others in reverse order with the second one twice. The message names the first module whose output
    for the first sample differs. Passing proves nothing for other inputs; failing proves that samples are mixed.

    Args:
        example: a batch of at least three different samples, on the first axis.
    """
    refuse_mixing(module)
    size = batch_size(example)
    if size < 3:
        raise InputError(f"example has {size} samples, which is not enough: give at least 3 different ones.")
    others = torch.arange(size)
    others[1:] = torch.arange(size - 1, 0, -1)
    others[-1] = size - 1
    name = first_difference(module, example, take(example, others), size=size, row=0)
    if name is not None:
        raise UnsupportedModuleError(mixing_message(module, name))


def first_difference(module: nn.Module, x: Any, other: Any, *, size: int, row: int) -> str | None:
    """The first module, inner ones before those around them, whose output for a sample differs between two batches."""
    before, after = _outputs(module, x, size, row), _outputs(module, other, size, row)
    for (name, old), (same_name, new) in zip(before, after, strict=False):
        if name != same_name or old.shape != new.shape or not close(old, new):
            return name
    return None


def mixing_message(model: nn.Module, name: str) -> str:
    mode = "training" if model.training else "evaluation"
    return (
        f"Module '{name or type(model).__name__}' gives another output for a sample when other samples of its batch "
        f"change (in {mode} mode), so its gradients are not about one sample. Replace what it computes over the batch "
        "axis (normalise over channels or positions instead), or freeze it."
    )


def close(old: Tensor, new: Tensor) -> bool:
    """Whether two tensors are equal but for rounding."""
    if not old.is_floating_point():
        return bool(torch.equal(old, new))
    scale = float(old.abs().max()) if old.numel() else 0.0
    return bool(torch.allclose(old, new, rtol=0, atol=TOLERANCE * scale + 1e-30, equal_nan=True))


def _outputs(module: nn.Module, x: Any, size: int, row: int) -> list[tuple[str, Tensor]]:
    """Name and one sample's output of each module that was called, in order, where the samples are first."""
    names = {part: name for name, part in module.named_modules()}
    seen: list[tuple[str, Tensor]] = []

    def note(part: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        if part in names:
            seen.extend((names[part], t[row].clone()) for t in tensors_in(output) if t.dim() and t.shape[0] == size)

    handle = register_module_forward_hook(note)
    try:
        with undisturbed(module), torch.no_grad():
            seed(0)
            apply(module, x)
    finally:
        handle.remove()
    return seen
