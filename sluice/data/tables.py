"""Tables of the user's own: CSV and Parquet files with a column for the target and numbers in all others."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sluice._base.errors import DataError, InputError

ENDINGS = (".csv", ".tsv", ".parquet")
TARGETS = ("label", "target", "class", "y")
"""What the column of the target may be called where its name is not given."""


def read_table(path: Path, *, target: str | None) -> dict[str, np.ndarray]:
    """The arrays x and y of one file; or x_train, y_train, x_test and y_test of a folder with a table for each part.

    Args:
        target: the name of the column with the target; None takes the one that is called label, target, class or y.

    **Guarantee.** Row i of the result is a function of row i of the file and of the names of its columns.
    """
    if not path.is_dir():
        return dict(zip(("x", "y"), _columns(path, target), strict=True))
    parts = table_parts(path)
    train, test = (_columns(parts[name], target) for name in ("train", "test"))
    return {"x_train": train[0], "y_train": train[1], "x_test": test[0], "y_test": test[1]}


def table_parts(path: Path) -> dict[str, Path]:
    """The tables of a folder that are called train and test; nothing unless both are there."""
    found = {
        name: path / f"{name}{ending}"
        for name in ("train", "test")
        for ending in ENDINGS
        if (path / f"{name}{ending}").is_file()
    }
    return found if len(found) == 2 else {}


def _columns(path: Path, target: str | None) -> tuple[np.ndarray, np.ndarray]:
    names, columns = _parquet(path) if path.suffix == ".parquet" else _csv(path)
    chosen = _target(names, target, path)
    inputs = [name for name in names if name != chosen]
    if not inputs:
        raise DataError(f"{path} has no column beside {chosen!r}: the model needs at least one number for each record.")
    x = np.stack([_numbers(columns[name], name, path) for name in inputs], axis=1)
    return x, _labels(columns[chosen], chosen, path)


def _target(names: Sequence[str], target: str | None, path: Path) -> str:
    if target is not None:
        if target not in names:
            raise InputError(f"target={target!r} is not allowed: {path} has the columns {', '.join(names)}.")
        return target
    found = [name for name in names if name.strip().lower() in TARGETS]
    if len(found) != 1:
        raise InputError(
            f"{path} has the columns {', '.join(names)}: name the one to predict (--target NAME, load(..., target=...)). "
            f"Without it, one column must be called {', '.join(TARGETS[:-1])} or {TARGETS[-1]}."
        )
    return found[0]


def _csv(path: Path) -> tuple[list[str], dict[str, Any]]:
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            rows = list(csv.reader(file, delimiter="\t" if path.suffix == ".tsv" else ",", strict=True))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path} cannot be read as a table: {error}.") from error
    rows = [row for row in rows if row]
    if len(rows) < 2:
        raise DataError(f"{path} must have a line with the names of the columns, and at least one record.")
    names = [name.strip() for name in rows[0]]
    if len(set(names)) < len(names) or "" in names:
        raise DataError(f"{path}: the names of the columns ({', '.join(names)}) must all be there and differ.")
    for number, row in enumerate(rows[1:], start=1):
        if len(row) != len(names):
            raise DataError(f"{path}: record {number} has {len(row)} entries, and there are {len(names)} columns.")
    return names, {name: [row[i] for row in rows[1:]] for i, name in enumerate(names)}


def _parquet(path: Path) -> tuple[list[str], dict[str, Any]]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise InputError(f"{path} needs pyarrow to be read: pip install 'sluice[tables]', or save it as CSV.") from None
    try:
        table = pyarrow.parquet.read_table(path)
    except (OSError, pyarrow.ArrowException) as error:
        raise DataError(f"{path} cannot be read as Parquet: {str(error)[:200]}.") from error
    if table.num_rows == 0:
        raise DataError(f"{path} holds no record.")
    return table.column_names, {name: table.column(name).to_pylist() for name in table.column_names}


def _numbers(values: Sequence[Any], name: str, path: Path) -> np.ndarray:
    result = np.empty(len(values))
    for number, value in enumerate(values):
        try:
            result[number] = value
        except (TypeError, ValueError):
            shown = "missing" if value in (None, "") else repr(value)[:60]
            raise DataError(
                f"{path}: record {number + 1} has {shown} in the column {name!r}, which must hold numbers. Leave the "
                "column out, fill gaps with a public constant, or encode it by categories that are public."
            ) from None
    if not np.isfinite(result).all():
        row = int(np.flatnonzero(~np.isfinite(result))[0]) + 1
        raise DataError(f"{path}: record {row} has {result[row - 1]} in the column {name!r}; numbers must be finite.")
    return result


def _labels(values: Sequence[Any], name: str, path: Path) -> np.ndarray:
    missing = [number for number, value in enumerate(values, start=1) if value is None or str(value).strip() == ""]
    if missing:
        raise DataError(f"{path}: record {missing[0]} has nothing in the column {name!r}, the target.")
    try:
        return np.array([float(value) for value in values])
    except (TypeError, ValueError):
        return np.array([str(value).strip() for value in values])


__all__ = ["ENDINGS", "TARGETS", "read_table", "table_parts"]
