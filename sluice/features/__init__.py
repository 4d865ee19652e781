"""Features of images that need no training: the scattering transform, cached, and its normalisations.

>>> import torch
>>> from sluice.features import Scattering
>>> Scattering(height=28, width=28)(torch.zeros(2, 28, 28)).shape
torch.Size([2, 81, 7, 7])
"""

from sluice.features.cache import scattering_features
from sluice.features.normalise import ChannelNormalisation, GroupNormalisation, scale_orders
from sluice.features.scattering import COEFFICIENTS, Scattering
from sluice.features.statistics import ChannelStatistics, PrivateStatistics, private_channel_statistics

__all__ = [
    "COEFFICIENTS",
    "ChannelNormalisation",
    "ChannelStatistics",
    "GroupNormalisation",
    "PrivateStatistics",
    "Scattering",
    "private_channel_statistics",
    "scale_orders",
    "scattering_features",
]
