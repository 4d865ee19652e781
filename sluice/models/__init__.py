"""Models that are ordinary PyTorch modules, and a registry of the names that users type.

>>> from sluice.models import create_model
>>> model = create_model("scattering-cnn", (81, 7, 7), 10)
>>> sum(parameter.numel() for parameter in model.parameters())
33066
"""

from sluice.models.activations import Activation, TemperedSigmoid, Tempering, create_activation
from sluice.models.images import ColourPixelNet, ColourScatteringNet, GreyPixelNet, GreyScatteringNet
from sluice.models.linear import LinearClassifier
from sluice.models.perceptron import Perceptron
from sluice.models.registry import activation_of, create_model, describe_models, model_names
from sluice.models.text import BidirectionalLSTM, MeanEmbedding

__all__ = [
    "Activation",
    "BidirectionalLSTM",
    "ColourPixelNet",
    "ColourScatteringNet",
    "GreyPixelNet",
    "GreyScatteringNet",
    "LinearClassifier",
    "MeanEmbedding",
    "Perceptron",
    "TemperedSigmoid",
    "Tempering",
    "activation_of",
    "create_activation",
    "create_model",
    "describe_models",
    "model_names",
]
