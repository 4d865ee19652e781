"""Data sets of Hugging Face's library ``datasets``, read into arrays. The library itself is not needed here."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import numpy as np

from sluice._base.errors import DataError, InputError
from sluice.data.image_folder import pixels_of
from sluice.data.tables import TARGETS

_TARGETS = ("label", "labels", *TARGETS)


def is_hugging_face(source: object) -> bool:
    """Whether this is a ``Dataset`` of that library, or a ``DatasetDict`` of such."""
    return type(source).__module__.split(".")[0] == "datasets" and (
        hasattr(source, "column_names") and (hasattr(source, "features") or isinstance(source, dict))
    )


def read_hugging_face(
    source: Any, *, test: Any | None, target: str | None
) -> tuple[dict[str, np.ndarray], tuple[str, ...]]:
    """Arrays by name, and the names of classes where the data set declares them.

    A ``DatasetDict`` must have the parts train and test.

    **Guarantee.** Record i of the result is a function of record i of the source and of its declared features.
    """
    if isinstance(source, dict):
        missing = {"train", "test"} - set(source)
        if missing or test is not None:
            raise InputError(
                f"a DatasetDict with the parts {', '.join(source)} is not allowed here: it must have train and test (or give "
                "one part, and another as test)."
            )
        source, test = source["train"], source["test"]
    columns = _columns(source, target)
    x, y, names = _arrays(source, *columns)
    if test is None:
        return {"x": x, "y": y}, names
    if not is_hugging_face(test):
        raise InputError(f"test ({type(test).__name__}) is not allowed: give a Hugging Face data set, as the first.")
    if set(_columns(test, target)[1]) != set(columns[1]):
        raise InputError(
            f"the part for testing has the columns {', '.join(test.column_names)}, the other {', '.join(source.column_names)}: "
            "both must have the same."
        )
    x_test, y_test, _ = _arrays(test, *columns)
    return {"x_train": x, "y_train": y, "x_test": x_test, "y_test": y_test}, names


def _columns(dataset: Any, target: str | None) -> tuple[str, list[str]]:
    """The column with the target, and those with the inputs."""
    if not hasattr(dataset, "__len__"):
        raise InputError(
            f"{type(dataset).__name__} is not allowed: it is streamed, and records must be drawn at random. Load it as a whole "
            "(load_dataset without streaming=True)."
        )
    columns = list(dataset.column_names)
    if len(dataset) == 0:
        raise DataError("the Hugging Face data set is empty.")
    chosen = target if target is not None else next((name for name in _TARGETS if name in columns), None)
    inputs = [name for name in columns if name != chosen]
    if chosen is None or chosen not in columns or not inputs:
        raise InputError(
            f"the data set has the columns {', '.join(columns)}: name the one to predict (target=...); at least one other is "
            "needed."
        )
    return chosen, inputs


def _arrays(dataset: Any, target: str, inputs: list[str]) -> tuple[np.ndarray, np.ndarray, tuple[str, ...]]:
    parts = [_column(dataset, name, several=len(inputs) > 1) for name in inputs]
    x = parts[0] if len(parts) == 1 else np.stack(parts, axis=1)
    names = tuple(getattr(dataset.features[target], "names", None) or ())
    return x, _targets(dataset.with_format(None)[:][target], target, names), names


def _targets(values: list[Any], name: str, names: tuple[str, ...]) -> np.ndarray:
    """The target of each record; by its name, where the data set declares names."""
    missing = [number for number, value in enumerate(values) if value is None or (names and value < 0)]
    if missing:
        raise DataError(f"record {missing[0]} of the data set has nothing in the column {name!r}, the target.")
    if names:
        return np.array([names[value] for value in values])
    try:
        found = np.asarray(values)
    except ValueError as error:
        raise DataError(f"the column {name!r}, the target, has values of several shapes.") from error
    return found.astype(np.float64) if isinstance(values[0], Decimal) else found


def _column(dataset: Any, name: str, *, several: bool) -> np.ndarray:
    values = dataset.with_format(None)[:][name]
    arrays = [_array(value, f"record {number} of {name!r}") for number, value in enumerate(values)]
    first = arrays[0]
    if first.dtype.kind not in "buif":
        raise DataError(
            f"the column {name!r} holds {type(values[0]).__name__}, not numbers or images: remove it "
            "(dataset.remove_columns), or turn texts into numbers by a public vocabulary first."
        )
    for number, array in enumerate(arrays):
        if array.dtype != first.dtype:
            # Stacked, all would get a type that holds both, and bytes would no longer be scaled as bytes.
            raise DataError(
                f"the column {name!r} holds {array.dtype} in record {number} and {first.dtype} in record 0: make all records of one "
                "type."
            )
        if array.shape != first.shape:
            raise DataError(
                f"the column {name!r} has shape {array.shape} in record {number} and {first.shape} in record 0: make all "
                "records of one shape."
            )
    if several and first.ndim:
        raise DataError(
            f"the column {name!r} holds arrays, and there are other columns beside it and the target: keep only one "
            "(dataset.select_columns)."
        )
    stacked = np.stack(arrays)
    return stacked if several or stacked.ndim > 1 else stacked[:, None]


def _array(value: Any, where: str) -> np.ndarray:
    return pixels_of(value, where) if hasattr(value, "mode") and hasattr(value, "convert") else np.asarray(value)


__all__ = ["is_hugging_face", "read_hugging_face"]
