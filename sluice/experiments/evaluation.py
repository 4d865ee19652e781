"""How good a model is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from sluice.data import Examples

_BATCH = 500  # in larger batches, outputs of layers no longer stay in the processor's cache
_UNEVEN = 0.8
"""From this share of the test records on in one class, accuracy alone says little."""


@torch.no_grad()
def outputs(model: nn.Module, examples: Examples) -> Iterator[tuple[Tensor, Tensor]]:
    """What the model says of the records, dropout off, and their labels, batch by batch."""
    was_training = model.training
    model.eval()
    for positions in torch.arange(len(examples)).split(_BATCH):
        x, y = examples.batch(positions)
        yield model(x), y
    model.train(was_training)


def predicted_classes(model: nn.Module, examples: Examples) -> Tensor:
    """The class that the model puts each record into."""
    return torch.cat([scores.argmax(1) for scores, _ in outputs(model, examples)])


def accuracy(model: nn.Module, examples: Examples) -> float:
    """The share of records that the model puts into the right class."""
    return share_right(predicted_classes(model, examples), examples.labels)


def share_right(predicted: Tensor, labels: Tensor) -> float:
    """The share of predicted classes that are right."""
    return int((predicted == labels).sum()) / len(labels)


@dataclass(frozen=True, kw_only=True)
class ClassAccuracy:
    """How many test records there are of a class, and the share of them that is put into it (None for no record)."""

    name: str
    records: int
    accuracy: float | None


def accuracy_by_class(predicted: Tensor, labels: Tensor, classes: Sequence[str]) -> tuple[ClassAccuracy, ...]:
    """Accuracy on the records of each class, from what was predicted.

    Guarantee:
        None for these records: they must be public, as test records are.
    """
    count = torch.bincount(labels, minlength=len(classes)).float()
    right = torch.bincount(labels[predicted == labels], minlength=len(classes)).float()
    return tuple(
        ClassAccuracy(name=name, records=int(count[i]), accuracy=float(right[i] / count[i]) if count[i] else None)
        for i, name in enumerate(classes)
    )


def balanced_accuracy(found: Sequence[ClassAccuracy]) -> float | None:
    """The mean of the accuracies of those classes that there are test records of."""
    known = [each.accuracy for each in found if each.accuracy is not None]
    return sum(known) / len(known) if known else None


def remarks(found: Sequence[ClassAccuracy]) -> Iterator[str]:
    """What accuracy alone would not show, from the test records, which are public."""
    total = sum(each.records for each in found)
    missing = [each.name for each in found if not each.records]
    if missing:
        named = ", ".join(missing[:8]) + (", ..." if len(missing) > 8 else "")
        yield (
            f"No test record has the class {named}: {len(found) - len(missing)} of {len(found)} classes occur. If they do "
            "not exist, number the labels without gaps, or give the number of classes (classes)."
        )
    largest = max(found, key=lambda each: each.records, default=None)
    if largest is not None and total and largest.records >= _UNEVEN * total:
        balanced = balanced_accuracy(found)
        yield (
            f"{100 * largest.records / total:.1f} % of the test records have the class {largest.name}: who always says so is right as "
            f"often. Balanced accuracy, the mean over classes, is {100 * (balanced or 0):.2f} %."
        )


__all__ = [
    "ClassAccuracy",
    "accuracy",
    "accuracy_by_class",
    "balanced_accuracy",
    "outputs",
    "predicted_classes",
    "remarks",
    "share_right",
]
