"""Rehearsals: a run's own mechanism on stand-in records, for an audit alone. They spend nothing, and publish no model."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import Dataset

from sluice._base import validate
from sluice._base.errors import InputError
from sluice.audit.bounds import clopper_pearson, gaussian_fit
from sluice.audit.canaries import WHITE_BOX, Canaries, Kind, blank, mislabelled
from sluice.audit.curves import Claim
from sluice.audit.guesses import LIKELIHOOD, require_canaries
from sluice.audit.result import AuditResult, Bound
from sluice.data import DataSplits, Examples
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
        splits: the data of the run. Of the training records only number and shape are used: test records stand in for them.
        mechanism: that of the run.
        confidence: of the bounds.
        claimed_epsilon: what is put to the test; None takes what the mechanism's own accountant says.
        report: called after each release with its number.
    """

    settings: TrainSettings
    splits: DataSplits
    mechanism: Mechanism
    confidence: float = 0.95
    claimed_epsilon: float | None = None
    report: Callable[[int], None] = lambda release: None

    def __post_init__(self) -> None:
        validate.open_fraction(confidence=self.confidence)
        if len(self.splits.test) == 0:
            raise InputError(
                f"dataset={self.splits.name!r} has no test records, which stand in for the training records. Add some."
            )

    def once(self, *, canaries: int, kind: Kind = "loud") -> AuditResult:
        """One run with many canaries.

        Guarantee:
            No training record is read. Noise, sampling and coins come from the operating system, whatever the run's seed.
        """
        require_canaries(canaries)
        engine = self._engine(self._canaries(canaries, kind))
        found = self._audited(engine)
        return replace(found, rehearsal=True)

    def repeatedly(self, *, runs: int) -> AuditResult:
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
            scores[run], members[run] = engine.auditing.scores()[LIKELIHOOD][0], canaries.members[0]
            engine.close()
            self.report(run + 1)
        half = runs // 2
        threshold = _best_threshold(scores[:half], members[:half])
        said_in, inside = scores[half:] > threshold, members[half:]
        found = {
            "hits": int((said_in & inside).sum()),
            "with_canary": max(1, int(inside.sum())),
            "alarms": int((said_in & ~inside).sum()),
            "without": max(1, int((~inside).sum())),
        }
        return self._result_of_trials(found, runs=runs)

    def _result_of_trials(self, found: dict[str, int], *, runs: int) -> AuditResult:
        delta, claim = self.settings.delta, self._claim()
        perfect = {**found, "hits": found["with_canary"], "alarms": 0}
        correct = found["hits"] + found["without"] - found["alarms"]
        bounds = tuple(
            Bound(
                method=method,
                assumption=assumption,
                lower_bound=bound(**found, delta=delta, confidence=self.confidence),
                score=LIKELIHOOD,
                guesses=found["with_canary"] + found["without"],
                correct=correct,
                ceiling=bound(**perfect, delta=delta, confidence=self.confidence),
            )
            for method, bound, assumption in (
                ("clopper-pearson", clopper_pearson, ""),
                ("gaussian-fit", gaussian_fit, "the trade-off curve of the run is that of a Gaussian mechanism"),
            )
        )
        lower = bounds[0].lower_bound
        return AuditResult(
            lower_bound=lower,
            bounds=bounds,
            delta=delta,
            confidence=self.confidence,
            canaries=runs,
            kind="loud, one in each of as many runs",
            claimed=None if claim is None else claim.epsilon,
            proved=claim is not None and claim.proved,
            p_value=None,
            refuted=claim is not None and lower > claim.epsilon,
            rehearsal=True,
        )

    def _claim(self) -> Claim | None:
        delta = self.settings.delta
        if self.claimed_epsilon is not None:
            return Claim.of_epsilon(self.claimed_epsilon, delta=delta)
        epsilon = self.mechanism.epsilon_after(
            self.mechanism.releases, delta=delta, accountant=self.settings.accountant
        )
        proved = self.mechanism.provable
        return replace(Claim.of_epsilon(epsilon, delta=delta), proved=proved) if math.isfinite(epsilon) else None

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
        stand_ins = max(1, len(splits.train) - canaries.expected)
        model = create_model(settings.model, splits.test.input_shape, len(splits.classes), settings.activation)
        optimizer, scheduler = make_optimizer(settings, model)
        engine = PrivacyEngine(accountant=settings.accountant)
        engine.make_private_by(
            _for_records(self.mechanism, stand_ins + canaries.expected, planned=len(splits.train)),
            module=model,
            optimizer=optimizer,
            data_loader=StandIns(splits.test, stand_ins),
            options=TrainingOptions(lr_scheduler=scheduler, max_physical_batch_size=1024, canaries=canaries),
        )
        return engine

    def _train(self, engine: PrivacyEngine, report: Callable[[int], None] = lambda release: None) -> None:
        try:
            for release in engine.releases(F.cross_entropy):
                report(release)
        except GaveUpError:
            pass  # what was released so far is audited

    def _audited(self, engine: PrivacyEngine) -> AuditResult:
        self._train(engine, self.report)
        return engine.audit(delta=self.settings.delta, confidence=self.confidence, claimed_epsilon=self.claimed_epsilon)


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


def _best_threshold(scores: np.ndarray, members: np.ndarray) -> float:
    """Between two scores, where the best test of these runs has its threshold."""
    order = np.sort(scores)
    candidates = (order[1:] + order[:-1]) / 2
    right = [(scores[members] > each).sum() + (scores[~members] <= each).sum() for each in candidates]
    return float(candidates[int(np.argmax(right))])


__all__ = ["Rehearsal", "StandIns"]
