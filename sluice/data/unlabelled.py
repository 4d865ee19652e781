"""Records in the form of a data set, with labels or without: what a finished model is asked about."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sluice._base.errors import DataError, InputError
from sluice.data import own
from sluice.data.catalog import CATALOG, DIGITS, IMDB
from sluice.data.examples import Examples, TensorExamples
from sluice.data.files import Kind
from sluice.data.image_folder import read_images
from sluice.data.labels import listed, one_hot_width
from sluice.data.targets import Targets
from sluice.data.text import Sequences
from sluice.data.transforms import ToFloat

DIGITS_SCALE = ToFloat(divisor=16.0)


def unlabelled(source: str, records: NDArray[Any], *, kind: Kind | None = None) -> Examples:
    """Images or rows of numbers, to be read as those of a data set are; ``source`` is its name or path.

    **Guarantee.** Row i of what is read depends on record i alone.
    """
    if records.ndim == 0 or len(records):
        own.require_records(records, "records")
    if source in CATALOG or source == DIGITS:
        kind = "image"
    inputs, transform = own.model_inputs(records, kind or own.kind_of(records), "records")
    if inputs.dtype == torch.uint8 and (source in CATALOG or source == DIGITS):
        transform = DIGITS_SCALE if source == DIGITS else CATALOG[source].transform
    return TensorExamples(inputs, torch.zeros(len(inputs), dtype=torch.int64), transform)


def ranked(records: NDArray[Any]) -> Sequences:
    """Texts from rows of word ranks, the most frequent word being 1, filled up with 0."""
    if records.ndim != 2 or records.dtype.kind not in "ui" or (records.size and records.min() < 0):
        raise DataError(
            f"records ({records.dtype}, shape {records.shape}) are not texts: give rows of word ranks, the most frequent "
            f"word of {IMDB.name} being 1, filled up with 0."
        )
    ranks = torch.from_numpy(records.astype(np.int64))
    named = ranks > 0
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), named.sum(1).cumsum(0)])
    return Sequences(ids=ranks[named], offsets=offsets)


def read_records(
    path: Path, *, targets: Targets, classes: Sequence[str] = (), target: str | None = None
) -> tuple[NDArray[Any], Tensor | None]:
    """The records of a file or folder in any form that can be trained on, and their targets where it has some.

    A folder may also hold images without classes. Of data in two parts these are the records for testing.

    Args:
        targets: how targets are read.
        classes: the names of the classes that folders of images must be among.
        target: the column of a table with the target, if it is there.

    **Guarantee.** Record and target i depend on record i of the source alone.
    """
    if not path.exists():
        raise InputError(f"DATA={str(path)!r} is not allowed: there is no such file or folder.")
    images = read_images(path) if path.is_dir() else None
    if images is not None:
        return images, None
    arrays, folders = own.read(path, target=target, targets=targets, require_targets=False)
    name = "x" if "x" in arrays else "x_test"
    if name not in arrays:
        raise DataError(
            f"{path} has no records: it needs an array x, or x_test, or folders of images, or a table's columns."
        )
    where, x, y = f"{path}[{name}]", arrays[name], arrays.get(name.replace("x", "y", 1))
    own.require_records(x, where)
    if y is None:
        return x, None
    if folders:
        targets = replace(targets, classes=None, names=_among(folders, classes, path))
    labels = targets.read(y, f"{path}[{name.replace('x', 'y', 1)}]")
    own.require_pairs(x, labels, where, name.replace("x", "y", 1))
    if targets.are_classes and classes:
        _require_classes(y, labels, classes, path)
    return x, labels


def _among(folders: Sequence[str], classes: Sequence[str], path: Path) -> tuple[str, ...]:
    other = [name for name in folders if name not in classes]
    if other:
        raise DataError(
            f"{path} has folders that are no classes of the model ({listed(other)}): its classes are {listed(classes)}."
        )
    return tuple(classes)


def _require_classes(y: NDArray[Any], labels: Tensor, classes: Sequence[str], path: Path) -> None:
    found = one_hot_width(y) or int(labels.max()) + 1
    if found > len(classes) or one_hot_width(y) not in (None, len(classes)):
        raise DataError(f"{path} has labels of {found} classes, and the model has {len(classes)} ({listed(classes)}).")


__all__ = ["ranked", "read_records", "unlabelled"]
