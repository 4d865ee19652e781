"""Black-Box/Shadow (Salem et al. 2019): a shadow model shows how members look, and an attack net learns it."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor, nn

from sluice.attacks.fitting import FittedAttack, branch, fit_attack
from sluice.attacks.scores import is_right


def shadow_features(logits: ArrayLike, labels: ArrayLike) -> tuple[Tensor, Tensor]:
    """Logits in descending order, and whether the label is among them at the top."""
    right = torch.as_tensor(is_right(logits, labels), dtype=torch.float32)[:, None]
    ordered = torch.as_tensor(np.asarray(logits)).float().sort(dim=1, descending=True).values
    return ordered, right


def fit_shadow(
    logits: ArrayLike, labels: ArrayLike, members: ArrayLike, *, seed: int, epochs: int = 50
) -> FittedAttack:
    """An attack net from what the shadow model says of its own members and non-members."""
    classes = np.asarray(logits).shape[1]
    return fit_attack(
        lambda: _ShadowNet(classes),
        shadow_features(logits, labels),
        members,
        standardised=(True, True),
        seed=seed,
        epochs=epochs,
    )


class _ShadowNet(nn.Module):
    def __init__(self, classes: int) -> None:
        super().__init__()
        self.output, self.right = branch(classes), branch(1)
        self.head = nn.Sequential(
            *(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU()),
            *(nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 2)),
        )

    def forward(self, output: Tensor, right: Tensor) -> Tensor:
        scores: Tensor = self.head(torch.cat([self.output(output), self.right(right)], dim=1))
        return scores
