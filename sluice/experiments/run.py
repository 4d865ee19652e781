"""Training a run from its settings: every release logged first, then kept, then applied."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save as encode_weights
from torch import Tensor

from sluice._base import validate
from sluice._base.errors import DataError
from sluice._base.files import canonical_json
from sluice._base.interrupts import DelayedInterrupt
from sluice.audit.canaries import Canaries
from sluice.audit.files import kept_coins, write_audit
from sluice.data import DataSplits, Examples, TensorExamples
from sluice.data.fingerprint import fingerprint
from sluice.experiments.dataset_path import is_config_of, keep_path, published_config
from sluice.experiments.encoded import encoded_model
from sluice.experiments.evaluation import accuracy
from sluice.experiments.feature_statements import feature_statements
from sluice.experiments.judge import Judge
from sluice.experiments.mean_release import released_mean
from sluice.experiments.objective import Objective, model_of
from sluice.experiments.recorded import TrainResult, recorded_run, require_untouched, result_of
from sluice.experiments.records import Records
from sluice.experiments.settings import TrainSettings
from sluice.experiments.update_rule import make_optimizer
from sluice.features.examples import RowExamples
from sluice.mechanism.base import Mechanism
from sluice.mechanism.delta import delta_problem
from sluice.methods import method_of, planned_mechanism
from sluice.models.linear import LinearClassifier, SoftmaxRegression
from sluice.runs.certificate import FEATURE_STATEMENTS
from sluice.runs.checkpoint import checkpoint_releases
from sluice.runs.evaluations import Evaluation
from sluice.runs.folder import RunFolder
from sluice.runs.ledger import Ledger, LedgerHeader
from sluice.runs.public_files import PublicFiles, publish
from sluice.runs.trace import TraceFile, TraceRow
from sluice.training.distributed import join
from sluice.training.engine import PrivacyEngine
from sluice.training.options import TrainingOptions
from sluice.training.selective_release import GaveUpError

FEATURES = "features.safetensors"
"""The public constants of features, so that what is published is a whole model."""


@dataclass(frozen=True, kw_only=True)
class Progress:
    """What may be shown while a run is in progress: all of it public."""

    release: int
    releases: int
    evaluation: Evaluation | None = None


@dataclass(frozen=True, kw_only=True)
class _Opening:
    """What worker 0 tells the others when a run begins, or goes on: all that they cannot read or draw themselves."""

    fingerprint: str
    coins: bytes
    centre: Tensor | None
    goes_back: bool


class Training:
    """One run, in its folder.

    Args:
        splits: the data, ready for the model (`sluice.experiments.preparing.prepare`).
        mechanism: what the run promises; None plans it from the settings. To resume, give that of the ledger
            (`recorded_run`).
        checkpoint_every: releases between two checkpoints. After a crash of an unseeded run, releases since the last
            one are lost and stay charged (Ctrl-C and SIGTERM lose none), so None keeps each release there, in a journal
            between checkpoints, and makes a hundred in a seeded run, which loses nothing. It changes no result.
        report: called after every release, with public values only.
        report_private: called after every release with what must not be published.
        observe_attempt: called with every attempt of a gate, which is sensitive; a study's (`TrainingOptions`).
    """

    def __init__(
        self,
        *,
        settings: TrainSettings,
        splits: DataSplits,
        mechanism: Mechanism | None = None,
        checkpoint_every: int | None = None,
        max_physical_batch_size: int = 1024,
        report: Callable[[Progress], None] = lambda progress: None,
        report_private: Callable[[TraceRow], None] = lambda row: None,
        observe_attempt: Callable[[Any], None] | None = None,
    ) -> None:
        if checkpoint_every is None and settings.seed is not None:
            checkpoint_every = max(1, settings.releases // 100)
        if checkpoint_every is not None:
            validate.positive_integer(checkpoint_every=checkpoint_every)
        validate.positive_integer(max_physical_batch_size=max_physical_batch_size)
        self._report, self._report_private = report, report_private
        self._observe_attempt = observe_attempt
        self._checkpoint_every = checkpoint_every
        self._piece_size = max_physical_batch_size
        self._records = Records.of(splits, settings)
        self.settings = settings
        self._objective = Objective.of(settings)
        self._objective.require_targets(splits)
        self.mechanism = mechanism or planned_mechanism(
            settings, dataset_size=len(self._records.train) + (settings.canaries or 0) // 2
        )
        self._canaries: Canaries | None = None
        with _seeded(settings.seed):
            self.model = model_of(settings, self._records.train.input_shape, classes=len(splits.classes))
        self._optimizer, self._scheduler = make_optimizer(settings, self.model)
        self.engine = PrivacyEngine(accountant=settings.accountant, seed=settings.seed)
        self._interrupt = DelayedInterrupt()
        failure = delta_problem(settings.delta, records=len(self._records.train)) if self.mechanism.provable else None
        self._notes: list[str] = [failure] if failure else []
        self._workers = join()
        self._centre: Tensor | None = None

    @property
    def notes(self) -> tuple[str, ...]:
        """What the user should know before the run begins."""
        return tuple(self._notes)

    def start(self, path: Path) -> TrainResult:
        """Train in a new folder.

        Guarantee:
            ``public/`` and what ``report`` gets depend on the training records through the releases alone, which cost
            what the ledger says.
        """
        with RunFolder.create(path, config=published_config(self.settings)) as folder:
            keep_path(folder, self.settings)
            self._check_data(folder)
            self._canaries = _canaries(folder, self.settings)
            return self._begin(folder)

    def resume(self, path: Path) -> TrainResult:
        """Resume a run that was interrupted, from the last state that was kept, or from the start if none was.

        Guarantee:
            As for `start`. A seeded run ends as if it had never been interrupted, with the same bytes in ``public/``;
            any other is charged for the releases that the interruption lost.
        """
        with RunFolder.open(path) as folder:
            self._require_same_settings(folder)
            self._check_data(folder)
            self._canaries = _canaries(folder, self.settings)
            if not folder.ledger_path.exists():
                require_untouched(folder)
                return self._begin(folder)
            with Ledger.open(folder.ledger_path) as ledger:
                self._require_same(folder, ledger)
                if not checkpoint_releases(folder.checkpoints):
                    if ledger.spent > 0:
                        raise DataError(
                            f"{folder.checkpoints} holds no checkpoint: the run cannot be resumed. Start a new one."
                        )
                    return self._from_the_start(folder, ledger)
                self._go_back(folder, ledger)
                return self._run(folder, ledger)

    def assist(self) -> None:
        """Take part in a run as any worker but the first, which calls `start` or `resume` and alone has the folder.

        Guarantee:
            Nothing is written, and no release is applied before worker 0 has it on disk.
        """
        opening: _Opening = self._workers.from_first(_only_at_first)
        if opening.fingerprint != fingerprint(self._records.train):
            raise DataError(
                f"the training data of worker {self._workers.rank} is not that of worker 0: all must read the same records in "
                "the same order."
            )
        if self.settings.canaries is not None:
            drawn = Canaries(count=self.settings.canaries, loss=self._objective)
            self._canaries = replace(drawn, coins=opening.coins)
        self._records = self._records.presented(opening.centre)
        self._make_private(lambda number: None)
        if opening.goes_back:
            self.engine.load(Path())  # the state of worker 0
        with suppress(GaveUpError):
            for _ in self.engine.releases(self._objective):
                pass

    def has_data_of(self, path: Path) -> bool:
        """Whether a run began with the very records, and features, that are given here."""
        return RunFolder.look(path).began_with(fingerprint(self._records.train))

    def _check_data(self, folder: RunFolder) -> None:
        self._fingerprint = fingerprint(self._records.train)  # of the records as they were given
        folder.check_data(self._fingerprint)

    def _go_back(self, folder: RunFolder, ledger: Ledger) -> None:
        """Continue from the newest state that was kept."""
        repeats = self.settings.seed is not None
        self._present_rows(folder, ledger)
        self._set_up(lambda number: log_release(number), goes_back=True)
        note = self.engine.load(
            folder.checkpoints, config_hash=folder.config_hash, spent=0 if repeats else ledger.spent
        )
        log_release = ledger.resume(applied=self.engine.released, repeats_noise=repeats)
        self._notes += [each for each in (ledger.note, note) if each]
        lost = 0 if repeats else ledger.spent - self.engine.released
        if lost:
            self._notes.append(f"Releases lost when the run was interrupted, which stay charged: {lost}.")

    def _present_rows(self, folder: RunFolder, ledger: Ledger) -> None:
        """Show the model rows of features less their mean, which is released first, once for the whole run."""
        train = self._records.train
        if isinstance(train, RowExamples) and self.settings.mean_noise is not None:
            self._centre = released_mean(
                train.inputs,
                noise_multiplier=self.settings.mean_noise,
                seed=self.settings.seed,
                folder=folder,
                ledger=ledger,
            )
        self._records = self._records.presented(self._centre)

    def _begin(self, folder: RunFolder) -> TrainResult:
        header = LedgerHeader(
            mechanism=self.mechanism.to_dict(),
            delta=self.settings.delta,
            configuration=folder.config_hash,
            noise="secure" if self.settings.seed is None else "seeded",
            accountant=self.settings.accountant,
            target_epsilon=method_of(self.settings.method).target(self.settings),
        )
        with Ledger.create(folder.ledger_path, header=header) as ledger:
            return self._from_the_start(folder, ledger)

    def _from_the_start(self, folder: RunFolder, ledger: Ledger) -> TrainResult:
        self._present_rows(folder, ledger)
        self._set_up(ledger.append_release, goes_back=False)
        return self._run(folder, ledger)

    def _require_same_settings(self, folder: RunFolder) -> None:
        if not is_config_of(self.settings, folder.config):
            raise DataError(
                f"{folder.config_path} is not what the run began with: restore it, or start a new run with it."
            )

    def _require_same(self, folder: RunFolder, ledger: Ledger) -> None:
        if ledger.header.configuration != folder.config_hash:
            raise DataError(
                f"{folder.config_path} is not what the run began with: restore it, or start a new run with it."
            )
        if ledger.header.mechanism != self.mechanism.to_dict():
            raise DataError(
                f"{folder.ledger_path} is the ledger of another mechanism than the one given: resume with that of the ledger."
            )

    def _set_up(self, log_release: Callable[[int], None], *, goes_back: bool) -> None:
        opening = _Opening(
            fingerprint=self._fingerprint,
            coins=b"" if self._canaries is None else self._canaries.coins,
            centre=self._centre,
            goes_back=goes_back,
        )
        self._workers.from_first(lambda: opening)
        self._make_private(log_release)

    def _make_private(self, log_release: Callable[[int], None]) -> None:
        def before_release(number: int) -> None:
            self._interrupt.hold()
            log_release(number)

        self.engine.make_private_by(
            self.mechanism,
            module=self.model,
            optimizer=self._optimizer,
            data_loader=self._as_read(),
            options=TrainingOptions(
                lr_scheduler=self._scheduler,
                ema_decay=self.settings.ema_decay or None,
                max_physical_batch_size=self._piece_size,
                before_release=before_release,
                canaries=self._canaries,
                observe_attempt=self._observe_attempt,
            ),
        )

    def _as_read(self) -> Examples:
        """The training records; rows in half precision stay so for models that take them, but where canaries stand beside them."""
        train = self._records.train
        takes_stored = isinstance(self.model, LinearClassifier | SoftmaxRegression) and self._canaries is None
        return train.stored() if takes_stored and isinstance(train, TensorExamples) else train

    def _run(self, folder: RunFolder, ledger: Ledger) -> TrainResult:
        keeper = self.engine.keep_in(folder.checkpoints, every=self._checkpoint_every, config_hash=folder.config_hash)
        publication = PublicFiles(folder)
        publication.keep_up_to(self.engine.released)
        judge = Judge(
            settings=self.settings,
            objective=self._objective,
            records=self._records,
            model=self.model,
            engine=self.engine,
            publication=publication,
        )
        trace = TraceFile(folder.trace_path)
        try:
            if judge.is_due(self.engine.released) and not publication.has(self.engine.released):
                judge.evaluate()  # a crash came between the checkpoint and the evaluation
            self._make_releases(judge, trace)
        except GaveUpError as error:
            self._notes.append(str(error))
        except KeyboardInterrupt:
            # A seeded run repeats from the last regular checkpoint; the noise of any other is fresh anyway.
            if self.settings.seed is None:
                keeper.checkpoint()
            raise
        finally:
            keeper.close()  # before the folder is unlocked
            self._interrupt.let_go()
        keeper.finish()
        judge.evaluate()
        self._notes += judge.look_at_classes(folder)
        judge.keep_held_out_quality(folder)
        publish(folder, FEATURE_STATEMENTS, canonical_json(feature_statements(self.settings)) + b"\n", ledger)
        features = self._records.features
        if features is not None:
            content = encode_weights(features.tensors(), features.metadata())
            publish(folder, FEATURES, content, ledger)
        with judge.published_model() as model:
            publication.publish_model(encoded_model(model, self._records.train, self._records.classes), ledger)
        if self._canaries is not None:
            found = self.engine.auditing.evidence(delta=self.settings.delta, accountant=self.engine.accountant)
            write_audit(folder, found)
        publication.publish_certificate()
        return result_of(folder, notes=tuple(self._notes))

    def _make_releases(self, judge: Judge, trace: TraceFile) -> None:
        began = time.monotonic()
        for release in self.engine.releases(self._objective):
            self._interrupt.let_go()
            attempts, measured, metric = self.engine.last_private_trace()
            seconds = time.monotonic() - began
            row = TraceRow(release=release, attempts=attempts, measured=measured, metric=metric, seconds=seconds)
            trace.append(row)
            self._report_private(row)
            evaluation = judge.evaluate() if judge.is_due(release) else None
            self._report(Progress(release=release, releases=self.mechanism.releases, evaluation=evaluation))
            began = time.monotonic()


def _only_at_first() -> Any:
    raise AssertionError("worker 0 was asked to assist")


def _canaries(folder: RunFolder, settings: TrainSettings) -> Canaries | None:
    """The canaries that a run began with, or new ones, by coins that are kept in ``private/``."""
    if settings.canaries is None:
        return None
    drawn = Canaries(count=settings.canaries, loss=Objective.of(settings))
    return replace(drawn, coins=kept_coins(folder, drawn=drawn.coins))


@contextmanager
def _seeded(seed: int | None) -> Iterator[None]:
    """Initial weights that a seed repeats; the caller's own random state is left alone."""
    with torch.random.fork_rng():
        if seed is None:
            torch.seed()
        else:
            torch.manual_seed(seed)
        yield


__all__ = ["FEATURES", "Progress", "TrainResult", "Training", "accuracy", "recorded_run"]
