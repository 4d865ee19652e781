"""Nets for texts given as word ids, ``(samples, words)``, with 0 for padding."""

from __future__ import annotations

from torch import Tensor, nn

from sluice.models.activations import Activation, create_activation


class BidirectionalLSTM(nn.Module):
    """Embedding, a bidirectional LSTM, its mean over time, two linear layers: 2,021,202 parameters for 2 classes.

    Padding is a word like any other here, as in the nets this one is compared with.
    """

    def __init__(self, *, vocabulary: int = 20_000, classes: int = 2, activation: Activation = "tanh") -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, 100)
        self.projection = nn.Sequential(nn.Linear(100, 32), create_activation(activation))
        self.recurrent = nn.LSTM(32, 32, batch_first=True, bidirectional=True)
        self.classifier = nn.Sequential(nn.Linear(64, 16), create_activation(activation), nn.Linear(16, classes))

    def forward(self, ids: Tensor) -> Tensor:
        hidden, _ = self.recurrent(self.projection(self.embedding(ids)))
        logits: Tensor = self.classifier(hidden.mean(dim=1))
        return logits


class MeanEmbedding(nn.Module):
    """The mean of the word vectors of a text, padding left out, and one linear layer.

    A text that is nothing but padding has the mean 0.
    """

    def __init__(self, *, vocabulary: int = 20_000, classes: int = 2, dimensions: int = 32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, dimensions)
        self.classifier = nn.Linear(dimensions, classes)

    def forward(self, ids: Tensor) -> Tensor:
        vectors = self.embedding(ids)
        is_word = (ids != 0).unsqueeze(-1).to(vectors.dtype)
        count = is_word.sum(dim=1).clamp(min=1)
        logits: Tensor = self.classifier((vectors * is_word).sum(dim=1) / count)
        return logits
