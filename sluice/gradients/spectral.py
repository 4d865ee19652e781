"""Spectral normalisation, whose estimate of a weight's largest singular value moves with releases, not with forward passes.

In training mode `torch.nn.utils.parametrizations.spectral_norm` improves its two vectors in every forward pass. How many passes
there are depends on the number of records and of rejected batches, so the vectors would carry both past the noise. Here they
stand still while gradients are recorded, so that the weight is the same function of the parameter for every sample, and
`advance` moves them once after each release: from released weights alone, which costs nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.parametrize import ParametrizationList

from sluice._base.errors import UnsupportedModuleError
from sluice.gradients.sharding import is_sharded


def _standing_still(norm: _SpectralNorm, weight: Tensor, n_power_iterations: int) -> None:
    """In place of the power method."""


#: What is replaced while gradients are recorded: where, the name, and by what.
STANDING_STILL: tuple[Any, str, Any] = (_SpectralNorm, "_power_method", _standing_still)


def advance(module: nn.Module) -> None:
    """Move all spectral norms that are in training mode by what one forward pass would.

    Guarantee:
        What they hold afterwards follows from the present weights and from what they held before: where those are public, it
        is. Call it once for each release.
    """
    with torch.no_grad():
        for weight in _normalised(module):
            weight()


def refuse_sharded_norms(module: nn.Module) -> None:
    """Raise if a weight that is spread over workers has a spectral norm to be moved."""
    for weight in _normalised(module):
        if any(is_sharded(parameter) for parameter in weight.parameters()):
            raise UnsupportedModuleError(
                "spectral_norm in training mode is not possible for a sharded model (fully_shard), since no worker has the whole "
                "weight after a step: freeze it with layer.parametrizations.weight.eval(), or do not shard the model."
            )


def _normalised(module: nn.Module) -> Iterator[ParametrizationList]:
    """The weights that are computed with a spectral norm in training mode."""
    for part in module.modules():
        if isinstance(part, ParametrizationList) and any(
            isinstance(each, _SpectralNorm) and each.training for each in part
        ):
            yield part
