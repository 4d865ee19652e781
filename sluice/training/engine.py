"""The engine: makes a model, an optimizer and a data set private, and trains them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, Dataset

from sluice._base import validate
from sluice._base.errors import InputError
from sluice.accounting import ACCOUNTANTS
from sluice.audit.canaries import Canaries
from sluice.audit.result import AuditResult
from sluice.gradients import GradientOptions, PerSampleGradients
from sluice.gradients.loop import LoopCapture
from sluice.mechanism.base import Mechanism
from sluice.mechanism.delta import warn_of_delta
from sluice.mechanism.gates import Gate
from sluice.mechanism.registry import executor_of
from sluice.mechanism.scaling import ScalingRule
from sluice.randomness.noise import NoiseSource, SecureNoise, SeededNoise
from sluice.runs.ledger_recorder import LedgerRecorder
from sluice.training.arguments import SelectiveArguments
from sluice.training.auditing import Auditing
from sluice.training.batches import Batches
from sluice.training.context import Loss
from sluice.training.distributed.joining import join_for
from sluice.training.distributed.sharded import context_type
from sluice.training.epsilons import Epsilons
from sluice.training.executor import Executor, PiecewiseExecutor
from sluice.training.keeping import Keeping
from sluice.training.loop import PrivateLoader, ordinary_loop
from sluice.training.options import TrainingOptions
from sluice.training.resumable import Resumable
from sluice.training.selective_release import GaveUpError
from sluice.training.state import TrainingState
from sluice.training.weights import PrivateOptimizer, WeightUpdater


class PrivacyEngine(Epsilons, Resumable):
    """Trains with differential privacy, adding or removing one record being what is protected.

    Args:
        accountant: which sound accountant `get_certified_epsilon` and calibration use: "pld" or "rdp".
        seed: None for cryptographic randomness that cannot be repeated. An integer makes sampling, gate and noise
            repeatable, for experiments only: whoever knows the seed can undo the noise.

    Example::

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
        validate.one_of(ACCOUNTANTS, accountant=accountant)
        self.accountant = accountant
        self.noise: NoiseSource = SecureNoise() if seed is None else SeededNoise(seed)
        self._mechanism: Mechanism | None = None
        self._executor: Executor[Any] | None = None
        self._recorder: LedgerRecorder | None = None
        self._capture: LoopCapture | None = None
        self._average: AveragedModel | None = None
        self._keeping = Keeping()

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
        prior_releases: tuple[float, ...] = (),
        loss_reduction: str = "mean",
        lr_scheduler: LRScheduler | None = None,
        ema_decay: float | None = None,
        max_physical_batch_size: int = 256,
        gradient_options: GradientOptions | None = None,
        before_release: Callable[[int], None] | None = None,
        ledger: str | Path | None = None,
        ledger_delta: float = 1e-5,
        canaries: Canaries | None = None,
    ) -> tuple[nn.Module, PrivateOptimizer, PrivateLoader]:
        """Selective release, or plain DP-SGD, in the words of Opacus: `make_private_by`, then `ordinary_loop`.

        Args:
            module: returned as it is; neither wrapped nor renamed.
            optimizer: any torch optimizer over the module's parameters.
            data_loader: a loader, of which only data set, collate function and workers are used, or a map-style data
                set. Batches are Poisson samples, whatever the loader's own sampler was.
            noise_multiplier: standard deviation of the noise over ``max_grad_norm``.
            max_grad_norm: the maximum norm of one record's weighted gradient.
            releases: how many updates to release. Or:
            epochs: as many as make this many passes over the data on average; the loader then ends after each. If neither is
                given the run has no planned end, and stopping it by what was released is charged for (`get_certified_epsilon`).
            sample_rate: with which probability a record is in a batch. None: the loader's batch size over their number.
            scaling: from norms to weights; None clips at ``max_grad_norm``. Its own ``max_grad_norm`` must agree.
            gate: which attempts are released; None releases all: plain DP-SGD.
            prior_releases: noise multipliers of Gaussian releases already made from the same records.

        The other arguments are those of `TrainingOptions`.
        """
        arguments = SelectiveArguments(
            data_loader=data_loader,
            max_grad_norm=max_grad_norm,
            releases=releases,
            epochs=epochs,
            sample_rate=sample_rate,
            scaling=scaling,
            gate=gate,
            prior_releases=prior_releases,
            expected_canaries=canaries.expected if canaries else 0,
            loop_piece=1 if loss_reduction == "sum" else max_physical_batch_size,
        )
        options = TrainingOptions(
            loss_reduction=loss_reduction,
            lr_scheduler=lr_scheduler,
            ema_decay=ema_decay,
            max_physical_batch_size=max_physical_batch_size,
            gradient_options=gradient_options,
            before_release=before_release,
            ledger=ledger,
            ledger_delta=ledger_delta,
            canaries=canaries,
        )
        mechanism = arguments.with_noise(noise_multiplier)
        self.make_private_by(mechanism, module=module, optimizer=optimizer, data_loader=data_loader, options=options)
        return self.ordinary_loop(releases_per_pass=arguments.releases_per_pass)

    def make_private_with_epsilon(
        self,
        *,
        module: nn.Module,
        optimizer: Optimizer,
        data_loader: DataLoader[Any] | Dataset[Any],
        target_epsilon: float,
        target_delta: float,
        max_grad_norm: float,
        noise_multiplier: float | None = None,
        releases: int | None = None,
        epochs: int | None = None,
        sample_rate: float | None = None,
        scaling: ScalingRule | None = None,
        gate: Gate | None = None,
        prior_releases: tuple[float, ...] = (),
        loss_reduction: str = "mean",
        lr_scheduler: LRScheduler | None = None,
        ema_decay: float | None = None,
        max_physical_batch_size: int = 256,
        gradient_options: GradientOptions | None = None,
        before_release: Callable[[int], None] | None = None,
        ledger: str | Path | None = None,
        canaries: Canaries | None = None,
    ) -> tuple[nn.Module, PrivateOptimizer, PrivateLoader]:
        """`make_private` with the noise that spends at most ``target_epsilon`` at ``target_delta``.

        With a ``noise_multiplier`` it is the number of releases that is chosen, the largest that the budget allows, and the
        loader ends there. Otherwise noise of the gate is chosen too where it leaves it open.
        """
        arguments = SelectiveArguments(
            data_loader=data_loader,
            max_grad_norm=max_grad_norm,
            releases=releases,
            epochs=epochs,
            sample_rate=sample_rate,
            scaling=scaling,
            gate=gate,
            prior_releases=prior_releases,
            expected_canaries=canaries.expected if canaries else 0,
            loop_piece=1 if loss_reduction == "sum" else max_physical_batch_size,
        )
        options = TrainingOptions(
            loss_reduction=loss_reduction,
            lr_scheduler=lr_scheduler,
            ema_decay=ema_decay,
            max_physical_batch_size=max_physical_batch_size,
            gradient_options=gradient_options,
            before_release=before_release,
            ledger=ledger,
            ledger_delta=target_delta,
            ledger_target=target_epsilon,
            canaries=canaries,
        )
        mechanism = arguments.with_epsilon(target_epsilon, target_delta, noise_multiplier, accountant=self.accountant)
        warn_of_delta(target_delta, mechanism)
        self.make_private_by(mechanism, module=module, optimizer=optimizer, data_loader=data_loader, options=options)
        return self.ordinary_loop(releases_per_pass=arguments.releases_per_pass)

    def make_private_by(
        self,
        mechanism: Mechanism,
        *,
        module: nn.Module,
        optimizer: Optimizer,
        data_loader: DataLoader[Any] | Dataset[Any],
        options: TrainingOptions | None = None,
    ) -> None:
        """Wire any mechanism, such as one of ``sluice.methods`` or your own, to a model, an optimizer and a data set.

        Train with `releases`, or, where the mechanism allows it, with the loop that `ordinary_loop` gives.
        """
        if self._mechanism is not None:
            raise InputError("this engine already drives a run: make a new PrivacyEngine for another one.")
        if isinstance(optimizer, PrivateOptimizer):
            raise InputError("the optimizer is private already: give make_private the original one.")
        mechanism.require_complete()
        options = options or TrainingOptions()
        workers = join_for(mechanism, module)
        self.noise = workers.common_noise(self.noise)
        self._module = module
        self._average = options.average_of(module)
        self.auditing = Auditing(options.canaries, mechanism, module, optimizer, data_loader)
        module, data_loader = self.auditing.module, self.auditing.data
        self._updater = WeightUpdater(
            module=module,
            optimizer=optimizer,
            lr_scheduler=options.lr_scheduler,
            after_release=None if self._average is None else partial(self._average.update_parameters, self._module),
            observe=self.auditing.observe,
        )
        gradients = PerSampleGradients(
            module,
            loss_reduction=options.loss_reduction,
            options=options.gradient_options,
            expected_batch_size=getattr(mechanism, "expected_batch_size", math.inf) / workers.size,
        )
        recorder = workers.at_first(
            lambda: options.recorder(mechanism, secure=self.noise.secure, accountant=self.accountant)
        )
        context = context_type(module)(
            gradients=gradients,
            batches=Batches(data_loader),
            updater=self._updater,
            noise=self.noise,
            piece_size=options.max_physical_batch_size,
            targets=options.targets,
            before_release=workers.by_first(
                self._keeping.before_release, recorder.before_release if recorder else None, options.before_release
            ),
            before_update=self._keeping.before_update,
            after_release=self._keeping.after_release,
            observe_attempt=options.observe_attempt,
            workers=workers,
        )
        executor: Executor[Any] = executor_of(mechanism)(mechanism, context)
        executor.begin_after(workers.from_first(lambda: recorder.continue_from(0) if recorder else 0))
        self._mechanism, self._executor, self._recorder = mechanism, executor, recorder
        self._state = TrainingState(
            module=module,
            updater=self._updater,
            executor=executor,
            average=self._average,
            observations=self.auditing.observations,
        )

    def ordinary_loop(
        self, *, passes: int = 1, releases_per_pass: int | None = None
    ) -> tuple[nn.Module, PrivateOptimizer, PrivateLoader]:
        """The module, optimizer and loader of a loop of your own: forward, backward, ``optimizer.step()``.

        Args:
            passes: how often to go through the loader, which ends after as many releases each time. Or:
            releases_per_pass: after how many.
        """
        executor = self._running()
        if not isinstance(executor, PiecewiseExecutor):
            raise InputError(
                f"a loop of your own is not allowed for {self.mechanism.kind}: it looks at a batch more than once. Train "
                "with engine.releases(loss)."
            )
        validate.positive_integer(passes=passes)
        per_pass = releases_per_pass or math.ceil(self.mechanism.releases / passes)
        self._capture, optimizer, loader = ordinary_loop(
            executor, releases_per_pass=per_pass, sample_rate=self.mechanism.sampling["rate"]
        )
        return executor.context.module, optimizer, loader

    def releases(self, loss: Loss) -> Iterator[int]:
        """Train at full speed: one iteration for each release, which gives its number.

        Args:
            loss: ``loss(output, target)``, reduced as ``loss_reduction`` says. The data set's records are (inputs, ...,
                target), or dicts (`TrainingOptions.targets`).

        Does the same as the ordinary loop, in chunks that fit the cache, and stops when the last release is made.
        """
        executor = self._running()
        if self._capture is not None:
            self._capture.detach()
        self.auditing.set_length(loss)
        while not executor.done:
            with executor.context.workers.announced():
                try:
                    executor.make_release(loss)
                except GaveUpError:
                    self._keeping.checkpoint()  # before anybody learns of it: whoever resumes must not try again
                    raise
            yield executor.released

    @property
    def mechanism(self) -> Mechanism:
        """What this run promises: public."""
        self._running()
        assert self._mechanism is not None
        return self._mechanism

    @property
    def released(self) -> int:
        """How many releases have been made: public."""
        return self._running().released

    @property
    def spent(self) -> int:
        """How many releases are charged, those included that were logged and then lost: public."""
        return self._running().spent

    def last_private_trace(self) -> tuple[int, int, float]:
        """Attempts, records measured and metric of the last release: sensitive, for the developer's own eyes."""
        trace = self._running().trace
        return trace.attempts[-1], trace.measured[-1], trace.metrics[-1]

    def audit(self, *, delta: float, confidence: float = 0.95, claimed_epsilon: float | None = None) -> AuditResult:
        """Bound epsilon from below by what was released of the canaries so far (docs/audit.md).

        Args:
            claimed_epsilon: what is put to the test; None takes what this run's own accountant says.
        """
        self._running()
        return self.auditing.evidence(
            delta=delta, confidence=confidence, claimed_epsilon=claimed_epsilon, accountant=self.accountant
        ).result

    @contextmanager
    def averaged(self) -> Iterator[nn.Module]:
        """The model with the running average of its released weights, for evaluation inside the block."""
        if self._average is None:
            raise InputError("no average is kept: pass ema_decay=0.99, say, to make_private.")
        yield self._average.module

    def close(self) -> None:
        """Stop watching the model, wait for what is still being written, and release the ledger's lock."""
        if self._executor is not None:
            self.auditing.strip()
        if self._capture is not None:
            self._capture.detach()
        self._keeping.close()
        if self._recorder is not None:
            self._recorder.close()

    def _running(self) -> Executor[Any]:
        if self._executor is None:
            raise InputError("no run is set up: call make_private or make_private_with_epsilon first.")
        return self._executor
