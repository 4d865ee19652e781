"""Scale and shift of LayerNorm, RMSNorm, GroupNorm and InstanceNorm.

The gradient of the scale is ``b * normalised input`` summed over positions, that of the shift is ``b`` summed: one
row of numbers for each sample. The normalised input is computed once more rather than kept from the forward pass. Kernels in C
have both as by-products of the input's derivative (`sluice.gradients.native.normalisation`).
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.instancenorm import _InstanceNorm

from sluice._base.errors import UnsupportedModuleError
from sluice.gradients.contributions import ExplicitContribution, working
from sluice.gradients.native import kernels
from sluice.gradients.native import normalisation as native
from sluice.gradients.rules import Call, Rule, register


class AffineRule(Rule):
    """A normalisation followed by a scale and a shift."""

    replaces_forward = True
    sums_in_blocks = True

    @abstractmethod
    def normalise(self, module: Any, x: Tensor) -> Tensor:
        """What the scale is multiplied with."""

    @abstractmethod
    def summed(self, module: Any, values: Tensor, call: Call) -> Tensor:
        """``values``, of the output's shape, summed over positions: one row in the scale's shape for each sample."""

    def compiled(self, module: Any, x: Tensor, scale: Tensor, shift: Tensor) -> Tensor | None:
        """The module by a kernel that derives each sample's own copy of scale and shift, if there is one for it."""
        return None

    def record(self, module: Any, call: Call) -> Tensor:
        weight, bias = module.weight, getattr(module, "bias", None)
        if not call.trainable(weight) and not call.trainable(bias):
            unchanged: Tensor = module.forward(*call.inputs, **call.keywords)
            return unchanged
        source = call.argument(0, "input" if not isinstance(module, nn.RMSNorm) else "x")
        self.check(module, source, call)
        if bias is not None and _kernels_serve(source, weight, call):
            copies = [
                p.detach().expand(call.batch_size, *p.shape).requires_grad_(call.trainable(p)) for p in (weight, bias)
            ]
            output = self.compiled(module, source, *copies)
            if output is not None:
                for parameter, copy in zip((weight, bias), copies, strict=True):
                    if call.trainable(parameter):
                        tap = call.recording.tap_leaf(copy)
                        call.contribute(ExplicitContribution(parameter, tap, lambda gradient: gradient))
                return output
        z, tap = call.tap(module.forward(*call.inputs, **call.keywords))
        if call.trainable(weight):
            x = call.save(source)

            def scale(gradient: Tensor) -> Tensor:
                return self.summed(module, gradient * self.normalise(module, working(x)), call)

            call.contribute(ExplicitContribution(weight, tap, scale))
        if bias is not None and call.trainable(bias):
            call.contribute(ExplicitContribution(bias, tap, lambda gradient: self.summed(module, gradient, call)))
        return z

    def check(self, module: Any, x: Tensor, call: Call) -> None:
        """Refuse an input whose samples are not where the module lets them be."""


class TrailingAxesRule(AffineRule):
    """Normalisation over the last axes, any axes in front."""

    def check(self, module: Any, x: Tensor, call: Call) -> None:
        if call.batch_axis >= x.dim() - len(module.normalized_shape):
            raise UnsupportedModuleError(
                f"Module '{call.name}' ({type(module).__name__}) normalises over axis {call.batch_axis} of an input of "
                f"shape {tuple(x.shape)}, which holds the samples. Normalise over the axes after it."
            )

    def summed(self, module: Any, values: Tensor, call: Call) -> Tensor:
        moved = values.movedim(call.batch_axis, 0)
        positions = moved.dim() - 1 - len(module.normalized_shape)
        return moved.sum(tuple(range(1, 1 + positions))) if positions else moved


class LayerNormRule(TrailingAxesRule):
    def normalise(self, module: nn.LayerNorm, x: Tensor) -> Tensor:
        return F.layer_norm(x, module.normalized_shape, eps=module.eps)

    def compiled(self, module: nn.LayerNorm, x: Tensor, scale: Tensor, shift: Tensor) -> Tensor | None:
        return native.rows_norm(x, scale, shift, module.eps)


class RMSNormRule(TrailingAxesRule):
    def normalise(self, module: nn.RMSNorm, x: Tensor) -> Tensor:
        return F.rms_norm(x, module.normalized_shape, eps=module.eps)


class ChannelRule(AffineRule):
    """Normalisation over positions, with one scale for each channel; samples first, channels second."""

    def check(self, module: Any, x: Tensor, call: Call) -> None:
        if call.batch_axis != 0 or (isinstance(module, _InstanceNorm) and x.dim() == module._get_no_batch_dim()):
            raise UnsupportedModuleError(
                f"Module '{call.name}' ({type(module).__name__}) got an input of shape {tuple(x.shape)} whose first "
                "axis does not hold the samples; it takes samples first and channels second."
            )

    def summed(self, module: Any, values: Tensor, call: Call) -> Tensor:
        return values.flatten(2).sum(2) if values.dim() > 2 else values


class GroupNormRule(ChannelRule):
    def normalise(self, module: nn.GroupNorm, x: Tensor) -> Tensor:
        return F.group_norm(x, module.num_groups, eps=module.eps)

    def compiled(self, module: nn.GroupNorm, x: Tensor, scale: Tensor, shift: Tensor) -> Tensor | None:
        return native.group_norm(x, scale, shift, module.num_groups, module.eps)


class InstanceNormRule(ChannelRule):
    def normalise(self, module: Any, x: Tensor) -> Tensor:
        own = module.training or not module.track_running_stats
        if own and module.track_running_stats:
            raise UnsupportedModuleError(
                f"{type(module).__name__} keeps running statistics of the data, which no noise protects. Set "
                "track_running_stats=False."
            )
        return F.instance_norm(x, module.running_mean, module.running_var, use_input_stats=own, eps=module.eps)


def _kernels_serve(x: Tensor, weight: Tensor, call: Call) -> bool:
    first = call.batch_axis == 0 and x.numel() > 0
    plain = call.options.compiled and kernels.available(x, weight) and not torch.is_autocast_enabled("cpu")
    return first and plain


register(nn.LayerNorm, LayerNormRule())
register(nn.RMSNorm, RMSNormRule())
register(nn.GroupNorm, GroupNormRule())
for _kind in (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d):
    register(_kind, InstanceNormRule())
