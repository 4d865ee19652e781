"""Opacus's `PrivacyEngine`, with Sluice's behind it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from sluice._base.errors import InputError
from sluice.compat.opacus.accountants import known_accountant
from sluice.compat.opacus.optimizers import DPOptimizer
from sluice.compat.opacus.setup import Setup, remember
from sluice.compat.opacus.validators import ModuleValidator
from sluice.mechanism.clipped_release import ClippedRelease
from sluice.mechanism.clipping import Schedule
from sluice.training.engine import PrivacyEngine as Engine
from sluice.training.loop import PrivateLoader

_STATE = "sluice_state_dict"


class PrivacyEngine:
    """Trains with differential privacy, in Opacus's words (docs/opacus.md).

    Args:
        accountant: "prv" or "rdp". "gdp" is refused: it can say less than the true epsilon.
        secure_mode: noise is cryptographic either way, unless a ``noise_generator`` makes it repeatable.
    """

    def __init__(self, *, accountant: str = "prv", secure_mode: bool = False) -> None:
        self.secure_mode = secure_mode
        self._name = known_accountant(accountant)
        self.accountant = RunAccountant(self)
        self._engine: Engine | None = None

    @property
    def engine(self) -> Engine:
        """Sluice's own engine, once make_private was called."""
        if self._engine is None:
            raise InputError("no run is set up: call make_private or make_private_with_epsilon first.")
        return self._engine

    def make_private(
        self,
        *,
        module: nn.Module,
        optimizer: Optimizer,
        criterion: Any = None,
        data_loader: DataLoader[Any] | PrivateLoader,
        noise_multiplier: float,
        max_grad_norm: float | Sequence[float],
        batch_first: bool = True,
        loss_reduction: str = "mean",
        poisson_sampling: bool = True,
        clipping: str = "flat",
        noise_generator: torch.Generator | None = None,
        grad_sample_mode: str = "hooks",
        wrap_model: bool = True,
        rand_on_empty: bool = False,
        target_unclipped_quantile: float | None = None,
        clipbound_learning_rate: float | None = None,
        unclipped_num_std: float | None = None,
        max_clipbound: float | None = None,
        min_clipbound: float | None = None,
        epochs: int | None = None,
        noise_schedule: Schedule | None = None,
        clip_schedule: Schedule | None = None,
        max_physical_batch_size: int = 256,
        ledger: str | Path | None = None,
        ledger_delta: float = 1e-5,
    ) -> Any:
        """Opacus's make_private, and six arguments of Sluice's.

        Args:
            epochs: how many will be made, where that is known: what stopping early may tell then costs nothing more.
                None for as many as you like; see `get_certified_epsilon`.
            noise_schedule, clip_schedule: factors of noise and bounds, fixed in advance.
            max_physical_batch_size: the largest piece of a batch that goes through the model at once.
            ledger, ledger_delta: a file in which each release is logged, and the delta at which it reports.

        Returns:
            Module (the very one that was given), optimizer, loader; with ``grad_sample_mode="ghost"`` the criterion between the
            last two, as in Opacus; without ``wrap_model`` an object with ``cleanup()`` in the module's place.
        """
        setup = Setup(
            module=module,
            optimizer=optimizer,
            criterion=criterion,
            data_loader=data_loader,
            noise_multiplier=noise_multiplier,
            max_grad_norm=max_grad_norm,
            batch_first=batch_first,
            loss_reduction=loss_reduction,
            poisson_sampling=poisson_sampling,
            clipping=clipping,
            noise_generator=noise_generator,
            grad_sample_mode=grad_sample_mode,
            wrap_model=wrap_model,
            target_unclipped_quantile=target_unclipped_quantile,
            clipbound_learning_rate=clipbound_learning_rate,
            unclipped_num_std=unclipped_num_std,
            max_clipbound=max_clipbound,
            min_clipbound=min_clipbound,
            noise_schedule=noise_schedule,
            clip_schedule=clip_schedule,
            max_physical_batch_size=max_physical_batch_size,
            ledger=ledger,
            ledger_delta=ledger_delta,
        )
        return self._begin(setup, setup.planned(epochs))

    def make_private_with_epsilon(
        self,
        *,
        module: nn.Module,
        optimizer: Optimizer,
        criterion: Any = None,
        data_loader: DataLoader[Any] | PrivateLoader,
        target_epsilon: float,
        target_delta: float,
        epochs: int | None = None,
        max_grad_norm: float | Sequence[float],
        batch_first: bool = True,
        loss_reduction: str = "mean",
        poisson_sampling: bool = True,
        clipping: str = "flat",
        noise_generator: torch.Generator | None = None,
        grad_sample_mode: str = "hooks",
        wrap_model: bool = True,
        rand_on_empty: bool = False,
        target_unclipped_quantile: float | None = None,
        clipbound_learning_rate: float | None = None,
        unclipped_num_std: float | None = None,
        max_clipbound: float | None = None,
        min_clipbound: float | None = None,
        noise_multiplier: float | None = None,
        noise_schedule: Schedule | None = None,
        clip_schedule: Schedule | None = None,
        max_physical_batch_size: int = 256,
        ledger: str | Path | None = None,
    ) -> Any:
        """Opacus's make_private_with_epsilon: the noise that spends at most the target in so many epochs.

        Args:
            noise_multiplier: in place of ``epochs``: the loader then ends where the budget does.
        """
        setup = Setup(
            module=module,
            optimizer=optimizer,
            criterion=criterion,
            data_loader=data_loader,
            noise_multiplier=noise_multiplier,
            max_grad_norm=max_grad_norm,
            batch_first=batch_first,
            loss_reduction=loss_reduction,
            poisson_sampling=poisson_sampling,
            clipping=clipping,
            noise_generator=noise_generator,
            grad_sample_mode=grad_sample_mode,
            wrap_model=wrap_model,
            target_unclipped_quantile=target_unclipped_quantile,
            clipbound_learning_rate=clipbound_learning_rate,
            unclipped_num_std=unclipped_num_std,
            max_clipbound=max_clipbound,
            min_clipbound=min_clipbound,
            noise_schedule=noise_schedule,
            clip_schedule=clip_schedule,
            max_physical_batch_size=max_physical_batch_size,
            ledger=ledger,
            ledger_delta=target_delta,
            ledger_target=target_epsilon,
        )
        mechanism = setup.within(epsilon=target_epsilon, delta=target_delta, epochs=epochs, accountant=self._name)
        return self._begin(setup, mechanism)

    def _begin(self, setup: Setup, mechanism: ClippedRelease) -> tuple[Any, ...]:
        """Set the run up; what `make_private` returns."""
        if self._engine is not None:
            raise InputError("this engine already drives a run: make a new PrivacyEngine for another one.")
        if setup.noise_generator is not None and self.secure_mode:
            raise InputError(
                "noise_generator is not allowed with secure_mode=True: whoever knows its seed can undo the noise."
            )
        engine = Engine(accountant=self._name, seed=setup.seed)
        engine.make_private_by(
            mechanism,
            module=setup.module,
            optimizer=setup.original_optimizer,
            data_loader=setup.source,
            options=setup.options,
        )
        module, optimizer, loader = engine.ordinary_loop(releases_per_pass=setup.per_epoch)
        self._engine = engine
        remember(loader, setup.source)
        private = DPOptimizer(optimizer, mechanism=mechanism, max_grad_norm=setup.max_grad_norm)
        return setup.results(module, private, loader, engine=engine)

    def get_epsilon(self, delta: float) -> float:
        """What the releases so far cost if their number was fixed in advance, as in Opacus."""
        return self.engine.get_epsilon(delta)

    def get_certified_epsilon(self, delta: float) -> float:
        """What the run guarantees whenever and for whatever reason it stops. Quote this one."""
        return self.engine.get_certified_epsilon(delta)

    def is_compatible(
        self, *, module: nn.Module, optimizer: Optimizer | None = None, data_loader: DataLoader[Any] | None = None
    ) -> bool:
        """Whether a module has no part that is known to mix samples."""
        return ModuleValidator.is_valid(module)

    def validate(
        self, *, module: nn.Module, optimizer: Optimizer | None = None, data_loader: DataLoader[Any] | None = None
    ) -> None:
        """Raise if `is_compatible` says no."""
        ModuleValidator.validate(module, strict=True)

    @classmethod
    def get_compatible_module(cls, module: nn.Module) -> nn.Module:
        return ModuleValidator.fix_and_validate(module)

    def save_checkpoint(
        self,
        *,
        path: str | os.PathLike[str] | IO[bytes],
        module: nn.Module,
        optimizer: Optimizer | None = None,
        checkpoint_dict: Mapping[str, Any] | None = None,
    ) -> None:
        """Save all that the next release depends on. Sensitive, unlike the weights alone: keep it private."""
        state = {
            **(checkpoint_dict or {}),
            "module_state_dict": module.state_dict(),
            _STATE: self.engine.state_dict(),
        }
        if optimizer is not None:
            state["optimizer_state_dict"] = optimizer.state_dict()
        torch.save(state, path)

    def load_checkpoint(
        self,
        *,
        path: str | os.PathLike[str] | IO[bytes],
        module: nn.Module,
        optimizer: Optimizer | None = None,
        lost: int = 0,
    ) -> dict[str, Any]:
        """Go on from a checkpoint, on an engine set up with the same arguments; what else was saved is returned.

        Args:
            lost: releases made after the checkpoint, in a program that ended since. Without a ledger nobody else knows them.
        """
        saved: dict[str, Any] = torch.load(path, weights_only=True)
        if _STATE not in saved:
            raise InputError(
                f"{path} is not a checkpoint of this engine: it has no {_STATE!r}. One of Opacus cannot be read."
            )
        self.engine.load_state_dict(saved.pop(_STATE), lost=lost)
        return saved


class RunAccountant:
    """What a run has cost so far, under the name that Opacus has for it."""

    def __init__(self, engine: PrivacyEngine) -> None:
        self._owner = engine

    def get_epsilon(self, delta: float) -> float:
        """`PrivacyEngine.get_epsilon`."""
        return self._owner.get_epsilon(delta)

    def __len__(self) -> int:
        """How many releases are charged."""
        return sum(count for _, _, count in self.history)

    @property
    def history(self) -> list[tuple[float, float, int]]:
        """``(noise_multiplier, sample_rate, releases)`` of each stretch of equal releases."""
        engine = self._owner.engine
        mechanism = engine.mechanism
        assert isinstance(mechanism, ClippedRelease)
        return mechanism.history(engine.spent)

    def step(self, *, noise_multiplier: float, sample_rate: float) -> None:
        raise InputError(
            "accountant.step() is not allowed: releases of a run are counted, and logged, by its engine. For steps of your own "
            "use sluice.compat.opacus.accountants.PRVAccountant()."
        )


__all__ = ["PrivacyEngine", "RunAccountant"]
