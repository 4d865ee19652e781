"""A study of attempts: is an update that a gate accepts, or rejects, one that lowers the loss on the training records?"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from sluice._base.files import parse_json, read_bytes
from sluice.randomness.noise import NoiseSource, SeededNoise
from sluice.randomness.sampling import PoissonSampler
from sluice.runs.folder import RunFolder
from sluice.runs.trace import read_trace
from sluice.training.selective_release import ObservedAttempt, SelectiveReleaseExecutor


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Which attempts are looked at: public, and independent of what the gate decides but for the rate of rejected ones.

    Attributes:
        release_rate: the probability with which a release is chosen; its accepted attempt is looked at.
        rejected_rate: the probability with which each rejected attempt of a chosen release is looked at.
        records: the loss is that on so many training records, drawn once for a run; None for all of them.
    """

    release_rate: float
    rejected_rate: float
    records: int | None = None

    def to_dict(self) -> dict[str, Any]:
        return {"release_rate": self.release_rate, "rejected_rate": self.rejected_rate, "records": self.records}


class AttemptStudy:
    """Looks at attempts of a seeded run, which it leaves as it is, and writes down a line for each release.

    An update is good if one step of the run's own optimizer with it lowers the mean loss. Candidates of rejected and of accepted
    attempts are made in one way: the scaled sum of the attempt's batch with noise from a source of the study's own, which
    has the law of the update that is or would be released, since the gate does not look at that noise. Attempts that were
    skipped because no batch could have passed get a batch from that source too.

    Guarantee:
        Sensitive: un-noised losses of the training records decide what is written. For experiments on public data.
        The run's decisions and releases are bit for bit those of a run without the study: weights and the optimizer's state
        are put back, and nothing is drawn from the run's own noise.
    """

    def __init__(self, *, seed: int, sampling: Sampling, path: Path) -> None:
        self.sampling = sampling
        self._seed = seed
        self._path = path
        self._release = 0

    def observe_attempt(self, attempt: ObservedAttempt) -> None:
        if attempt.release != self._release:
            self._begin(attempt.release)
        if self._chosen:
            self._look(attempt)
        self._rejected += attempt.skipped + (not attempt.accepted)
        if attempt.accepted:
            self._write()

    def result(self, run: Path) -> dict[str, Any]:
        """Counts over the run, for the result of its cell."""
        rows = {row["release"]: row for row in self._rows()}
        trace = read_trace(RunFolder.look(run).trace_path)
        accepted = [change for row in rows.values() for change in row["accepted"]]
        rejected = [change for row in rows.values() for change in row["rejected"]]
        return {
            "study": {
                **self.sampling.to_dict(),
                "accepted": _counted(accepted),
                "rejected": _counted(rejected),
                "attempts": sum(row.attempts for row in trace),
                "releases": len(trace),
                "measured": sum(row.measured for row in trace),
                "metric": fmean(row.metric for row in trace),
            }
        }

    def _begin(self, release: int) -> None:
        # A resumed run repeats releases, and each has the source that it had.
        self._release = release
        self._noise = self._source(f"release {release}")
        self._chosen = bool(self._noise.bernoulli(1, self.sampling.release_rate))
        self._before: float | None = None
        self._rejected = 0
        self._changes: dict[str, list[float]] = {"accepted": [], "rejected": []}

    def _look(self, attempt: ObservedAttempt) -> None:
        executor = SelectiveReleaseExecutor(attempt.mechanism, replace(attempt.context, noise=self._noise))
        for indices, accepted in self._batches(attempt):
            if accepted or bool(self._noise.bernoulli(1, self.sampling.rejected_rate)):
                kind = "accepted" if accepted else "rejected"
                self._changes[kind].append(self._change(attempt, executor.candidate(indices, attempt.loss)))

    def _batches(self, attempt: ObservedAttempt) -> Iterator[tuple[Tensor, bool]]:
        sampler = PoissonSampler(
            dataset_size=attempt.context.dataset_size, sample_rate=attempt.mechanism.sample_rate, source=self._noise
        )
        for _ in range(attempt.skipped):
            yield sampler.sample(), False
        yield attempt.indices, attempt.accepted

    def _change(self, attempt: ObservedAttempt, candidate: dict[str, Tensor]) -> float:
        updater = attempt.context.updater
        if self._before is None:
            self._before = self._loss(attempt)
        with updater.trial():
            updater.step(candidate)
            return self._loss(attempt) - self._before

    def _loss(self, attempt: ObservedAttempt) -> float:
        size = attempt.context.dataset_size
        indices = torch.arange(size)
        if self.sampling.records is not None and self.sampling.records < size:
            order = self._source("records").random_order(indices)
            indices = order[: self.sampling.records].sort().values
        return float(attempt.context.raw_losses(indices, attempt.loss).mean())

    def _source(self, purpose: str) -> NoiseSource:
        digest = hashlib.sha256(f"study of attempts, seed {self._seed}, {purpose}".encode("ascii")).digest()
        return SeededNoise(int.from_bytes(digest[:7], "big"))

    def _write(self) -> None:
        row = {"release": self._release, "rejected_attempts": self._rejected, **self._changes}
        with open(self._path, "a", encoding="ascii") as stream:
            stream.write(json.dumps(row) + "\n")

    def _rows(self) -> Iterator[dict[str, Any]]:
        if not self._path.exists():
            return
        for line in read_bytes(self._path).splitlines():
            if line.startswith(b"{") and line.endswith(b"}"):  # a crash may have torn the last one
                yield parse_json(line, what=str(self._path))


def _counted(changes: list[float]) -> dict[str, Any]:
    """A change that is not a number is not good."""
    return {"evaluated": len(changes), "good": sum(change < 0 for change in changes)}


__all__ = ["AttemptStudy", "Sampling"]
