"""Models that are ordinary PyTorch modules, and a registry of the names that users type.

Nets are loaded on first use, so that names of models can be read without torch.

>>> from sluice.models import create_model
>>> model = create_model("scattering-cnn", (81, 7, 7), 10)
>>> sum(parameter.numel() for parameter in model.parameters())
33066
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from sluice.models.registry import (
    REGRESSORS,
    activation_of,
    create_model,
    create_regressor,
    describe_models,
    model_names,
)

if TYPE_CHECKING:
    from sluice.models.activations import Activation, TemperedSigmoid, Tempering, create_activation
    from sluice.models.images import ColourPixelNet, ColourScatteringNet, GreyPixelNet, GreyScatteringNet
    from sluice.models.linear import BagOfWordsClassifier, LinearClassifier, SoftmaxRegression
    from sluice.models.perceptron import Perceptron
    from sluice.models.shrinkage import accumulated_noise, shrunk
    from sluice.models.sparse import SparseLinear
    from sluice.models.stored import StoredLinear
    from sluice.models.text import BidirectionalLSTM, MeanEmbedding

_HOMES = {
    "activations": ("Activation", "TemperedSigmoid", "Tempering", "create_activation"),
    "images": ("ColourPixelNet", "ColourScatteringNet", "GreyPixelNet", "GreyScatteringNet"),
    "linear": ("BagOfWordsClassifier", "LinearClassifier", "SoftmaxRegression"),
    "perceptron": ("Perceptron",),
    "shrinkage": ("accumulated_noise", "shrunk"),
    "sparse": ("SparseLinear",),
    "stored": ("StoredLinear",),
    "text": ("BidirectionalLSTM", "MeanEmbedding"),
}

__all__ = [
    "REGRESSORS",
    "Activation",
    "BagOfWordsClassifier",
    "BidirectionalLSTM",
    "ColourPixelNet",
    "ColourScatteringNet",
    "GreyPixelNet",
    "GreyScatteringNet",
    "LinearClassifier",
    "MeanEmbedding",
    "Perceptron",
    "SoftmaxRegression",
    "SparseLinear",
    "StoredLinear",
    "TemperedSigmoid",
    "Tempering",
    "accumulated_noise",
    "activation_of",
    "create_activation",
    "create_model",
    "create_regressor",
    "describe_models",
    "model_names",
    "shrunk",
]


def __getattr__(name: str) -> Any:
    for module, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"sluice.models.{module}"), name)
    raise AttributeError(f"module 'sluice.models' has no attribute {name!r}")
