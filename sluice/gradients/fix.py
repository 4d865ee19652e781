"""Replacing layers that mix samples by ones that do not."""

from __future__ import annotations

import copy
from collections import OrderedDict

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from sluice._base.errors import UnsupportedModuleError


def fix(module: nn.Module, *, groups: int = 32) -> nn.Module:
    """A copy of the module in which nothing mixes samples; the original is left alone.

    Every BatchNorm becomes a GroupNorm with the same weight and bias (its running statistics are about the data and are
    dropped), and InstanceNorm stops keeping running statistics. The result is another model, to be trained from the start.

    A BatchNorm that applies modules of its own after normalising, such as timm's ``BatchNormAct2d``, becomes a GroupNorm
    followed by these modules. One that computes anything else is refused: replace it by hand.

    Args:
        groups: at most this many groups per GroupNorm; the largest number not above it that divides the channels.
    """
    fixed = copy.deepcopy(module)
    if isinstance(fixed, _BatchNorm):
        return _replacement(fixed, groups, name="")
    replaced: dict[nn.Module, nn.Module] = {}
    for path, parent in list(fixed.named_modules()):
        for name, child in parent.named_children():
            if isinstance(child, _BatchNorm):
                if child not in replaced:
                    replaced[child] = _replacement(child, groups, name=f"{path}.{name}" if path else name)
                setattr(parent, name, replaced[child])
    for part in fixed.modules():
        if isinstance(part, _InstanceNorm) and part.track_running_stats:
            part.track_running_stats = False
            part.running_mean = None
            part.running_var = None
            part.num_batches_tracked = None
    return fixed


def _replacement(norm: _BatchNorm, groups: int, *, name: str) -> nn.Module:
    """A GroupNorm, followed by what the module itself applies after normalising."""
    new = _group_norm(norm, groups)
    if type(norm).forward.__module__.startswith("torch.nn."):
        return new
    after = OrderedDict(norm.named_children())
    if not _only_appends(norm):
        raise UnsupportedModuleError(
            f"Module '{name or type(norm).__name__}' ({type(norm).__name__}) is a BatchNorm that computes more than torch's, so "
            "that a GroupNorm in its place would lose something. Replace it by hand, by a module that treats each sample by "
            "itself."
        )
    return nn.Sequential(OrderedDict(norm=new, **after)) if after else new


def _only_appends(norm: _BatchNorm) -> bool:
    """Whether the module is, in evaluation mode, torch's BatchNorm and then its own children in their order."""
    norm = copy.deepcopy(norm).eval()
    with torch.no_grad():
        for tensor in (norm.weight, norm.bias, norm.running_mean):
            if tensor is not None:  # all different, lest zeros hide what comes after
                tensor.copy_(torch.linspace(-1.0, 2.0, norm.num_features))
        x = _example(norm)
        try:
            expected = norm(x)
            found = nn.functional.batch_norm(
                x, norm.running_mean, norm.running_var, norm.weight, norm.bias, norm.running_mean is None, 0.0, norm.eps
            )
            for module in norm.children():
                found = module(found)
        except Exception:  # whatever the module expects, it is not known here
            return False
    return isinstance(expected, Tensor) and expected.shape == found.shape and torch.allclose(expected, found)


def _example(norm: _BatchNorm) -> Tensor:
    axes = {nn.BatchNorm1d: 1, nn.BatchNorm3d: 3}
    spatial = next((count for kind, count in axes.items() if isinstance(norm, kind)), 2)
    like = next((t for t in (norm.weight, norm.running_mean) if t is not None), torch.zeros(()))
    values = torch.linspace(-3.0, 3.0, 2 * norm.num_features * 3**spatial).roll(1)
    return values.reshape(2, norm.num_features, *[3] * spatial).to(like)


def _group_norm(norm: _BatchNorm, groups: int) -> nn.GroupNorm:
    channels = norm.num_features
    count = max(g for g in range(1, min(groups, channels) + 1) if channels % g == 0)
    if channels // count == 1 and channels > 1:
        # One channel in each group would leave nothing to normalise over in a layer without positions.
        count = max((g for g in range(1, channels) if channels % g == 0), default=1)
    reference = norm.weight if norm.affine else None
    device = reference.device if reference is not None else None
    new = nn.GroupNorm(count, channels, eps=norm.eps, affine=norm.affine, device=device)
    if norm.affine:
        with torch.no_grad():
            new.weight.copy_(norm.weight)
            new.bias.copy_(norm.bias)
        new.weight.requires_grad_(norm.weight.requires_grad)
        new.bias.requires_grad_(norm.bias.requires_grad)
    return new.train(norm.training)
