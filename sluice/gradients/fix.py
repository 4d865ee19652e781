"""Replacing layers that mix samples by ones that do not."""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm


def fix(module: nn.Module, *, groups: int = 32) -> nn.Module:
    """A copy of the module in which nothing mixes samples; the original is left alone.

    Every BatchNorm becomes a GroupNorm with the same weight and bias (its running statistics are about the data and are
    dropped), and InstanceNorm stops keeping running statistics. The result is another model, to be trained from the start.

    Args:
        groups: at most this many groups per GroupNorm; the largest number not above it that divides the channels.
    """
    fixed = copy.deepcopy(module)
    if isinstance(fixed, _BatchNorm):
        return _group_norm(fixed, groups)
    replaced: dict[nn.Module, nn.Module] = {}
    for parent in list(fixed.modules()):
        for name, child in parent.named_children():
            if isinstance(child, _BatchNorm):
                if child not in replaced:
                    replaced[child] = _group_norm(child, groups)
                setattr(parent, name, replaced[child])
    for part in fixed.modules():
        if isinstance(part, _InstanceNorm) and part.track_running_stats:
            part.track_running_stats = False
            part.running_mean = None
            part.running_var = None
            part.num_batches_tracked = None
    return fixed


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
