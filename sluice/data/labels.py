"""Class labels as a user has them: integers from 0, names, or rows of zeros with a single one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sluice._base.errors import DataError, InputError

MOST_CLASSES = 65_536


def class_labels(y: np.ndarray, where: str, *, names: Sequence[str] = ()) -> Tensor:
    """The number of each record's class.

    Args:
        names: the classes that there can be, in the order of their numbers: public. Labels that are strings need them: if the
            names were collected from the records, that somebody has a class would become public.

    Strings are names, numbers are positions among the names. So it is the type of the array that says how a label is read. Where
    it would make a difference because the names are numbers themselves, labels that are numbers are refused.

    **Guarantee.** Entry i depends on label i, on the type of the array and on ``names`` alone.
    """
    y = y[:, 0] if y.ndim == 2 and y.shape[1] == 1 else y
    if y.size == 0:
        raise DataError(f"{where} has shape {y.shape}; labels must be one row of integers, at least one.")
    if one_hot_width(y):
        return _from_one_hot(y, where)
    if y.ndim != 1:
        raise DataError(f"{where} has shape {y.shape}; labels must be one row of integers, names, or one-hot rows.")
    if y.dtype.kind in "US":
        return _from_names(_decoded(y, where) if y.dtype.kind == "S" else y, where, names)
    _require_positions(names, where)
    return _from_numbers(y, where)


def numbers_of_names(labels: Iterable[Any], names: Sequence[str]) -> np.ndarray:
    """The position of each label among the names, with or without space around it; -1 for one that is none of them."""
    numbers = {name: number for number, name in enumerate(names)}
    found = (numbers.get(str(label), numbers.get(str(label).strip(), -1)) for label in labels)
    return np.fromiter(found, dtype=np.int64)


def listed(names: Sequence[str]) -> str:
    """The first names, for a message."""
    return ", ".join(names[:10]) + (", ..." if len(names) > 10 else "")


def _require_positions(names: Sequence[str], where: str) -> None:
    """Refuse numbers as labels where 1 could mean the class that is called 1, or the one at position 1."""
    for position, name in enumerate(names):
        if _is_other_number(name, position):
            raise InputError(
                f"class_names={','.join(names[:10])!r} is ambiguous for {where}, whose labels are numbers: {name} could mean the "
                f"class of that name, which has the number {position}. Save the labels as strings if they are names, or give "
                "names that are no numbers."
            )


def _is_other_number(name: str, position: int) -> bool:
    try:
        return float(name) != position
    except ValueError:
        return False


def _decoded(y: np.ndarray, where: str) -> np.ndarray:
    try:
        return np.char.decode(y, "utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{where} holds bytes that are not UTF-8: give names as strings, or numbers.") from error


def one_hot_width(y: np.ndarray) -> int | None:
    """How many columns labels have that are rows with a one in the place of the class; None for other labels."""
    return y.shape[1] if y.ndim == 2 and y.shape[1] > 1 else None


def class_names_from(text: str | Sequence[str] | None) -> tuple[str, ...]:
    """The names of classes from a text with commas between them, or a sequence; each may occur once."""
    if text is None:
        return ()
    names = tuple(each.strip() for each in text.split(",")) if isinstance(text, str) else tuple(map(str, text))
    if len(names) < 2 or "" in names or len(set(names)) < len(names) or len(names) > MOST_CLASSES:
        raise InputError(
            f"class_names={text!r} is not allowed: give at least two different names, with commas between them."
        )
    return names


def _from_one_hot(y: np.ndarray, where: str) -> Tensor:
    right = y.dtype.kind in "buif" and bool((((y == 0) | (y == 1)).all(1) & ((y == 1).sum(1) == 1)).all())
    if not right:
        raise DataError(
            f"{where} has shape {y.shape}: labels with a column for each class must be one-hot, a single 1 and zeros in "
            "each row. Give one class for each record."
        )
    return torch.from_numpy(y.argmax(1).astype(np.int64))


def _from_names(y: np.ndarray, where: str, names: Sequence[str]) -> Tensor:
    if not names:
        raise DataError(
            f"{where} holds names of classes. Say which there can be, in the order of their numbers: --class-names a,b,c "
            "(load(..., class_names=...)). They become public, so they must not be collected from private records."
        )
    found = numbers_of_names(y, names)
    if (found < 0).any():
        row = int(np.flatnonzero(found < 0)[0])
        raise DataError(f"{where}: label {row} is {str(y[row])!r}, which is not among class_names ({listed(names)}).")
    return torch.from_numpy(found)


def _from_numbers(y: np.ndarray, where: str) -> Tensor:
    if y.dtype.kind == "f" and not np.isfinite(y).all():
        position = int(np.flatnonzero(~np.isfinite(y))[0])
        raise DataError(f"{where}: label {position} is {y[position]}; labels must be integers from 0.")
    if y.dtype.kind not in "buif" or (y.dtype.kind == "f" and not (y == np.floor(y)).all()):
        raise DataError(
            f"{where} ({y.dtype}) holds no class labels; they must be integers from 0. For numbers to predict: --loss squared."
        )
    if y.min() < 0 or int(y.max()) >= MOST_CLASSES:  # as Python's integers: half precision cannot hold that number
        raise DataError(
            f"{where} has labels from {y.min()} to {y.max()}; classes are numbered from 0, {MOST_CLASSES - 1} at most."
        )
    return torch.from_numpy(y.astype(np.int64))


__all__ = ["MOST_CLASSES", "class_labels", "class_names_from", "listed", "numbers_of_names", "one_hot_width"]
