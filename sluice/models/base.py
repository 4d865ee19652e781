"""What nets of two parts have in common."""

from __future__ import annotations

from torch import Tensor, nn


class FeatureNet(nn.Module):
    """Features of each example, and a classifier of them."""

    features: nn.Module
    classifier: nn.Module

    def forward(self, examples: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.features(examples))
        return logits
