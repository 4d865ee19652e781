"""dp-accounting's events and the frame of its accountants, and nothing else of it.

The whole package loads scipy.stats, scipy.signal and scipy.optimize, which takes longer than most accounts. So
`sluice.accounting` lets it be loaded module by module: ``dp_accounting.rdp`` and ``dp_accounting.pld``, written out where
they are used, are loaded there on first use, as scipy does with ``scipy.special`` and the rest of its own.
"""

from __future__ import annotations

from dp_accounting.dp_event import (
    ComposedDpEvent,
    DiscreteLaplaceDpEvent,
    DpEvent,
    GaussianDpEvent,
    LaplaceDpEvent,
    MixtureOfGaussiansDpEvent,
    NonPrivateDpEvent,
    NoOpDpEvent,
    PoissonSampledDpEvent,
    RepeatAndSelectDpEvent,
    SelfComposedDpEvent,
    TruncatedSubsampledGaussianDpEvent,
    UnsupportedDpEvent,
    ZCDpEvent,
)
from dp_accounting.privacy_accountant import NeighboringRelation, PrivacyAccountant

__all__ = [
    "ComposedDpEvent",
    "DiscreteLaplaceDpEvent",
    "DpEvent",
    "GaussianDpEvent",
    "LaplaceDpEvent",
    "MixtureOfGaussiansDpEvent",
    "NeighboringRelation",
    "NoOpDpEvent",
    "NonPrivateDpEvent",
    "PoissonSampledDpEvent",
    "PrivacyAccountant",
    "RepeatAndSelectDpEvent",
    "SelfComposedDpEvent",
    "TruncatedSubsampledGaussianDpEvent",
    "UnsupportedDpEvent",
    "ZCDpEvent",
]
