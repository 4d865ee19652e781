"""The optimizer and schedule that settings name."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LRScheduler

if TYPE_CHECKING:
    from sluice.experiments.settings import TrainSettings

#: PyTorch's own.
_ADAMW_DECAY = 0.01

Kind = TypeVar("Kind", bound=Optimizer)


def make_optimizer(settings: TrainSettings, model: nn.Module) -> tuple[Optimizer, LRScheduler | None]:
    """What applies releases to the model's weights; schedules advance with each release."""
    parameters, lr, decay = model.parameters(), settings.lr, settings.weight_decay
    if settings.optimizer == "sgd":
        optimizer: Optimizer = _uncompiled(torch.optim.SGD)(
            parameters, lr=lr, momentum=settings.momentum, weight_decay=decay or 0.0
        )
    elif settings.optimizer == "adam":
        optimizer = _uncompiled(torch.optim.Adam)(parameters, lr=lr, weight_decay=decay or 0.0)
    else:
        optimizer = _uncompiled(torch.optim.AdamW)(
            parameters, lr=lr, weight_decay=_ADAMW_DECAY if decay is None else decay
        )
    if settings.lr_schedule == "constant":
        return optimizer, None
    if settings.lr_schedule == "linear":
        return optimizer, LambdaLR(optimizer, lambda step: max(0.0, 1 - step / settings.releases))
    if settings.lr_schedule == "step":
        return optimizer, LambdaLR(optimizer, lambda step: 1.0 if 2 * step < settings.releases else 0.1)
    return optimizer, CosineAnnealingLR(optimizer, settings.releases)


def _uncompiled(kind: type[Kind]) -> type[Kind]:
    """The same optimizer for programs that never compile it.

    PyTorch wraps these methods so that its compiler leaves them alone, and with the first call of any of them loads the whole
    compiler, which takes as long as PyTorch itself. Beneath the wrapping they are the very same functions.
    """
    methods = ("add_param_group", "load_state_dict", "state_dict", "zero_grad")
    plain = {name: inspect.unwrap(getattr(kind, name)) for name in methods}
    return type(kind.__name__, (kind,), {**plain, "step": torch.no_grad()(inspect.unwrap(kind.step))})
