"""Any module at all: each sample gets its own copy of the parameters.

The module's forward runs under `torch.func.vmap` over samples, with parameters expanded along the sample axis (no
memory is copied). Autograd's derivative with respect to the expanded parameters *is* the per-sample gradient, from
the same forward and backward pass as everything else: nothing is replayed, so dropout inside needs no care.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.utils._pytree import tree_flatten, tree_unflatten

from sluice._base.errors import UnsupportedModuleError
from sluice.gradients.contributions import ExplicitContribution
from sluice.gradients.rules import Call, Rule
from sluice.gradients.trees import mapped, tensors_in


class VmapRule(Rule):
    """Records a module about which nothing is known but that it treats samples one by one.

    Args:
        by_loop: run one sample after the other instead of all under vmap.
    """

    replaces_forward = True

    def __init__(self, *, by_loop: bool = False) -> None:
        self.by_loop = by_loop

    def record(self, module: nn.Module, call: Call) -> Any:
        copies: dict[str, Tensor] = {}
        for name, parameter in module.named_parameters():
            if call.trainable(parameter):
                # Not a view: vmap would otherwise trace back to the parameter itself.
                copy = parameter.detach().expand(call.batch_size, *parameter.shape).requires_grad_(True)
                copies[name] = copy
                tap = call.recording.tap_leaf(copy)
                call.contribute(ExplicitContribution(parameter, tap, _unchanged))

        leaves, structure = tree_flatten((call.inputs, dict(call.keywords)))
        found = iter(call.batch_axes)
        axes = [next(found) if isinstance(leaf, Tensor) else None for leaf in leaves]

        def one_sample(parameters: dict[str, Tensor], values: list[Any]) -> Any:
            single = [v if axis is None else v.unsqueeze(axis) for v, axis in zip(values, axes, strict=True)]
            inputs, keywords = tree_unflatten(single, structure)
            return functional_call(module, parameters, inputs, keywords)

        run = _by_loop if self.by_loop or call.strategy == "loop" else _by_vmap
        return run(one_sample, copies, leaves, axes, call)


def _unchanged(gradient: Tensor) -> Tensor:
    return gradient


def _by_vmap(
    one_sample: Callable[..., Any], copies: dict[str, Tensor], leaves: list[Any], axes: list[int | None], call: Call
) -> Any:
    output: Any = None

    def tensors(parameters: dict[str, Tensor], values: list[Any]) -> list[Tensor]:
        nonlocal output
        output = one_sample(parameters, values)
        return list(tensors_in(output))

    try:
        with warnings.catch_warnings():
            # vmap runs some operations one sample at a time; that this path is slow then needs no warning.
            warnings.filterwarnings("ignore", message="There is a performance drop")
            batched = vmap(tensors, in_dims=(0, axes), randomness="different")(copies, leaves)
    except RuntimeError as error:
        raise UnsupportedModuleError(
            f"Module '{call.name}' has no rule of its own and torch.func.vmap cannot run it ({str(error)[:200]}). "
            "Build it from layers that have a rule, or set "
            f"GradientOptions(strategy={{{call.name!r}: 'loop'}}), which is slow."
        ) from error
    joined = (_joined(value, call) for value in batched)
    return mapped(output, lambda _: next(joined))


def _joined(value: Tensor, call: Call) -> Tensor:
    """``[n, ..., 1, ...]`` with the single sample of each call on the batch axis, to ``[..., n, ...]``."""
    if value.dim() < 2:
        return value
    axis = min(call.batch_axis, value.dim() - 2)
    if value.shape[axis + 1] != 1:
        raise UnsupportedModuleError(
            f"Module '{call.name}' returns a tensor of shape {tuple(value.shape[1:])} for one sample, of which axis {axis} "
            "does not hold the sample (a parameter, say). Return tensors with the samples on that axis only."
        )
    return value.movedim(0, axis).flatten(axis, axis + 1)


def _by_loop(
    one_sample: Callable[..., Any], copies: dict[str, Tensor], leaves: list[Any], axes: list[int | None], call: Call
) -> Any:
    outputs = []
    for i in range(call.batch_size):
        parameters = {name: copy[i] for name, copy in copies.items()}
        values = [v if axis is None else v.select(axis, i) for v, axis in zip(leaves, axes, strict=True)]
        outputs.append(one_sample(parameters, values))
    joined = (
        torch.cat(parts, min(call.batch_axis, parts[0].dim() - 1)) if parts[0].dim() else torch.stack(parts)
        for parts in zip(*map(tensors_in, outputs), strict=True)
    )
    return mapped(outputs[0], lambda _: next(joined))
