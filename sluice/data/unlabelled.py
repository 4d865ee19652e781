"""Records in the form of a data set but without labels: what a finished model is asked about."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from sluice._base.errors import DataError
from sluice.data import own
from sluice.data.array_files import read_arrays
from sluice.data.catalog import CATALOG, DIGITS, IMDB
from sluice.data.examples import Examples, TensorExamples
from sluice.data.text import Sequences
from sluice.data.transforms import ToFloat

DIGITS_SCALE = ToFloat(divisor=16.0)


def unlabelled(source: str, records: NDArray[Any]) -> Examples:
    """Images or rows of numbers, to be read as those of a data set are; ``source`` is its name or path.

    **Guarantee.** Row i of what is read depends on record i alone.
    """
    kind = own.kind_of(records)
    if source in CATALOG or source == DIGITS:
        kind = "image"
    inputs, transform = own.model_inputs(records, kind, "records")
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


def read_records(path: Path) -> tuple[NDArray[Any], NDArray[Any] | None]:
    """The records of a ``.npz`` file or folder of arrays (x, else x_test), and their labels where it has some."""
    arrays = read_arrays(path, require_labels=False)
    name = "x" if "x" in arrays else "x_test"
    if name not in arrays:
        raise DataError(f"{path} has no records: it needs an array x, or x_test.")
    return arrays[name], arrays.get(name.replace("x", "y", 1))


__all__ = ["ranked", "read_records", "unlabelled"]
