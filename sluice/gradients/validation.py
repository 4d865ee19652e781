"""Refusing modules that mix samples, whose per-sample gradients would not be about one sample."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from sluice._base.errors import UnsupportedModuleError


def problems(module: nn.Module) -> list[str]:
    """Why the module cannot be trained privately as it is, one sentence for each part; empty if nothing is known."""
    found = []
    for name, part in module.named_modules():
        if isinstance(part, _BatchNorm) and (part.training or not part.track_running_stats):
            found.append(
                f"Module '{name or type(part).__name__}' ({type(part).__name__}) normalises each sample with "
                "statistics of the whole batch. Replace it by nn.GroupNorm (sluice.gradients.fix(module) does), or freeze it with "
                ".eval() if its statistics are public."
            )
        elif isinstance(part, _InstanceNorm) and part.track_running_stats and part.training:
            found.append(
                f"Module '{name or type(part).__name__}' ({type(part).__name__}) keeps running statistics of the data, "
                "which no noise protects. Set track_running_stats=False (sluice.gradients.fix(module) does)."
            )
        elif isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.max_norm is not None:
            found.append(
                f"Module '{name or type(part).__name__}' ({type(part).__name__}) has max_norm={part.max_norm}: each "
                "forward pass rescales the rows that the batch uses, which no noise protects. Set max_norm=None."
            )
    return found


def refuse_mixing(module: nn.Module) -> None:
    """Raise `UnsupportedModuleError` naming every part that mixes samples and what to put in its place."""
    found = problems(module)
    if found:
        raise UnsupportedModuleError("\n".join(found))


def refuse_complex(module: nn.Module) -> None:
    """Raise `UnsupportedModuleError` if a trainable parameter is complex."""
    for name, parameter in module.named_parameters():
        if parameter.requires_grad and parameter.is_complex():
            raise UnsupportedModuleError(
                f"Parameter '{name}' is complex ({parameter.dtype}), which is not allowed: noise and norms are real. Store "
                "it as torch.view_as_real(parameter), with a last axis of 2, and use torch.view_as_complex(parameter) in "
                "the forward pass; or freeze it."
            )
