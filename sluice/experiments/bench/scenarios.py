"""What is measured: a model, and batches of random data of the right shapes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A model and the batches it is measured on.

    Attributes:
        shape: of one record.
        vocabulary: number of words, if records hold words; None if they hold numbers.
        targets: shape of one record's target; each entry is a class.
    """

    model: Callable[[], nn.Module]
    shape: tuple[int, ...]
    classes: int
    vocabulary: int | None = None
    targets: tuple[int, ...] = ()

    def batch(self, size: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(size)
        if self.vocabulary is None:
            x = torch.randn(size, *self.shape, generator=generator)
        else:
            x = torch.randint(0, self.vocabulary, (size, *self.shape), generator=generator)
        return x, torch.randint(0, self.classes, (size, *self.targets), generator=generator)

    @property
    def has_images(self) -> bool:
        return len(self.shape) == 3


def losses(output: Tensor, target: Tensor) -> Tensor:
    """Cross entropy of each record."""
    each = F.cross_entropy(output, target, reduction="none")
    return each.flatten(1).mean(1) if each.dim() > 1 else each


def mean_loss(output: Tensor, target: Tensor) -> Tensor:
    """Their average."""
    return losses(output, target).mean()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer of every method."""
    return torch.optim.SGD(model.parameters(), lr=0.01)
