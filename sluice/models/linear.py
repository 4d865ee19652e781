"""A linear classifier on any features: flattened pixels, coefficients, or bags of words."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor, nn

from sluice.models.sparse import SparseLinear
from sluice.models.stored import StoredLinear


class LinearClassifier(nn.Module):
    """Flatten each record and apply one linear layer (`StoredLinear`). It begins at zero, so no class is preferred at first.

    The loss is convex in its parameters, so any start is as good; zero makes runs comparable.
    """

    def __init__(self, *, input_shape: Sequence[int], classes: int) -> None:
        super().__init__()
        self.flatten = nn.Flatten()
        self.classifier = StoredLinear(math.prod(input_shape), classes)
        nn.init.zeros_(self.classifier.weight)
        nn.init.zeros_(self.classifier.bias)

    def forward(self, features: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.flatten(features))
        return logits


class SoftmaxRegression(nn.Module):
    """One linear layer without a bias, for rows that end in a constant of their own. It begins at zero."""

    def __init__(self, *, width: int, classes: int) -> None:
        super().__init__()
        self.classifier = StoredLinear(width, classes, bias=False)
        nn.init.zeros_(self.classifier.weight)

    def forward(self, rows: Tensor) -> Tensor:
        logits: Tensor = self.classifier(rows)
        return logits


class BagOfWordsClassifier(nn.Module):
    """The linear classifier for bags of words, as rows or as the columns that are not zero (`SparseLinear`).

    Its parameters are those of `LinearClassifier`, and so is what it computes. Without ``bias`` the gradient for a row of
    norm 1 is shorter by a factor of sqrt(2), and so is the noise that hides it.
    """

    def __init__(self, *, words: int, classes: int, bias: bool = True) -> None:
        super().__init__()
        self.classifier = SparseLinear(words, classes, bias=bias)
        for parameter in self.classifier.parameters():
            nn.init.zeros_(parameter)

    def forward(self, bags: Tensor) -> Tensor:
        logits: Tensor = self.classifier(bags)
        return logits
