"""Data sets spoiled on purpose: wrong labels, and records that were made to have large gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sluice._base import validate
from sluice._base.errors import InputError
from sluice.data import DataSplits
from sluice.data.examples import Examples


@dataclass(frozen=True, kw_only=True)
class Spoiling:
    """What is done to the training records; test records stay as they are.

    Attributes:
        wrong_labels: this share of the records gets the label of another class.
        poisoned: this share gets the label of another class and ten times the input, and with it ten times the gradient.
    """

    wrong_labels: float = 0.0
    poisoned: float = 0.0

    def __post_init__(self) -> None:
        for name in ("wrong_labels", "poisoned"):
            if getattr(self, name):
                validate.fraction(**{name: getattr(self, name)})


LARGER = 10.0


def spoiled(splits: DataSplits, how: Spoiling | None) -> DataSplits:
    """The data with some of its training records spoiled: always the same ones."""
    if how is None:
        return splits
    return replace(splits, train=SpoiledExamples(splits.train, how, classes=len(splits.classes)))


class SpoiledExamples(Examples):
    """Records as they are, but for those that are spoiled."""

    def __init__(self, whole: Examples, how: Spoiling, *, classes: int) -> None:
        self._whole = whole
        generator = torch.Generator().manual_seed(0)
        order = torch.randperm(len(whole), generator=generator)
        poisoned, wrong = round(how.poisoned * len(whole)), round(how.wrong_labels * len(whole))
        mislabelled = order[: poisoned + wrong]
        shift = torch.randint(1, classes, (len(mislabelled),), generator=generator)
        self.labels = whole.labels.clone()
        self.labels[mislabelled] = (self.labels[mislabelled] + shift) % classes
        self._factor = torch.ones(len(whole))
        self._factor[order[:poisoned]] = LARGER

    def inputs_at(self, indices: Tensor) -> Tensor:
        inputs = self._whole.inputs_at(indices)
        return inputs * self._factor[indices].view(-1, *[1] * (inputs.dim() - 1)).to(inputs.dtype)

    def subset(self, indices: Sequence[int] | Tensor) -> SpoiledExamples:  # type: ignore[override]
        raise InputError("hold_out is not allowed with spoiled records: the study trains on all of them.")
