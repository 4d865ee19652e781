"""A net with one hidden layer on any features."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import nn

from sluice.models.activations import Activation, create_activation
from sluice.models.base import FeatureNet


class Perceptron(FeatureNet):
    """Flatten each record, one hidden layer, one linear layer: 4,810 parameters for 1x8x8 and 10 classes."""

    def __init__(
        self, *, input_shape: Sequence[int], classes: int, activation: Activation = "tanh", hidden: int = 64
    ) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Flatten(), nn.Linear(math.prod(input_shape), hidden), create_activation(activation)
        )
        self.classifier = nn.Linear(hidden, classes)
