"""One run in Opacus's words, put together: the data, the rate at which they are sampled, and the mechanism."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from sluice._base import validate
from sluice._base.errors import InputError
from sluice.compat.opacus.collating import checked
from sluice.compat.opacus.optimizers import DPOptimizer
from sluice.compat.opacus.translation import Bounds, Hooks, require_meaning
from sluice.mechanism.clipped_release import ClippedRelease
from sluice.mechanism.clipping import Schedule
from sluice.training.arguments import SelectiveArguments
from sluice.training.engine import PrivacyEngine as Engine
from sluice.training.loop import PrivateLoader
from sluice.training.options import TrainingOptions
from sluice.training.weights import PrivateOptimizer

#: Private loaders to those that they were made from: a program may give the former to make_private again.
_ORIGINALS: weakref.WeakKeyDictionary[PrivateLoader, DataLoader[Any]] = weakref.WeakKeyDictionary()


def remember(loader: PrivateLoader, original: DataLoader[Any]) -> None:
    _ORIGINALS[loader] = original


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What make_private was given, under its own names (`PrivacyEngine.make_private`), and what that means here.

    Attributes:
        noise_multiplier: None where a budget decides.
        ledger_target: the budget, for the ledger.
    """

    module: nn.Module
    optimizer: Optimizer
    criterion: Any
    data_loader: DataLoader[Any] | PrivateLoader
    noise_multiplier: float | None
    max_grad_norm: float | Sequence[float]
    batch_first: bool
    loss_reduction: str
    poisson_sampling: bool
    clipping: str
    noise_generator: torch.Generator | None
    grad_sample_mode: str
    wrap_model: bool
    target_unclipped_quantile: float | None
    clipbound_learning_rate: float | None
    unclipped_num_std: float | None
    max_clipbound: float | None
    min_clipbound: float | None
    noise_schedule: Schedule | None
    clip_schedule: Schedule | None
    max_physical_batch_size: int
    ledger: str | Path | None
    ledger_delta: float
    ledger_target: float | None = None

    def __post_init__(self) -> None:
        require_meaning(
            poisson_sampling=self.poisson_sampling, batch_first=self.batch_first, grad_sample_mode=self.grad_sample_mode
        )
        _ = self.bounds  # refuses what does not go together

    @cached_property
    def bounds(self) -> Bounds:
        """How gradients are clipped."""
        return Bounds(
            clipping=self.clipping,
            max_grad_norm=self.max_grad_norm,
            schedule=self.clip_schedule,
            target_unclipped_quantile=self.target_unclipped_quantile,
            clipbound_learning_rate=self.clipbound_learning_rate,
            unclipped_num_std=self.unclipped_num_std,
            max_clipbound=self.max_clipbound,
            min_clipbound=self.min_clipbound,
        )

    @property
    def options(self) -> TrainingOptions:
        """What changes no promise."""
        return TrainingOptions(
            loss_reduction=self.loss_reduction,
            max_physical_batch_size=self.max_physical_batch_size,
            ledger=self.ledger,
            ledger_delta=self.ledger_delta,
            ledger_target=self.ledger_target,
        )

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
        """The mechanism of so many epochs, or of a run without a planned end, with the noise that is given."""
        validate.positive(noise_multiplier=self.noise_multiplier)
        if epochs is None:
            return self._mechanism(1).open_ended(first_stage=self.per_epoch)
        return self._of_epochs(epochs)

    def within(self, *, epsilon: float, delta: float, epochs: int | None, accountant: str) -> ClippedRelease:
        """The mechanism of a budget: with the noise that so many epochs need, or as many releases as the noise allows."""
        if (epochs is None) == (self.noise_multiplier is None):
            raise InputError(
                f"epochs={epochs}, noise_multiplier={self.noise_multiplier} is not allowed: give epochs to have the noise chosen, "
                "or the noise to train for as long as the budget lasts."
            )
        if epochs is None:
            return self._mechanism(1).lasting(epsilon=epsilon, delta=delta, accountant=accountant)
        return self._of_epochs(epochs).calibrate(epsilon=epsilon, delta=delta, accountant=accountant)

    def results(
        self, module: nn.Module, optimizer: DPOptimizer, loader: PrivateLoader, *, engine: Engine
    ) -> tuple[Any, ...]:
        """What make_private returns, by its mode."""
        first = module if self.wrap_model else Hooks(engine)
        if self.grad_sample_mode == "ghost":
            return first, optimizer, nn.CrossEntropyLoss() if self.criterion is None else self.criterion, loader
        return first, optimizer, loader

    def _of_epochs(self, epochs: int) -> ClippedRelease:
        validate.positive_integer(epochs=epochs)
        return self._mechanism(epochs * self.per_epoch)

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
