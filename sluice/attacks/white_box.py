"""White-Box/Partial (Nasr et al. 2019): the attacker sees the target's last gradient, and knows some of its members."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor, nn

from sluice._base.errors import InputError
from sluice.attacks.fitting import FittedAttack, branch, fit_attack
from sluice.attacks.scores import is_right, losses


@dataclass(frozen=True, kw_only=True, eq=False)
class WhiteBoxFeatures:
    """What the attack net sees of each record.

    Attributes:
        output: logits in descending order.
        loss: the cross entropy, and whether the record is classified correctly.
        label: as one-hot rows.
        error: softmax less one-hot: the gradient of the loss by the logits.
        hidden: the input of the last linear layer. The gradient of that layer's weights is error times hidden, an outer product that
            is made when it is needed.
    """

    output: Tensor
    loss: Tensor
    label: Tensor
    error: Tensor
    hidden: Tensor

    @property
    def blocks(self) -> tuple[Tensor, ...]:
        return self.output, self.loss, self.label, self.error, self.hidden


def white_box_features(logits: ArrayLike, labels: ArrayLike, hidden: ArrayLike) -> WhiteBoxFeatures:
    """The features of records, from the target's logits and what its last linear layer saw."""
    values, given = torch.as_tensor(np.asarray(logits)), torch.as_tensor(np.asarray(labels))
    label = torch.nn.functional.one_hot(given.long(), values.shape[1]).float()
    columns = np.stack([losses(logits, labels), is_right(logits, labels)], axis=1)
    return WhiteBoxFeatures(
        output=values.float().sort(dim=1, descending=True).values,
        loss=torch.as_tensor(columns, dtype=torch.float32),
        label=label,
        error=values.double().softmax(dim=1).float() - label,
        hidden=torch.as_tensor(np.asarray(hidden)).float(),
    )


def last_layer_gradients(error: Tensor, hidden: Tensor) -> Tensor:
    """Each record's gradient of the last weight matrix, ``(records, classes, width)``, in closed form."""
    return error[:, :, None] * hidden[:, None, :]


def last_linear(module: nn.Module) -> nn.Linear:
    """The layer that makes the logits."""
    found = [layer for layer in module.modules() if isinstance(layer, nn.Linear)]
    if not found:
        raise InputError(
            f"model {type(module).__name__} is not allowed in a white-box attack: it has no linear layer whose gradient the "
            "attack could see. Attack it by loss, lira or rmia."
        )
    return found[-1]


def fit_white_box(features: WhiteBoxFeatures, members: ArrayLike, *, seed: int, epochs: int = 50) -> FittedAttack:
    """An attack net for records of the same target whose membership is not known."""
    classes, width = features.error.shape[1], features.hidden.shape[1]
    scale = last_layer_gradients(features.error[:1000], features.hidden[:1000]).square().mean().sqrt()
    return fit_attack(
        lambda: _WhiteBoxNet(classes, width, float(scale) or 1.0),
        features.blocks,
        members,
        standardised=(True, True, False, False, False),
        seed=seed,
        epochs=epochs,
    )


class _WhiteBoxNet(nn.Module):
    def __init__(self, classes: int, width: int, scale: float) -> None:
        super().__init__()
        self._scale = scale
        self.output, self.loss, self.label = branch(classes), branch(2), branch(classes)
        self.gradient = nn.Sequential(
            *(nn.Conv2d(1, 1, kernel_size=5, padding=2), nn.BatchNorm2d(1), nn.ReLU(), nn.MaxPool2d(2, ceil_mode=True)),
            *(nn.Flatten(), nn.Linear(-(-classes // 2) * -(-width // 2), 256), nn.ReLU(), nn.Dropout(0.2)),
            *(nn.Linear(256, 128), nn.ReLU(), nn.Dropout(0.2), nn.Linear(128, 64), nn.ReLU()),
        )
        self.head = nn.Sequential(
            *(nn.Linear(256, 256), nn.ReLU(), nn.Dropout(0.2), nn.Linear(256, 128), nn.ReLU(), nn.Dropout(0.2)),
            *(nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 2)),
        )

    def forward(self, output: Tensor, loss: Tensor, label: Tensor, error: Tensor, hidden: Tensor) -> Tensor:
        gradients = (last_layer_gradients(error, hidden) / self._scale)[:, None]
        parts = [self.output(output), self.loss(loss), self.label(label), self.gradient(gradients)]
        scores: Tensor = self.head(torch.cat(parts, dim=1))
        return scores
