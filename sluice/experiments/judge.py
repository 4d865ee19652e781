"""How good a run is: looks at test records along the way, at held-out ones once, of the model that is published."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from sluice._base.files import canonical_json, write_atomically
from sluice.data import Examples
from sluice.experiments.evaluation import accuracy_by_class, predicted_classes, remarks, share_right
from sluice.experiments.objective import Objective
from sluice.experiments.recorded import HELD_OUT, write_classes
from sluice.experiments.records import Records
from sluice.experiments.settings import TrainSettings
from sluice.experiments.shrinking import shrunk_model
from sluice.mechanism.delta import DeltaWarning
from sluice.runs.evaluations import Evaluation
from sluice.runs.folder import RunFolder
from sluice.runs.public_files import PublicFiles
from sluice.training.engine import PrivacyEngine


@dataclass(kw_only=True)
class Judge:
    """Looks at what a run has released, and publishes what it finds on test records.

    Guarantee:
        Training records are read through the released weights alone. What is found on held-out records, which are
        training records too, goes to ``private/``.
    """

    settings: TrainSettings
    objective: Objective
    records: Records
    model: nn.Module
    engine: PrivacyEngine
    publication: PublicFiles
    _latest: Evaluation | None = field(default=None, init=False)
    _predicted: tuple[int, Tensor] | None = field(default=None, init=False)

    def is_due(self, release: int) -> bool:
        """Whether to look at the test records after this release."""
        every = self.settings.evaluate_every
        if every is None:
            every = max(1, self.engine.mechanism.releases // 10)
        return every > 0 and release > 0 and release % every == 0

    def evaluate(self) -> Evaluation | None:
        """Look at the test records now, unless others are held out, and publish it; once for each release."""
        release = self.engine.released
        if self.records.held_out is not None:
            return None
        if self._latest is None or self._latest.release != release:
            found = self._quality()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeltaWarning)  # it is among the notes
                epsilon = self.engine.get_epsilon(self.settings.delta) if self.engine.mechanism.provable else None
            self._latest = Evaluation(
                release=release,
                epsilon_if_planned_to_stop_here=epsilon,
                test_accuracy=found.get("accuracy"),
                test_scores=found.get("scores"),
            )
            self.publication.add(self._latest)
        return self._latest

    def look_at_classes(self, folder: RunFolder) -> list[str]:
        """Publish accuracy by class, on test records, and remark on what accuracy alone would hide."""
        if self.records.held_out is not None or self.objective.predicts_numbers:
            return []
        found = accuracy_by_class(self._predicted_classes(), self.records.test.labels, self.records.classes)
        write_classes(folder, found)
        return list(remarks(found))

    def keep_held_out_quality(self, folder: RunFolder) -> None:
        """Write what is found on held-out records, where there are some, to ``private/``."""
        if self.records.held_out is None:
            return
        found = {f"held_out_{name}": value for name, value in self._quality().items()}
        write_atomically(folder.private / HELD_OUT, canonical_json(found) + b"\n", public=False)

    @contextmanager
    def published_model(self) -> Iterator[nn.Module]:
        """The average of the released weights, where one is kept, else the last ones, shrunk if the settings say so."""
        if self.settings.shrinkage is not None:
            yield shrunk_model(self.model, self.settings, self.engine.mechanism, releases=self.engine.released)
            return
        if not self.settings.ema_decay:
            yield self.model
            return
        with self.engine.averaged() as averaged:
            yield averaged

    @property
    def _judging(self) -> Examples:
        """The records that judge the run."""
        return self.records.test if self.records.held_out is None else self.records.held_out

    def _quality(self) -> dict[str, Any]:
        """The accuracy of classes, or the scores of numbers."""
        if self.objective.predicts_numbers:
            with self.published_model() as model:
                return {"scores": self.objective.scores_on(model, self._judging)}
        return {"accuracy": share_right(self._predicted_classes(), self._judging.labels)}

    def _predicted_classes(self) -> Tensor:
        """What the published model says of the records that judge the run, which it sees once for each release."""
        release = self.engine.released
        if self._predicted is None or self._predicted[0] != release:
            with self.published_model() as model:
                self._predicted = release, predicted_classes(model, self._judging)
        return self._predicted[1]


__all__ = ["Judge"]
