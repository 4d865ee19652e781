"""One run in Opacus's words, put together: the data, the rate at which they are sampled, and the mechanism."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from sluice._base import validate
from sluice._base.errors import InputError
from sluice.compat.opacus.collating import checked
from sluice.compat.opacus.translation import Bounds
from sluice.mechanism.clipped_release import ClippedRelease
from sluice.mechanism.clipping import Schedule
from sluice.training.arguments import SelectiveArguments
from sluice.training.loop import PrivateLoader
from sluice.training.options import TrainingOptions
from sluice.training.weights import PrivateOptimizer

#: Private loaders to those that they were made from: a program may give the former to make_private again.
_ORIGINALS: weakref.WeakKeyDictionary[PrivateLoader, DataLoader[Any]] = weakref.WeakKeyDictionary()


def remember(loader: PrivateLoader, original: DataLoader[Any]) -> None:
    _ORIGINALS[loader] = original


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What make_private was given, as far as it decides what is promised and how it is trained."""

    module: nn.Module
    optimizer: Optimizer
    data_loader: DataLoader[Any] | PrivateLoader
    bounds: Bounds
    noise_multiplier: float | None
    noise_schedule: Schedule | None
    noise_generator: torch.Generator | None
    options: TrainingOptions

    @cached_property
    def source(self) -> DataLoader[Any]:
        """An ordinary loader, its collate function checked."""
        given = self.data_loader
        if isinstance(given, PrivateLoader):
            return _ORIGINALS[given]
        if not isinstance(given, DataLoader):
            raise InputError(f"data_loader is a {type(given).__name__}: it must be a torch.utils.data.DataLoader.")
        return checked(given)

    @property
    def original_optimizer(self) -> Optimizer:
        given = self.optimizer
        return given.original_optimizer if isinstance(given, PrivateOptimizer) else given

    @property
    def seed(self) -> int | None:
        """None for cryptographic noise."""
        return None if self.noise_generator is None else self.noise_generator.initial_seed()

    @cached_property
    def _arguments(self) -> SelectiveArguments:
        return SelectiveArguments(
            data_loader=self.source,
            max_grad_norm=1.0,
            releases=None,
            epochs=None,
            sample_rate=None,
            scaling=None,
            gate=None,
            prior_releases=(),
        )

    @property
    def per_epoch(self) -> int:
        """How many releases make one pass over the data on average."""
        return self._arguments.per_epoch

    def planned(self, epochs: int | None) -> ClippedRelease:
        """The mechanism of so many epochs, or of one without a planned end."""
        if epochs is None:
            return self._mechanism(1).open_ended(first_stage=self.per_epoch)
        validate.positive_integer(epochs=epochs)
        return self._mechanism(epochs * self.per_epoch)

    def within(self, *, epsilon: float, delta: float, epochs: int | None, accountant: str) -> ClippedRelease:
        """The mechanism of a budget: with the noise that so many epochs need, or as many releases as the noise allows."""
        if epochs is None:
            return self._mechanism(1).lasting(epsilon=epsilon, delta=delta, accountant=accountant)
        return self.planned(epochs).calibrate(epsilon=epsilon, delta=delta, accountant=accountant)

    def _mechanism(self, releases: int) -> ClippedRelease:
        rate = self._arguments.rate
        expected = rate * self._arguments.dataset_size
        return ClippedRelease(
            sample_rate=rate,
            expected_batch_size=expected,
            clipping=self.bounds.for_model(self.module, expected_batch_size=expected),
            noise_multiplier=self.noise_multiplier,
            noise_schedule=self.noise_schedule,
            releases=releases,
        )
