"""The models that are measured, with batches of random data of the right shapes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from sluice.models import create_model

_WORDS, _VOCABULARY = 80, 20_000
_STEPS, _WIDTH = 128, 128


class TransformerClassifier(nn.Module):
    """Two encoder layers of width 128 over 128 positions, their mean, and one linear layer."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(_WIDTH, 4, dim_feedforward=256, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(_WIDTH, 10)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.encoder(x).mean(1))
        return logits


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A model and the batches it is measured on."""

    model: Callable[[], nn.Module]
    shape: tuple[int, ...]
    classes: int
    vocabulary: int | None = None

    def batch(self, size: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(size)
        if self.vocabulary is None:
            x = torch.randn(size, *self.shape, generator=generator)
        else:
            x = torch.randint(0, self.vocabulary, (size, *self.shape), generator=generator)
        return x, torch.randint(0, self.classes, (size,), generator=generator)

    @property
    def has_images(self) -> bool:
        return len(self.shape) == 3


def _registered(name: str, shape: tuple[int, ...], classes: int, vocabulary: int | None = None) -> Scenario:
    def model() -> nn.Module:
        return create_model(name, shape, classes, vocabulary=vocabulary)

    return Scenario(model=model, shape=shape, classes=classes, vocabulary=vocabulary)


SCENARIOS: dict[str, Scenario] = {
    "pixel-cnn-26k": _registered("pixel-cnn", (1, 28, 28), 10),
    "scattering-cnn-187k": _registered("scattering-cnn", (243, 8, 8), 10),
    "pixel-cnn-551k": _registered("pixel-cnn", (3, 32, 32), 10),
    "bilstm-2.0m": _registered("bilstm", (_WORDS,), 2, _VOCABULARY),
    "transformer": Scenario(model=TransformerClassifier, shape=(_STEPS, _WIDTH), classes=10),
}
