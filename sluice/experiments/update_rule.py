"""The optimizer and schedule that settings name."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LRScheduler

if TYPE_CHECKING:
    from sluice.experiments.settings import TrainSettings


def make_optimizer(settings: TrainSettings, model: nn.Module) -> tuple[Optimizer, LRScheduler | None]:
    """What applies releases to the model's weights; schedules advance with each release."""
    parameters = model.parameters()
    if settings.optimizer == "sgd":
        optimizer: Optimizer = torch.optim.SGD(parameters, lr=settings.lr, momentum=settings.momentum)
    elif settings.optimizer == "adam":
        optimizer = torch.optim.Adam(parameters, lr=settings.lr)
    else:
        optimizer = torch.optim.AdamW(parameters, lr=settings.lr)
    if settings.lr_schedule == "constant":
        return optimizer, None
    if settings.lr_schedule == "linear":
        return optimizer, LambdaLR(optimizer, lambda step: max(0.0, 1 - step / settings.releases))
    return optimizer, CosineAnnealingLR(optimizer, settings.releases)
