"""Tables of the user's own: CSV and Parquet files with a column for the target and numbers in all others."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sluice._base.errors import DataError, InputError
from sluice.data.labels import listed, numbers_of_names
from sluice.data.targets import Targets

ENDINGS = (".csv", ".tsv", ".parquet")
TARGETS = ("label", "target", "class", "y")
"""What the column of the target may be called where its name is not given."""

_WANTED_CLASSES = (
    "which must hold integers from 0, the numbers of classes. If it holds names, say which there can be, in the order of the "
    "classes' numbers: --class-names a,b,c (load(..., class_names=...)). They become public, so they must not be collected from "
    "private records."
)
_WANTED_NUMBERS = "which must hold numbers for this loss. For classes, use cross-entropy."


@dataclass(frozen=True, kw_only=True)
class Table:
    """The columns of a file, by name in the order in which they stand.

    Attributes:
        texts: the columns that hold text, which follows from the form of the file and the types that it declares, never from
            what the records hold. A CSV file declares no types: all of its columns are text.
    """

    path: Path
    columns: Mapping[str, Sequence[Any]]
    texts: frozenset[str]


def read_table(
    path: Path, *, target: str | None, targets: Targets, require_target: bool = True
) -> dict[str, np.ndarray]:
    """The arrays x and y of one file; or x_train, y_train, x_test and y_test of a folder with a table for each part.

    Without ``require_target``, a table that lacks the column with the target has no y.

    Args:
        target: the name of the column with the target; None takes the one that is called label, target, class or y.
        targets: what the target is. Text is read as one of its names if it has some, else as a number.

    **Guarantee.** Row i of the result is a function of row i of the file, of the names and declared types of its columns and of
    ``targets``. In particular no record decides how the text of another is read.
    """
    if not path.is_dir():
        table = _opened(path)
        chosen = _target(table, target, required=require_target)
        return {"x": _inputs(table, chosen), **({} if chosen is None else {"y": _targets(table, chosen, targets)})}
    parts = table_parts(path)
    if not parts:
        raise InputError(f"{path} is a folder without tables train and test: give a file, or name the tables so.")
    train, test = (_opened(parts[name]) for name in ("train", "test"))
    chosen = _target(train, target)
    assert chosen is not None
    if set(train.columns) != set(test.columns):
        raise DataError(
            f"{train.path} has the columns {', '.join(train.columns)}, {test.path} has {', '.join(test.columns)}: both must have "
            "the same."
        )
    found: dict[str, np.ndarray] = {}
    for name, part in (("train", train), ("test", test)):
        found |= {f"x_{name}": _inputs(part, chosen, order=train), f"y_{name}": _targets(part, chosen, targets)}
    return found


def table_parts(path: Path) -> dict[str, Path]:
    """The tables of a folder that are called train and test; nothing unless both are there."""
    found = {
        name: path / f"{name}{ending}"
        for name in ("train", "test")
        for ending in ENDINGS
        if (path / f"{name}{ending}").is_file()
    }
    return found if len(found) == 2 else {}


def _opened(path: Path) -> Table:
    return _parquet(path) if path.suffix == ".parquet" else _csv(path)


def _inputs(table: Table, target: str | None, *, order: Table | None = None) -> np.ndarray:
    """All columns but the target, in the order in which those of a table stand."""
    names = [name for name in (order or table).columns if name != target]
    if not names:
        raise DataError(
            f"{table.path} has no column beside {target!r}: the model needs at least one number for each record."
        )
    return np.stack([_numbers(table.columns[name], name, table.path) for name in names], axis=1)


def _target(table: Table, target: str | None, *, required: bool = True) -> str | None:
    """The column with the target; None if there is none and none is required."""
    names = list(table.columns)
    if target is not None:
        if target not in names and required:
            raise InputError(f"target={target!r} is not allowed: {table.path} has the columns {', '.join(names)}.")
        return target if target in names else None
    found = [name for name in names if name.strip().lower() in TARGETS]
    if not found and not required:
        return None
    if len(found) != 1:
        raise InputError(
            f"{table.path} has the columns {', '.join(names)}: name the one to predict (--target NAME, load(..., target=...)). "
            f"Without it, one column must be called {', '.join(TARGETS[:-1])} or {TARGETS[-1]}."
        )
    return found[0]


def _csv(path: Path) -> Table:
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
    columns = {name: [row[i] for row in rows[1:]] for i, name in enumerate(names)}
    return Table(path=path, columns=columns, texts=frozenset(names))


def _parquet(path: Path) -> Table:
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
    names = table.column_names
    if len(set(names)) < len(names):
        raise DataError(f"{path}: the names of the columns ({', '.join(names)}) must differ.")
    texts = {name for name in names if _is_text(table.schema.field(name).type)}
    return Table(path=path, columns={name: table.column(name).to_pylist() for name in names}, texts=frozenset(texts))


def _is_text(kind: Any) -> bool:
    """Whether a column of this type holds strings, as they are or as categories."""
    kind = kind.value_type if str(kind).startswith("dictionary") else kind
    return str(kind) in ("string", "large_string", "string_view")


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


def _targets(table: Table, name: str, targets: Targets) -> np.ndarray:
    """The target of each record: names where text is read as such, numbers elsewhere."""
    values = table.columns[name]
    missing = [number for number, value in enumerate(values, start=1) if value is None or str(value).strip() == ""]
    if missing:
        raise DataError(f"{table.path}: record {missing[0]} has nothing in the column {name!r}, the target.")
    if name not in table.texts:
        return _typed(values, name, table.path)
    return _names(values, name, table.path, targets) if targets.names else _read(values, name, table.path, targets)


def _typed(values: Sequence[Any], name: str, path: Path) -> np.ndarray:
    try:
        return np.array([float(value) for value in values])
    except (TypeError, ValueError):
        raise DataError(
            f"{path}: the column {name!r}, the target, holds no numbers and no text, but values such as {values[0]!r}."
        ) from None


def _names(values: Sequence[Any], name: str, path: Path, targets: Targets) -> np.ndarray:
    """Text as it stands, each entry being one of the names."""
    found = numbers_of_names(values, targets.names)
    if (found < 0).any():
        row = int(np.flatnonzero(found < 0)[0])
        raise DataError(
            f"{path}: record {row + 1} has {str(values[row])[:60]!r} in the column {name!r}, which is not among class_names "
            f"({listed(targets.names)}). Where names are given, text is read as names: give all that there can be, or leave "
            "class_names out if the column holds numbers of classes."
        )
    return np.array([str(value).strip() for value in values])


def _read(values: Sequence[Any], name: str, path: Path, targets: Targets) -> np.ndarray:
    """Text as numbers, each entry by itself."""
    result = np.empty(len(values))
    for number, value in enumerate(values):
        try:
            result[number] = float(value)
        except ValueError:
            raise DataError(
                f"{path}: record {number + 1} has {str(value)[:60]!r} in the column {name!r}, the target, "
                f"{_WANTED_CLASSES if targets.are_classes else _WANTED_NUMBERS}"
            ) from None
    return result


__all__ = ["ENDINGS", "TARGETS", "Table", "read_table", "table_parts"]
