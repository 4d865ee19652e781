"""The nets of the paper's tables and a transformer: what kernels were first written for."""

from __future__ import annotations

from torch import Tensor, nn

from sluice.experiments.bench.scenarios import Scenario
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
