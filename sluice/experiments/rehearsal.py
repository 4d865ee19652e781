"""Rehearsals: a run's own mechanism on stand-in records, for an audit alone. They spend nothing, and publish no model."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import Dataset

from sluice._base import validate
from sluice._base.errors import InputError
from sluice.audit.canaries import WHITE_BOX, Canaries, Kind, blank, mislabelled
from sluice.audit.curves import Claim
from sluice.audit.evidence import Evidence
from sluice.audit.guesses import require_canaries
from sluice.audit.trials import Trials
from sluice.data import DataSplits, Examples
from sluice.experiments.records import Records
from sluice.experiments.settings import TrainSettings
from sluice.experiments.update_rule import make_optimizer
from sluice.mechanism.base import Mechanism
from sluice.models import create_model
from sluice.training.engine import PrivacyEngine
from sluice.training.options import TrainingOptions
from sluice.training.selective_release import GaveUpError

FEWEST_RUNS = 20


@dataclass(frozen=True, kw_only=True)
class Rehearsal:
    """What is rehearsed.

    Attributes:
        splits: the data of the run. Of the records that it trains on, without those that it holds out, only number and
            shape are used: test records stand in for them.
        mechanism: that of the run.
        confidence: of the bounds.
        claimed_epsilon: what is put to the test; None takes what the mechanism's own accountant says.
        report: called after each release with its number.
        ledger: audit the run's own training records instead of stand-ins: a second release, which spends the mechanism's
            epsilon once more and is counted in this file, each release before it is made.
        begun: called when that ledger is on disk, before the first release.
    """

    settings: TrainSettings
    splits: DataSplits
    mechanism: Mechanism
    confidence: float = 0.95
    claimed_epsilon: float | None = None
    report: Callable[[int], None] = lambda release: None
    ledger: Path | None = None
    begun: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        validate.open_fraction(confidence=self.confidence)
        if self.settings.predicts_numbers:
            raise InputError(
                f"loss={self.settings.loss!r} is not allowed: rehearsals are of classes. Train with canaries to audit such a run."
            )
        if len(self.splits.test) == 0:
            raise InputError(
                f"dataset={self.splits.name!r} has no test records, which stand in for the training records. Add some."
            )

    def once(self, *, canaries: int, kind: Kind = "loud") -> Evidence:
        """One run with many canaries.

        Guarantee:
            No training record is trained on, unless there is a ledger that says so. Noise, sampling and coins come from the
            operating system, whatever the run's seed.
        """
        require_canaries(canaries)
        engine = self._engine(self._canaries(canaries, kind))
        if self.ledger is not None:
            self.begun()
        self._train(engine, self.report)
        found = engine.auditing.evidence(
            delta=self.settings.delta,
            confidence=self.confidence,
            claimed_epsilon=self.claimed_epsilon,
            accountant=self.settings.accountant,
        )
        engine.close()
        return replace(found, rehearsal=True)

    def repeatedly(self, *, runs: int) -> Trials:
        """Many runs with one loud canary each, which is in by a coin: independent trials of one test.

        The first half of the runs chooses the test's threshold, the other half is counted.
        """
        if not isinstance(runs, int) or runs < FEWEST_RUNS:
            raise InputError(f"runs={runs!r} is not allowed: it must be an integer >= {FEWEST_RUNS}.")
        scores, members = np.zeros(runs), np.zeros(runs, dtype=bool)
        for run in range(runs):
            canaries = Canaries(count=1, kind="loud")
            engine = self._engine(canaries)
            self._train(engine)
            found = engine.auditing.scores()
            name = next(iter(found))
            scores[run], members[run] = found[name][0], canaries.members[0]
            engine.close()
            self.report(run + 1)
        return Trials(
            scores=scores,
            members=members,
            choosing=np.arange(runs) < runs // 2,
            score=name,
            kind="runs, with one loud canary by a coin",
            delta=self.settings.delta,
            confidence=self.confidence,
            claim=self._claim(),
        )

    def _claim(self) -> Claim | None:
        delta = self.settings.delta
        if self.claimed_epsilon is not None:
            return Claim.of_epsilon(self.claimed_epsilon, delta=delta)
        claim = Claim.of_mechanism(self.mechanism, delta=delta, accountant=self.settings.accountant)
        return claim if math.isfinite(claim.epsilon) else None

    def _canaries(self, count: int, kind: Kind) -> Canaries:
        if kind in WHITE_BOX:
            return Canaries(count=count, kind=kind)
        test, classes = self.splits.test, len(self.splits.classes)
        if kind == "blank":
            return Canaries(count=count, kind=kind, records=blank(test.input_shape, count=count, classes=classes))
        if count > len(test):
            raise InputError(
                f"canaries={count} is not allowed: mislabelled ones are made from test records, and there are {len(test)}."
            )
        x, y = test.batch(torch.arange(count))
        return Canaries(count=count, kind=kind, records=mislabelled(x, y, classes=classes))

    def _engine(self, canaries: Canaries) -> PrivacyEngine:
        settings, splits = self.settings, self.splits
        own = Records.of(splits, settings).train
        records: Any = own
        if self.ledger is None:
            records = StandIns(splits.test, max(1, len(own) - canaries.expected))
        model = create_model(settings.model, splits.test.input_shape, len(splits.classes), settings.activation)
        optimizer, scheduler = make_optimizer(settings, model)
        engine = PrivacyEngine(accountant=settings.accountant)
        engine.make_private_by(
            _for_records(self.mechanism, len(records) + canaries.expected, planned=planned_size(settings, splits)),
            module=model,
            optimizer=optimizer,
            data_loader=records,
            options=TrainingOptions(
                lr_scheduler=scheduler,
                max_physical_batch_size=1024,
                canaries=canaries,
                ledger=self.ledger,
                ledger_delta=settings.delta,
            ),
        )
        return engine

    def _train(self, engine: PrivacyEngine, report: Callable[[int], None] = lambda release: None) -> None:
        try:
            for release in engine.releases(F.cross_entropy):
                report(release)
        except GaveUpError:
            pass  # what was released so far is audited


def planned_size(settings: TrainSettings, splits: DataSplits) -> int:
    """For how many records a run is planned: those that it trains on, and half of its canaries."""
    return len(Records.of(splits, settings).train) + (settings.canaries or 0) // 2


class StandIns(Dataset[Any]):
    """As many records as a data set has, all of them from another one, over and over."""

    def __init__(self, examples: Examples, count: int) -> None:
        self._examples = examples
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self._examples[index % len(self._examples)]

    def batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        return self._examples.batch(indices % len(self._examples))


def _for_records(mechanism: Mechanism, records: int, *, planned: int) -> Mechanism:
    """The mechanism for another number of records: only the divisor of its sums changes, which no accountant reads."""
    if records == planned or not hasattr(mechanism, "expected_batch_size"):
        return mechanism
    changed: Any = mechanism
    scaled: Mechanism = replace(changed, expected_batch_size=changed.expected_batch_size * records / planned)
    return scaled


__all__ = ["Rehearsal", "StandIns", "planned_size"]
