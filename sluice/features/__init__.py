"""Features of images and texts that cost no privacy: public constants, and functions of one record at a time.

Names are loaded on first use, so that the catalog can be read without torch.

>>> import torch
>>> from sluice.features import Scattering
>>> Scattering(height=28, width=28)(torch.zeros(2, 28, 28)).shape
torch.Size([2, 81, 7, 7])
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from sluice.features.catalog import FEATURES, Block, FeatureEntry, blocks_of

if TYPE_CHECKING:
    from sluice.features.base import ImageFeature
    from sluice.features.cache import scattering_features
    from sluice.features.normalise import ChannelNormalisation, GroupNormalisation, scale_orders
    from sluice.features.rows import RowFeatures
    from sluice.features.scattering import COEFFICIENTS, Scattering
    from sluice.features.statistics import (
        ChannelStatistics,
        PrivateStatistics,
        private_channel_statistics,
        private_row_mean,
    )

_HOMES = {
    "base": ("ImageFeature",),
    "cache": ("scattering_features",),
    "normalise": ("ChannelNormalisation", "GroupNormalisation", "scale_orders"),
    "rows": ("RowFeatures",),
    "scattering": ("COEFFICIENTS", "Scattering"),
    "statistics": ("ChannelStatistics", "PrivateStatistics", "private_channel_statistics", "private_row_mean"),
}

__all__ = [
    "COEFFICIENTS",
    "FEATURES",
    "Block",
    "ChannelNormalisation",
    "ChannelStatistics",
    "FeatureEntry",
    "GroupNormalisation",
    "ImageFeature",
    "PrivateStatistics",
    "RowFeatures",
    "Scattering",
    "blocks_of",
    "private_channel_statistics",
    "private_row_mean",
    "scale_orders",
    "scattering_features",
]


def __getattr__(name: str) -> Any:
    for module, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"sluice.features.{module}"), name)
    raise AttributeError(f"module 'sluice.features' has no attribute {name!r}")
