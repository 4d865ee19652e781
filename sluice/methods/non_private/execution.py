"""Ordinary training, epoch by epoch."""

from __future__ import annotations

import torch
from torch import Tensor

from sluice.gradients.trees import apply
from sluice.methods.non_private import NonPrivate
from sluice.training.context import Loss, TrainingContext
from sluice.training.executor import Draft, Executor


class Epochs(Executor[tuple[Tensor, Loss]]):
    """Ordinary training. A release is one pass over the data."""

    takes_workers = True

    def __init__(self, mechanism: NonPrivate, context: TrainingContext) -> None:
        super().__init__(releases=mechanism.releases, context=context)
        self._batch_size = mechanism.batch_size

    def prepare(self, loss: Loss) -> Draft[tuple[Tensor, Loss]]:
        size = self.context.dataset_size
        return Draft(content=(torch.argsort(self.noise.uniform((size,))), loss), measured=size)

    def apply(self, content: tuple[Tensor, Loss]) -> None:
        shuffled, loss = content
        for indices in shuffled.split(self._batch_size):
            self.context.updater.step(self._gradient(indices, loss))
        self.context.updater.keep()

    def _gradient(self, indices: Tensor, loss: Loss) -> dict[str, Tensor]:
        module, gradients = self.context.module, self.context.gradients
        parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
        total = {name: torch.zeros_like(p) for name, p in parameters.items()}
        for x, y in self.context.pairs(self.context.workers.own(indices)):
            share = len(y) / len(indices)
            gradients.prepare(x)
            output = apply(module, gradients.arranged(x))
            found = torch.autograd.grad(loss(output, y) * share, list(parameters.values()))
            for name, gradient in zip(parameters, found, strict=True):
                total[name] += gradient
        return self.context.workers.totals(total)
