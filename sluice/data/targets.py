"""What a record's target is in a user's own data: one of some classes, or a number."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Self

import numpy as np
import torch
from torch import Tensor

from sluice._base.errors import DataError, InputError
from sluice.data.labels import class_labels, listed

TargetKind = Literal["class", "number", "count"]
TARGET_KINDS = ("class", "number", "count")
LARGEST: Mapping[str, float] = {"number": 1e18, "count": 1e8}
"""Beyond, squares and exponentials are not finite in float32."""


@dataclass(frozen=True, kw_only=True)
class Targets:
    """How the targets of a data set are read.

    Attributes:
        classes: how many classes there can be; None where the highest label tells, or targets are no classes.
        names: of the classes, in the order of their numbers, where they have some.
        kind: "class", "number", or "count" for a number that is not negative.
    """

    classes: int | None = None
    names: tuple[str, ...] = ()
    kind: TargetKind = "class"

    def __post_init__(self) -> None:
        if self.kind != "class" and (self.classes is not None or self.names):
            raise InputError(
                f"classes (class_names, folders of images, a declared ClassLabel) are not allowed with target_kind={self.kind!r}: "
                "give a number for each record."
            )

    @property
    def are_classes(self) -> bool:
        return self.kind == "class"

    def of_declared(self, names: Sequence[str], where: str) -> Self:
        """The same for data that declare names of classes: theirs, unless names are given, which must then include all of them."""
        if not names or not self.names:
            return replace(self, names=tuple(names) or self.names)
        other = [name for name in names if name not in self.names]
        if other:
            raise InputError(
                f"class_names={','.join(self.names[:10])!r} is not allowed for {where}, whose classes are {listed(names)}: give all "
                "of these names, in the order of their numbers, or leave class_names out."
            )
        return self

    def read(self, y: np.ndarray, where: str) -> Tensor:
        """The number of each record's class, int64, or the number itself, float32.

        **Guarantee.** Entry i depends on target i and on public constants alone.
        """
        if self.are_classes:
            return class_labels(y, where, names=self.names)
        return _numbers(y, where, largest=LARGEST[self.kind], lowest=0.0 if self.kind == "count" else None)


def _numbers(y: np.ndarray, where: str, *, largest: float, lowest: float | None) -> Tensor:
    y = y[:, 0] if y.ndim == 2 and y.shape[1] == 1 else y
    if y.ndim != 1 or y.size == 0:
        raise DataError(f"{where} has shape {y.shape}; targets must be one row of numbers, at least one.")
    if y.dtype.kind not in "buif":
        raise DataError(
            f"{where} ({y.dtype}) holds no numbers, which this loss is for. For classes, use cross-entropy."
        )
    values = y.astype(np.float64)
    wrong = ~(np.abs(values) <= largest)
    if wrong.any():
        row = int(np.flatnonzero(wrong)[0])
        raise DataError(
            f"{where}: target {row} is {values[row]}; targets must be finite numbers of at most {largest:g}. Remove such "
            "records one by one, or divide all targets by a public constant."
        )
    if lowest is not None and (values < lowest).any():
        row = int(np.flatnonzero(values < lowest)[0])
        raise DataError(f"{where}: target {row} is {values[row]}; counts must not be negative.")
    return torch.from_numpy(values.astype(np.float32))


__all__ = ["LARGEST", "TARGET_KINDS", "TargetKind", "Targets"]
