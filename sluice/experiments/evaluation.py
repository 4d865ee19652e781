"""How good a model is."""

from __future__ import annotations

import torch
from torch import nn

from sluice.data import Examples

_BATCH = 2000


@torch.no_grad()
def accuracy(model: nn.Module, examples: Examples) -> float:
    """The share of records that the model puts into the right class."""
    was_training = model.training
    model.eval()
    right = 0
    for positions in torch.arange(len(examples)).split(_BATCH):
        x, y = examples.batch(positions)
        right += int((model(x).argmax(1) == y).sum())
    model.train(was_training)
    return right / len(examples)
