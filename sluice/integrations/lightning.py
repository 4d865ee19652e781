"""Private training by Lightning's `Trainer`, for modules with automatic or manual optimization."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from sluice._base.errors import InputError
from sluice.integrations.privacy import Plan, Privacy, refuse_settings
from sluice.integrations.steps import FixedShapes, ReleaseNumbers, ReleaseOptimizer
from sluice.training.batches import Batches
from sluice.training.engine import PrivacyEngine
from sluice.training.loop import PrivateLoader
from sluice.training.weights import PrivateOptimizer

_STATE = "sluice"

_REFUSED: dict[str, tuple[Any, str]] = {
    "accumulate_grad_batches": (
        1,
        "one step is one release, of a batch of the loader's batch_size records on average. Memory is bounded by "
        "Privacy(max_physical_batch_size=...) however large that is.",
    ),
    "gradient_clip_val": (None, "each record's gradient is clipped at Privacy(max_grad_norm=...)."),
    "precision": ("32-true", "norms are measured in the precision of the parameters."),
    "world_size": (1, "releases are made by one process."),
}


def fit(
    trainer: Trainer,
    module: LightningModule,
    train_dataloader: DataLoader[Any],
    *,
    privacy: Privacy,
    network: nn.Module | None = None,
    ledger: str | Path | None = None,
    val_dataloaders: Any = None,
    ckpt_path: str | None = None,
) -> PrivacyEngine:
    """``trainer.fit(module, train_dataloader)``, every step of which is one release.

    Args:
        trainer: its ``max_steps``, or ``max_epochs``, says how many releases are made.
        train_dataloader: its batch size is that of batches on average; they are Poisson samples.
        network: what ``training_step`` calls, once for each batch. None takes the one part of the module that holds all
            parameters, else the module itself.
        ledger: as in `TrainingOptions`; needed to resume a run whose noise is not seeded.
        ckpt_path: a checkpoint of an earlier call to go on from.

    Returns:
        The engine; ask it for epsilon.

    Guarantee:
        What the ordinary loop of `PrivacyEngine` promises. ``global_step`` is the number of releases, so learning rates and
        checkpoints go by what is public. A checkpoint holds the private state of the run; publish weights alone
        (``save_weights_only``, ``module.state_dict()``). What ``training_step`` logs is about private records; schedulers and
        callbacks that monitor it are refused.
    """
    refuse_settings(trainer, _REFUSED)
    if ckpt_path is not None and ledger is None and privacy.seed is None:
        raise InputError(
            "ckpt_path is not allowed without ledger=...: releases that were made after the checkpoint would not be charged. Give "
            "the ledger that the run was begun with."
        )
    run = _Run(trainer, module, train_dataloader, privacy, network or _network(module), ledger)
    # It stays afterwards, so that a checkpoint that is saved then has the state of the run, too.
    trainer.callbacks[:] = [*(each for each in trainer.callbacks if not isinstance(each, _Run)), run]  # type: ignore[attr-defined]
    try:
        with _replaced(module, training_step=run.training_step, configure_optimizers=run.configure_optimizers):
            numbers = ReleaseNumbers(run.per_epoch).loader()
            trainer.fit(module, numbers, val_dataloaders, ckpt_path=ckpt_path)
    finally:
        if run.engine is not None:
            run.engine.close()
    assert run.engine is not None
    return run.engine


class _Run(Callback):  # type: ignore[misc]
    """One run: what takes the place of the module's own step and optimizer, and keeps the engine's state."""

    def __init__(
        self,
        trainer: Trainer,
        module: LightningModule,
        data: DataLoader[Any],
        privacy: Privacy,
        network: nn.Module,
        ledger: str | Path | None,
    ) -> None:
        if data.batch_size is None:
            raise InputError("train_dataloader has no batch_size: it says how many records a batch has on average.")
        self._trainer, self._module, self._privacy, self._network = trainer, module, privacy, network
        self._data: DataLoader[Any] = DataLoader(
            data.dataset, collate_fn=FixedShapes(data.collate_fn), num_workers=data.num_workers
        )
        self._batch_size = data.batch_size
        self._ledger = None if ledger is None else Path(ledger)
        self._own_step: Callable[..., Any] = module.training_step
        self._own_optimizers: Callable[[], Any] = module.configure_optimizers
        self._state: dict[str, Any] | None = None
        self._logged: set[str] = set()
        self.per_epoch = math.ceil(Batches(self._data).size / data.batch_size)
        self.engine: PrivacyEngine | None = None

    @property
    def _releases(self) -> int:
        if self._trainer.max_steps > 0:
            return int(self._trainer.max_steps)
        if self._trainer.max_epochs is None or self._trainer.max_epochs < 1:
            raise InputError(
                "the trainer has no end: set max_steps or max_epochs, which say how many releases are made."
            )
        return int(self._trainer.max_epochs) * self.per_epoch

    def configure_optimizers(self) -> Any:
        """What the module itself configures, with an optimizer whose steps are releases."""
        configured = self._own_optimizers()
        optimizer, schedulers = _parts(configured)
        plan = Plan(
            module=self._network,
            optimizer=optimizer,
            batch_size=self._batch_size,
            releases=self._releases,
            ledger=self._ledger,
            loop_of_its_own=True,
        )
        self.engine = engine = self._privacy.engine(self._data, plan)
        _, self._optimizer, self._loader = _loop(engine)
        standing_in = ReleaseOptimizer(engine, lambda: not self._loader.finished)
        for scheduler in schedulers:
            scheduler.optimizer = standing_in
        return _with_optimizer(configured, standing_in)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        """One release: the module's own step on each piece of each attempt that it takes."""
        automatic = self._module.automatic_optimization
        replacements: dict[str, Any] = {
            "log": self._noting(self._module.log),
            "log_dict": self._noting(self._module.log_dict),
        }
        if not automatic:
            replacements["optimizers"] = lambda use_pl_optimizer=True: self._optimizer
        with _replaced(self._module, **replacements):
            for piece in self._loader:
                found = self._own_step(self._trainer.strategy.batch_to_device(piece), batch_idx)
                if automatic:
                    (found["loss"] if isinstance(found, dict) else found).backward()
                    self._optimizer.step()
        self._refuse_monitors()
        if automatic:
            return torch.zeros((), device=self._module.device, requires_grad=True)
        self._module.optimizers().step()  # counts the release
        return None

    def _noting(self, log: Callable[..., None]) -> Callable[..., None]:
        """`log` or `log_dict`, which also notes what they name."""

        def noting(names: Any, *args: Any, **kwargs: Any) -> None:
            self._logged.update([names] if isinstance(names, str) else names)
            log(names, *args, **kwargs)

        return noting

    def _refuse_monitors(self) -> None:
        """A learning rate, or an end, that follows losses of private records would publish them without noise."""
        configured = [each.monitor for each in self._trainer.strategy.lr_scheduler_configs if each.reduce_on_plateau]
        monitors = [*configured, *(getattr(each, "monitor", None) for each in self._trainer.callbacks)]
        for monitor in filter(None, monitors):
            if any(monitor == name or monitor.startswith(f"{name}_") for name in self._logged):
                raise InputError(
                    f"monitor={monitor!r} is not allowed: training_step logs it from private records, and a learning rate, a "
                    "checkpoint or an end that follows it would publish it without noise. Monitor what validation_step "
                    "logs of records that are not private, or nothing."
                )

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert self.engine is not None
        if self._state is not None:
            self.engine.load_state_dict(self._state)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        # Releases that were lost in a crash are charged, so fewer than planned may be left.
        trainer.should_stop = trainer.should_stop or self._loader.finished

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if self.engine is not None:
            checkpoint[_STATE] = self.engine.state_dict()

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if _STATE not in checkpoint:
            raise InputError(
                "ckpt_path is a checkpoint of training without privacy, which a private run cannot go on from."
            )
        self._state = checkpoint[_STATE]


def _loop(engine: PrivacyEngine) -> tuple[nn.Module, PrivateOptimizer, PrivateLoader]:
    return engine.ordinary_loop(releases_per_pass=1)


def _network(module: LightningModule) -> nn.Module:
    trained = {p for p in module.parameters() if p.requires_grad}
    holders = [part for part in module.children() if trained <= set(part.parameters())]
    chosen: nn.Module = holders[0] if len(holders) == 1 else module
    return chosen


@contextmanager
def _replaced(module: LightningModule, **methods: Any) -> Iterator[None]:
    """Methods of this one object, replaced inside the block."""
    before = {name: module.__dict__.get(name) for name in methods}
    module.__dict__.update(methods)
    try:
        yield
    finally:
        for name, method in before.items():
            if method is None:
                module.__dict__.pop(name, None)
            else:
                module.__dict__[name] = method


def _parts(configured: Any) -> tuple[Optimizer, list[LRScheduler]]:
    """The one optimizer among what a module configured, and its schedulers."""
    optimizers, schedulers = configured, []
    if isinstance(configured, dict):
        optimizers, schedulers = configured["optimizer"], configured.get("lr_scheduler", [])
    elif isinstance(configured, tuple) and len(configured) == 2 and isinstance(configured[0], list):
        optimizers, schedulers = configured
    optimizers = [optimizers] if isinstance(optimizers, Optimizer) else list(optimizers or [])
    if len(optimizers) != 1 or not isinstance(optimizers[0], Optimizer):
        raise InputError(
            f"configure_optimizers returned {len(optimizers)} optimizers; private training needs just one, over all "
            "parameters that are trained: each step of another one would be a release of its own."
        )
    schedulers = schedulers if isinstance(schedulers, list) else [schedulers]
    return optimizers[0], [each["scheduler"] if isinstance(each, dict) else each for each in schedulers]


def _with_optimizer(configured: Any, optimizer: Optimizer) -> Any:
    if isinstance(configured, dict):
        return {**configured, "optimizer": optimizer}
    if isinstance(configured, tuple) and len(configured) == 2 and isinstance(configured[0], list):
        return [optimizer], configured[1]
    return optimizer


__all__ = ["fit"]
