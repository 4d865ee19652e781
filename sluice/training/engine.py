"""The engine: makes a model, an optimizer and a data set private, and trains them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, Dataset

from sluice._base import validate
from sluice._base.errors import InputError
from sluice.accounting.calibration import calibrate
from sluice.gradients import GradientOptions, PerSampleGradients
from sluice.gradients.loop import LoopCapture
from sluice.mechanism.base import Mechanism
from sluice.mechanism.gates import Gate
from sluice.mechanism.registry import executor_of
from sluice.mechanism.scaling import ScalingRule
from sluice.mechanism.selective_release import SelectiveRelease
from sluice.randomness.noise import NoiseSource, SecureNoise, SeededNoise
from sluice.runs.checkpoint import load_checkpoint, save_checkpoint
from sluice.runs.folder import configuration_hash
from sluice.runs.ledger_recorder import LedgerRecorder, ledger_header, one_after_the_other
from sluice.training.arguments import gate_with, sample_rate_of, scaling_with, total_releases
from sluice.training.batches import Batches
from sluice.training.context import Loss, TrainingContext
from sluice.training.executor import Executor
from sluice.training.loader import PrivateLoader
from sluice.training.selective_release import SelectiveReleaseExecutor
from sluice.training.weights import PrivateOptimizer, WeightUpdater


class PrivacyEngine:
    """Trains with differential privacy, adding or removing one record being what is protected.

    Args:
        accountant: which sound accountant `get_certified_epsilon` and calibration use: "pld" or "rdp".
        seed: None for cryptographic randomness that cannot be repeated. A whole number makes sampling, gate and noise
            repeatable, for experiments only: whoever knows the seed can undo the noise.

    ::

        engine = PrivacyEngine()
        model, optimizer, loader = engine.make_private_with_epsilon(
            module=model, optimizer=optimizer, data_loader=loader,
            target_epsilon=1.0, target_delta=1e-5, releases=1000, max_grad_norm=1.0,
            scaling=GlobalScaling(bound=8.0), gate=ClippingBiasGate(beta=3.0),
        )
        for x, y in loader:
            optimizer.zero_grad()
            criterion(model(x), y).backward()
            optimizer.step()
        engine.get_certified_epsilon(delta=1e-5)
    """

    def __init__(self, *, accountant: str = "pld", seed: int | None = None) -> None:
        validate.one_of(("pld", "rdp"), accountant=accountant)
        self.accountant = accountant
        self.noise: NoiseSource = SecureNoise() if seed is None else SeededNoise(seed)
        self._target_epsilon: float | None = None
        self._promise: Mechanism | None = None
        self._procedure: Executor[Any] | None = None
        self._recorder: LedgerRecorder | None = None
        self._capture: LoopCapture | None = None
        self._average: AveragedModel | None = None

    def make_private(
        self,
        *,
        module: nn.Module,
        optimizer: Optimizer,
        data_loader: DataLoader[Any] | Dataset[Any],
        noise_multiplier: float,
        max_grad_norm: float,
        releases: int | None = None,
        epochs: int | None = None,
        sample_rate: float | None = None,
        scaling: ScalingRule | None = None,
        gate: Gate | None = None,
        preparation: tuple[float, ...] = (),
        loss_reduction: str = "mean",
        lr_scheduler: LRScheduler | None = None,
        ema_decay: float | None = None,
        max_physical_batch_size: int = 256,
        gradient_options: GradientOptions | None = None,
        before_release: Callable[[int], None] | None = None,
        ledger: str | Path | None = None,
        ledger_delta: float = 1e-5,
    ) -> tuple[nn.Module, PrivateOptimizer, PrivateLoader]:
        """Wire a mechanism to a model, an optimizer and a data set.

        Args:
            module: returned as it is; neither wrapped nor renamed.
            optimizer: any torch optimizer over the module's parameters.
            data_loader: a loader, of which only data set, collate function and workers are used, or a map-style data
                set. Batches are Poisson samples, whatever the loader's own sampler was.
            noise_multiplier: standard deviation of the noise over ``max_grad_norm``.
            max_grad_norm: the most that one record's weighted gradient may measure.
            releases: how many updates to release. Or:
            epochs: as many as make this many passes over the data on average; the loader then ends after each.
            sample_rate: probability with which a record is in a batch. None takes the loader's batch size over the
                number of records, exactly.
            scaling: from norms to weights; None clips at ``max_grad_norm``. Its own ``max_grad_norm`` must agree.
            gate: which attempts are released; None releases all: plain DP-SGD.
            preparation: noise multipliers of Gaussian releases already made from the same records.
            loss_reduction: what the loss returns in your loop: "mean" or "sum" over the batch.
            lr_scheduler: advanced with each release. Do not call its ``step`` yourself.
            ema_decay: also keep a running average of the released weights (`averaged`); costs no privacy.
            max_physical_batch_size: at most so many records go through the model at once; bounds the memory only.
            before_release: called with the number of a release before it is applied.
            ledger: a file in which every release is put on record before it is applied; ``sluice verify`` reads it.
                If it exists the run goes on with it: call `load`, or what it has on record counts as lost.
            ledger_delta: the delta at which that ledger reports.
        """
        self._require_unused()
        batches = Batches(data_loader)
        rate = sample_rate_of(sample_rate, data_loader, batches.size)
        per_epoch = math.ceil(1 / rate)
        mechanism = SelectiveRelease(
            sample_rate=rate,
            expected_batch_size=rate * batches.size,
            scaling=scaling_with(scaling, max_grad_norm),
            noise_multiplier=noise_multiplier,
            releases=total_releases(releases, epochs, per_epoch),
            gate=gate_with(gate, scaling=scaling, max_grad_norm=max_grad_norm, expected_batch_size=rate * batches.size),
            preparation=preparation,
        )
        recorder = None
        if ledger is not None:
            target = self._target_epsilon
            header = ledger_header(
                mechanism,
                delta=ledger_delta,
                secure=self.noise.secure,
                accountant=self.accountant,
                target_epsilon=target,
            )
            recorder = LedgerRecorder(Path(ledger), header=header, repeats_noise=not self.noise.secure)

        context = self._context(
            module=module,
            optimizer=optimizer,
            batches=batches,
            loss_reduction=loss_reduction,
            lr_scheduler=lr_scheduler,
            ema_decay=ema_decay,
            piece_size=max_physical_batch_size,
            gradient_options=gradient_options,
            before_release=one_after_the_other(recorder.before_release if recorder else None, before_release),
            expected_batch_size=mechanism.expected_batch_size,
            loop_batch=mechanism.expected_batch_size,
        )
        releaser = SelectiveReleaseExecutor(mechanism, context)
        if recorder is not None:
            releaser.begin_after(recorder.continue_from(0))
        self._promise, self._procedure, self._recorder = mechanism, releaser, recorder
        return self._ordinary_loop(releaser, releases_per_pass=mechanism.releases if epochs is None else per_epoch)

    def make_private_with_epsilon(
        self,
        *,
        module: nn.Module,
        optimizer: Optimizer,
        data_loader: DataLoader[Any] | Dataset[Any],
        target_epsilon: float,
        target_delta: float,
        max_grad_norm: float,
        releases: int | None = None,
        epochs: int | None = None,
        sample_rate: float | None = None,
        scaling: ScalingRule | None = None,
        gate: Gate | None = None,
        preparation: tuple[float, ...] = (),
        loss_reduction: str = "mean",
        lr_scheduler: LRScheduler | None = None,
        ema_decay: float | None = None,
        max_physical_batch_size: int = 256,
        gradient_options: GradientOptions | None = None,
        before_release: Callable[[int], None] | None = None,
        ledger: str | Path | None = None,
    ) -> tuple[nn.Module, PrivateOptimizer, PrivateLoader]:
        """`make_private` with the noise that spends at most ``target_epsilon`` at ``target_delta``.

        Noise of the gate and of its reference is chosen too where the gate leaves it open. The other arguments are
        those of `make_private`.
        """
        size = Batches(data_loader).size
        rate = sample_rate_of(sample_rate, data_loader, size)
        chosen = calibrate(
            sample_rate=rate,
            releases=total_releases(releases, epochs, math.ceil(1 / rate)),
            target_epsilon=target_epsilon,
            target_delta=target_delta,
            gate=gate_with(gate, scaling=scaling, max_grad_norm=max_grad_norm, expected_batch_size=rate * size),
            preparation=preparation,
            accountant=self.accountant,
        )
        self._target_epsilon = target_epsilon
        return self.make_private(
            module=module,
            optimizer=optimizer,
            data_loader=data_loader,
            noise_multiplier=chosen.noise_multiplier,
            max_grad_norm=max_grad_norm,
            releases=releases,
            epochs=epochs,
            sample_rate=rate,
            scaling=scaling,
            gate=chosen.gate,
            preparation=preparation,
            loss_reduction=loss_reduction,
            lr_scheduler=lr_scheduler,
            ema_decay=ema_decay,
            max_physical_batch_size=max_physical_batch_size,
            gradient_options=gradient_options,
            before_release=before_release,
            ledger=ledger,
            ledger_delta=target_delta,
        )

    def make_private_by(
        self,
        promise: Mechanism,
        *,
        module: nn.Module,
        optimizer: Optimizer,
        data_loader: DataLoader[Any] | Dataset[Any],
        loss_reduction: str = "mean",
        lr_scheduler: LRScheduler | None = None,
        ema_decay: float | None = None,
        max_physical_batch_size: int = 256,
        gradient_options: GradientOptions | None = None,
        before_release: Callable[[int], None] | None = None,
    ) -> None:
        """Wire any promise, such as one of ``sluice.methods``, to a model, an optimizer and a data set.

        Train with `releases`. The arguments are those of `make_private`.
        """
        self._require_unused()
        context = self._context(
            module=module,
            optimizer=optimizer,
            batches=Batches(data_loader),
            loss_reduction=loss_reduction,
            lr_scheduler=lr_scheduler,
            ema_decay=ema_decay,
            piece_size=max_physical_batch_size,
            gradient_options=gradient_options,
            before_release=before_release or (lambda number: None),
            expected_batch_size=getattr(promise, "expected_batch_size", math.inf),
        )
        self._promise, self._procedure = promise, executor_of(promise)(promise, context)

    def _context(
        self,
        *,
        module: nn.Module,
        optimizer: Optimizer,
        batches: Batches,
        loss_reduction: str,
        lr_scheduler: LRScheduler | None,
        ema_decay: float | None,
        piece_size: int,
        gradient_options: GradientOptions | None,
        before_release: Callable[[int], None],
        expected_batch_size: float,
        loop_batch: float = 0.0,
    ) -> TrainingContext:
        validate.one_of(("mean", "sum"), loss_reduction=loss_reduction)
        validate.positive_integer(max_physical_batch_size=piece_size)
        if isinstance(optimizer, PrivateOptimizer):
            raise InputError("the optimizer is private already: give make_private the original one.")
        self._module = module
        if ema_decay is not None:
            validate.open_fraction(ema_decay=ema_decay)
            self._average = AveragedModel(module, multi_avg_fn=get_ema_multi_avg_fn(ema_decay))
        self._updates = WeightUpdater(
            module=module, optimizer=optimizer, lr_scheduler=lr_scheduler, after_release=self._update_average
        )
        return TrainingContext(
            gradients=PerSampleGradients(
                module,
                loss_reduction=loss_reduction,
                options=gradient_options,
                expected_batch_size=expected_batch_size,
            ),
            batches=batches,
            updates=self._updates,
            noise=self.noise,
            piece_size=piece_size,
            before_release=before_release,
            loop_batch=loop_batch,
        )

    def _ordinary_loop(
        self, releaser: SelectiveReleaseExecutor, *, releases_per_pass: int
    ) -> tuple[nn.Module, PrivateOptimizer, PrivateLoader]:
        context = releaser.context
        self._capture = capture = LoopCapture(context.gradients, rows=context.loop_rows)
        updates = context.updates
        loader = PrivateLoader(
            batches=context.batches,
            releaser=releaser,
            capture=capture,
            piece_size=context.loop_rows,
            releases_per_pass=releases_per_pass,
        )

        def consume() -> None:
            chunk = capture.collect()
            if loader.randomness is not None:
                loader.randomness.leave()
            updates.check_settings()
            if releaser.absorb(chunk) and loader.last_piece:
                updates.check_untouched()
                releaser.finish()
            else:
                updates.nothing_released()

        return context.module, PrivateOptimizer(updates, consume=consume), loader

    def releases(self, loss: Loss) -> Iterator[int]:
        """Train at full speed: one iteration for each release, which gives its number.

        Args:
            loss: ``loss(output, target)``, reduced as ``loss_reduction`` says. The data set's records are (inputs, ...,
                target).

        Does the same as the ordinary loop, in chunks that fit the cache, and stops when the last release is made.
        """
        procedure = self._running()
        if self._capture is not None:
            self._capture.detach()
        while not procedure.done:
            procedure.make_release(loss)
            yield procedure.released

    @property
    def mechanism(self) -> Mechanism:
        """What this run promises: public."""
        self._running()
        assert self._promise is not None
        return self._promise

    @property
    def released(self) -> int:
        """How many releases have been made: public."""
        return self._running().released

    def last_private_trace(self) -> tuple[int, int, float]:
        """Attempts, records measured and metric of the last release: sensitive, for the developer's own eyes."""
        trace = self._running().trace
        return trace.attempts[-1], trace.measured[-1], trace.metrics[-1]

    def get_epsilon(self, delta: float) -> float:
        """What the releases so far cost, by the sound accountant, if the run was planned to stop here.

        It is this run's guarantee only if this number of releases was fixed in advance. Quote `get_certified_epsilon`
        for a run that stops early because it looks good enough, gave up, or was interrupted. A run whose gate cannot
        be proved (a hidden reference) has no epsilon: InputError says so; see `get_claimed_epsilon`.
        """
        return self._proved_epsilon(delta, releases=self._running().spent)

    def get_certified_epsilon(self, delta: float) -> float:
        """What this run guarantees, whenever and for whatever reason it stops: epsilon of all planned releases."""
        return self._proved_epsilon(delta, releases=self.mechanism.releases)

    def _proved_epsilon(self, delta: float, *, releases: int) -> float:
        self.mechanism.require_proof()
        return self.mechanism.epsilon_after(releases, delta=delta, accountant=self.accountant)

    def get_claimed_epsilon(self, delta: float) -> float:
        """`get_epsilon` as if the reference were public. With a hidden one it is no guarantee: it can be exceeded."""
        return self.mechanism.epsilon_after(self._running().spent, delta=delta, accountant=self.accountant)

    @contextmanager
    def averaged(self) -> Iterator[nn.Module]:
        """The model with the running average of its released weights, for evaluation inside the block."""
        if self._average is None:
            raise InputError("no average is kept: pass ema_decay=0.99, say, to make_private.")
        yield self._average.module

    def accept_weights(self) -> None:
        """Take weights that were changed by hand as they are. Only for changes that do not depend on the data."""
        self._running()
        self._updates.remember()

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next release depends on: weights, optimizer, schedule, noise, reference, average.

        Sensitive: it belongs in ``private/`` (a seeded source can be replayed from it).
        """
        self._updates.put_back()
        scheduler = self._updates.lr_scheduler
        return {
            "releases": self._running().state_dict(),
            "module": self._module.state_dict(),
            "optimizer": self._updates.optimizer.state_dict(),
            "lr_scheduler": None if scheduler is None else scheduler.state_dict(),
            "average": None if self._average is None else self._average.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any], *, lost: int = 0) -> None:
        """Continue from `state_dict`, on an engine that was set up with the same arguments.

        Args:
            lost: how many releases were made after this state was saved and are gone; they stay charged.
        """
        running = self._running()
        self._module.load_state_dict(state["module"])
        self._updates.optimizer.load_state_dict(state["optimizer"])
        if self._updates.lr_scheduler is not None:
            self._updates.lr_scheduler.load_state_dict(state["lr_scheduler"])
        if self._average is not None:
            self._average.load_state_dict(state["average"])
        running.load_state_dict(state["releases"], lost=lost)
        self._updates.remember()

    def save(self, folder: str | Path) -> Path:
        """Write a checkpoint of `state_dict` into a folder that keeps the last two. Sensitive: keep it private."""
        return save_checkpoint(
            Path(folder), self.state_dict(), config_hash=self._mechanism_hash(), release=self.released
        )

    def load(self, folder: str | Path) -> str | None:
        """Go on from the newest checkpoint of a folder that is whole.

        With a ledger, releases on record that the checkpoint does not contain stay charged.

        Returns:
            What was passed over because it is damaged, or None.
        """
        found = load_checkpoint(Path(folder), config_hash=self._mechanism_hash())
        if found is None:
            raise InputError(f"folder={str(folder)!r} holds no checkpoint: give a folder that engine.save wrote to.")
        lost = self._recorder.continue_from(found.release) if self._recorder is not None else 0
        self.load_state_dict(found.payload, lost=lost)
        return found.note

    def _mechanism_hash(self) -> str:
        return configuration_hash(self.mechanism.to_dict())

    def close(self) -> None:
        """Stop watching the model, and give the ledger free."""
        if self._capture is not None:
            self._capture.detach()
        if self._recorder is not None:
            self._recorder.close()

    def _update_average(self) -> None:
        if self._average is not None:
            self._average.update_parameters(self._module)

    def _running(self) -> Executor[Any]:
        if self._procedure is None:
            raise InputError("no run is set up: call make_private or make_private_with_epsilon first.")
        return self._procedure

    def _require_unused(self) -> None:
        if self._promise is not None:
            raise InputError("this engine already drives a run: make a new PrivacyEngine for another one.")
