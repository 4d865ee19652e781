"""Normalisations of scattering coefficients, applied to a batch when it is read.

Group normalisation uses each image alone and is free. Channel normalisation uses statistics of the data set, which have
to be released privately first (:mod:`sluice.features.statistics`) and are public from then on.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from sluice._base import validate
from sluice._base.errors import InputError
from sluice.features.scattering import COEFFICIENTS
from sluice.features.statistics import ChannelStatistics

VARIANCE_FLOOR = 1e-5


@dataclass(frozen=True, kw_only=True)
class GroupNormalisation:
    """Give every group of neighbouring channels of every image mean 0 and variance 1. No parameters.

    ``order_scale`` first multiplies the coefficients of orders 1 and 2. Only the group that also holds order 0 notices:
    with 1/4, the average of the image keeps more weight there.

    Guarantee:
        Row i of the result is a function of row i of the input and of these constants alone, so it costs no privacy.

        | group of one image | result |
        |---|---|
        | all values equal | 0 |
        | NaN or infinity among the values | NaN in that group of that image, nowhere else |
    """

    groups: int = 27
    order_scale: float = 1.0

    def __post_init__(self) -> None:
        validate.positive_integer(groups=self.groups)
        validate.positive(order_scale=self.order_scale)

    def __call__(self, features: Tensor) -> Tensor:
        _require_channels(features)
        if features.shape[1] % self.groups:
            raise InputError(
                f"groups={self.groups} is not allowed for features of {features.shape[1]} channels: it must divide them."
            )
        values = scale_orders(features.float(), self.order_scale)
        if len(values) == 0:
            return values
        return functional.group_norm(values, self.groups, eps=VARIANCE_FLOOR)


@dataclass(frozen=True, kw_only=True, eq=False)
class ChannelNormalisation:
    """Subtract each channel's mean and divide by its deviation; a channel without variance becomes 0.

    Guarantee:
        Row i of the result is a function of row i of the input and of ``statistics``. With statistics released by
        ``private_channel_statistics`` this is post-processing and costs nothing beyond their event.
    """

    statistics: ChannelStatistics

    def __call__(self, features: Tensor) -> Tensor:
        _require_channels(features)
        channels = self.statistics.mean.shape[0]
        if features.shape[1] != channels:
            raise InputError(
                f"features of {features.shape[1]} channels are not allowed: these statistics are of {channels} channels."
            )
        variance = self.statistics.variance
        factor = torch.where(variance > 0, (variance + VARIANCE_FLOOR).rsqrt(), 0.0)
        mean, factor = (vector.to(features.device)[None, :, None, None] for vector in (self.statistics.mean, factor))
        return (features.float() - mean) * factor


def scale_orders(features: Tensor, factor: float) -> Tensor:
    """Multiply the coefficients of orders 1 and 2 and leave those of order 0, in each block of 81 channels."""
    _require_channels(features)
    if features.shape[1] % COEFFICIENTS:
        raise InputError(
            f"features of {features.shape[1]} channels are not allowed: scattering coefficients come {COEFFICIENTS} "
            "for each channel of the image."
        )
    if factor == 1.0:
        return features
    factors = torch.full((features.shape[1],), factor, dtype=features.dtype, device=features.device)
    factors[::COEFFICIENTS] = 1.0
    return features * factors[None, :, None, None]


def _require_channels(features: Tensor) -> None:
    if features.dim() != 4:
        raise InputError(
            f"features.shape={tuple(features.shape)} is not allowed: it must be (samples, channels, height, width)."
        )
