"""All records of a data set in one pool, from which each model of an attack gets its own."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from sluice._base import codec
from sluice.data import DataSplits, Examples, TensorExamples
from sluice.data.transforms import unscaled
from sluice.experiments.attacks.split import drawn_records
from sluice.experiments.preparing import prepare
from sluice.experiments.settings import TrainSettings
from sluice.features.examples import RowExamples


@dataclass(frozen=True, kw_only=True)
class PoolSource:
    """Where the records come from: small, so that it can be handed to another process.

    Attributes:
        features: what models see of them.
        classes, class_names, target: how labels are read, as in the settings of a run.
        records: how many are drawn, by the seed; None for all.
    """

    dataset: str
    features: str = "plain"
    classes: int | None = None
    class_names: str | None = field(default=None, metadata=codec.ADDED_IF_GIVEN)
    target: str | None = field(default=None, metadata=codec.ADDED_IF_GIVEN)
    data_dir: Path | None = None
    records: int | None = None
    seed: int = 0

    def settings(self) -> TrainSettings:
        """Settings that name these data and features, and nothing else."""
        return TrainSettings(
            dataset=self.dataset,
            features=self.features,
            classes=self.classes,
            class_names=self.class_names,
            target=self.target,
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class Pool:
    """The records, those for training first, then those for testing, less what was not drawn.

    Attributes:
        trained: how many of them were for training.
        all_for_training: how many records the data set itself trains on, which its recipes are made for.
    """

    examples: Examples
    name: str
    classes: tuple[str, ...]
    splits: DataSplits
    trained: int
    all_for_training: int

    def __len__(self) -> int:
        return len(self.examples)

    @property
    def labels(self) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        found: np.ndarray[tuple[int], np.dtype[np.int64]] = self.examples.labels.numpy()
        return found

    def divided(self, inside: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> DataSplits:
        """The members as training records, the others as test records."""
        return DataSplits(
            name=self.splits.name,
            kind=self.splits.kind,
            classes=self.classes,
            train=self.examples.subset(np.flatnonzero(inside)),
            test=self.examples.subset(np.flatnonzero(~inside)),
        )


@lru_cache(maxsize=1)
def load_pool(source: PoolSource) -> Pool:
    """The pool, read once for all models that a process trains."""
    splits = prepare(source.settings(), data_dir=source.data_dir, show_progress=False)
    joined = _joined(splits.train, splits.test)
    trained = len(splits.train)
    if source.records is not None:
        chosen = drawn_records(source.records, of=len(joined), seed=source.seed)
        joined, trained = joined.subset(chosen), int((chosen < trained).sum())
    return Pool(
        examples=joined,
        name=splits.name,
        classes=splits.classes,
        splits=splits,
        trained=trained,
        all_for_training=len(splits.train),
    )


def _joined(train: Examples, test: Examples) -> Examples:
    labels = torch.cat([train.labels, test.labels])
    if isinstance(train, RowExamples) and isinstance(test, RowExamples):
        return RowExamples(torch.cat([train.inputs, test.inputs]), labels, train.features)
    if isinstance(train, TensorExamples) and isinstance(test, TensorExamples):
        return TensorExamples(torch.cat([train.inputs, test.inputs]), labels, train.transform)
    return TensorExamples(torch.cat([_inputs(train), _inputs(test)]), labels, unscaled)


def _inputs(examples: Examples) -> Tensor:
    return examples.batch(torch.arange(len(examples)))[0]
