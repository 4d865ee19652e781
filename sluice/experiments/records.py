"""The records of a run: those that train it, those that judge it, and how its model sees them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from sluice._base.errors import DataError
from sluice.data import DataSplits, Examples
from sluice.experiments.fitting import parts
from sluice.experiments.settings import TrainSettings
from sluice.features import RowFeatures
from sluice.features.examples import RowExamples


@dataclass(frozen=True, kw_only=True)
class Records:
    """The records of a run.

    Attributes:
        held_out: those of the training records that judge the run; None where test records do.
        features: what rows were made by, once the model sees them; None for records that are not rows.
    """

    train: Examples
    held_out: Examples | None
    test: Examples
    classes: tuple[str, ...]
    features: RowFeatures | None = None

    @classmethod
    def of(cls, splits: DataSplits, settings: TrainSettings) -> Records:
        """The records that settings choose; some must be there to judge the run by."""
        train, held_out = parts(splits.train, settings) if settings.hold_out else (splits.train, None)
        if held_out is None and len(splits.test) == 0:
            raise DataError(f"{splits.name} has no test records: add some, or hold out training records (hold_out).")
        return cls(train=train, held_out=held_out, test=splits.test, classes=splits.classes)

    def presented(self, centre: Tensor | None) -> Records:
        """These records as the model sees them: rows of features less their released mean, where one was released."""
        if not isinstance(self.train, RowExamples):
            return self

        def shown(examples: Examples) -> Examples:
            return examples.presented(centre) if isinstance(examples, RowExamples) else examples

        return replace(
            self,
            train=shown(self.train),
            held_out=None if self.held_out is None else shown(self.held_out),
            test=shown(self.test),
            features=self.train.features,
        )


__all__ = ["Records"]
