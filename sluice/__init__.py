"""Differentially private training of PyTorch models by selective release.

Names are loaded on first use, so that ``import sluice`` and the command line start at once.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sluice.experiments.published import load_model
    from sluice.mechanism.base import Mechanism
    from sluice.mechanism.clipped_release import ClippedRelease
    from sluice.mechanism.clipping import FlatClipping, LayerClipping, QuantileClipping, Schedule
    from sluice.mechanism.gates import ClippingBiasGate, CoinGate, Gate
    from sluice.mechanism.scaling import Clip, GlobalScaling, Normalise
    from sluice.mechanism.selective_release import SelectiveRelease
    from sluice.mechanism.thinning import Tempered, ThinningGate
    from sluice.training.engine import PrivacyEngine
    from sluice.training.options import TrainingOptions

__version__ = "0.1.0"

_HOMES = {
    "Clip": "mechanism.scaling",
    "ClippedRelease": "mechanism.clipped_release",
    "ClippingBiasGate": "mechanism.gates",
    "CoinGate": "mechanism.gates",
    "FlatClipping": "mechanism.clipping",
    "Gate": "mechanism.gates",
    "GlobalScaling": "mechanism.scaling",
    "LayerClipping": "mechanism.clipping",
    "Mechanism": "mechanism.base",
    "Normalise": "mechanism.scaling",
    "PrivacyEngine": "training.engine",
    "QuantileClipping": "mechanism.clipping",
    "Schedule": "mechanism.clipping",
    "SelectiveRelease": "mechanism.selective_release",
    "Tempered": "mechanism.thinning",
    "ThinningGate": "mechanism.thinning",
    "TrainingOptions": "training.options",
    "load_model": "experiments.published",
}

__all__ = [
    "Clip",
    "ClippedRelease",
    "ClippingBiasGate",
    "CoinGate",
    "FlatClipping",
    "Gate",
    "GlobalScaling",
    "LayerClipping",
    "Mechanism",
    "Normalise",
    "PrivacyEngine",
    "QuantileClipping",
    "Schedule",
    "SelectiveRelease",
    "Tempered",
    "ThinningGate",
    "TrainingOptions",
    "__version__",
    "load_model",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"sluice.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'sluice' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
