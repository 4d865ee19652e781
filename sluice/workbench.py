"""What a procedure works with: records by index, their gradients and losses, the weights, and randomness."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sluice.batches import Batches, split_pair
from sluice.gradients import Chunk, PerSampleGradients
from sluice.gradients.trees import apply
from sluice.noise import NoiseSource
from sluice.optimizer import Updates

Loss = Callable[[Any, Any], Tensor]


@dataclass(frozen=True, kw_only=True)
class Workbench:
    """The model, the optimizer and the data of one run.

    Attributes:
        before_release: called with the number of a release before it is applied: the ledger's place.
        piece_size: so many records at most are read at once.
    """

    gradients: PerSampleGradients
    batches: Batches
    updates: Updates
    noise: NoiseSource
    piece_size: int
    before_release: Callable[[int], None]

    @property
    def dataset_size(self) -> int:
        return self.batches.size

    @property
    def module(self) -> nn.Module:
        return self.gradients.module

    def zeros(self) -> dict[str, Tensor]:
        """Fresh accumulators, parameter name to tensor."""
        return self.gradients.zeros()

    def chunks(self, indices: Tensor, loss: Loss, *, norms_only: bool = False) -> Iterator[Chunk]:
        """Per-sample gradients of the named records, chunk by chunk."""
        for x, y in self.pairs(indices):
            yield from self.gradients.chunks(x, y, loss, norms_only=norms_only)

    def pairs(self, indices: Tensor) -> Iterator[tuple[Any, Any]]:
        """The named records as (inputs, target), in pieces."""
        for piece in self.batches.pieces(indices, self.piece_size):
            yield split_pair(piece)

    def raw_losses(self, indices: Tensor, loss: Loss) -> Tensor:
        """The loss of each named record at the present weights, in float64, dropout off.

        Guarantee:
            Sensitive: un-noised values of the training data. Entry i depends on record i and the weights alone.
        """
        parts = [torch.zeros(0, dtype=torch.float64)]
        with torch.no_grad(), evaluating(self.module):
            for x, y in self.pairs(indices):
                output = apply(self.module, self.gradients.arranged(x))
                each = torch.func.vmap(lambda out, target: loss(out.unsqueeze(0), target.unsqueeze(0)).sum())
                parts.append(each(output, y).double().cpu())
        return torch.cat(parts)

    def apply(self, released: Mapping[str, Tensor]) -> None:
        """Update the weights with a released gradient."""
        self.updates.apply(released)


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Evaluation mode inside the block; every submodule gets its own mode back."""
    training = {part: part.training for part in module.modules()}
    module.eval()
    try:
        yield
    finally:
        for part, was in training.items():
            part.training = was


__all__ = ["Loss", "Workbench", "evaluating"]
