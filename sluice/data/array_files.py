"""Files of arrays: ``.npz``, or a folder of ``.npy``. They are read without pickle, so that opening one can never run code."""

from __future__ import annotations

import tokenize
import zipfile
import zlib
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.lib import format as npy

from sluice._base.errors import DataError, InputError

SPLIT_KEYS = ("x_train", "y_train", "x_test", "y_test")
WHOLE_KEYS = ("x", "y")
_ZIP = (b"PK\x03\x04", b"PK\x05\x06")
# What numpy and zipfile raise on files that are cut off, altered or something else altogether.
UNREADABLE = (
    ValueError,
    EOFError,
    OSError,
    MemoryError,
    TypeError,
    OverflowError,
    RuntimeError,
    SyntaxError,
    tokenize.TokenError,
    zipfile.BadZipFile,
    zlib.error,
)


def read_arrays(path: Path, *, require_labels: bool = True) -> dict[str, np.ndarray]:
    """The arrays of a ``.npz`` file or of a folder of ``.npy`` files, by name."""
    if path.is_dir():
        wanted = {name: path / f"{name}.npy" for name in (*WHOLE_KEYS, *SPLIT_KEYS)}
        arrays = {name: _npy(file) for name, file in wanted.items() if file.exists()}
        if require_labels:
            _require_keys(path, arrays.keys(), "files", ".npy")
        return arrays
    if path.suffix != ".npz":
        raise InputError(
            f"{path} is not allowed as data: give a .npz, .csv, .tsv or .parquet file, a folder with x.npy and y.npy, or one "
            "with a folder of images for each class."
        )
    with _archive(path) as opened:
        if require_labels:
            _require_keys(path, opened.files, "arrays", "")
        return _members(path, opened, (*WHOLE_KEYS, *SPLIT_KEYS))


def read_archive(path: Path, names: Sequence[str]) -> dict[str, np.ndarray]:
    """Those of the named arrays that a ``.npz`` file has."""
    with _archive(path) as opened:
        return _members(path, opened, names)


@contextmanager
def _archive(path: Path) -> Iterator[np.lib.npyio.NpzFile]:
    with path.open("rb") as stream:
        opened = _load(path, stream)
        if not isinstance(opened, np.lib.npyio.NpzFile):
            raise DataError(f"{path} is not a .npz archive. Write one with numpy.savez.")
        with opened:
            yield opened


def _members(path: Path, opened: np.lib.npyio.NpzFile, names: Sequence[str]) -> dict[str, np.ndarray]:
    return {name: _member(path, opened, name) for name in names if name in opened.files}


def _npy(path: Path) -> np.ndarray:
    with path.open("rb") as stream:
        array = _load(path, stream)
    if not isinstance(array, np.ndarray):
        raise DataError(f"{path} is not a .npy file. Write it with numpy.save.")
    return array


def _load(path: Path, stream: IO[bytes]) -> Any:
    beginning = stream.read(len(npy.MAGIC_PREFIX))
    stream.seek(0)
    if not beginning.startswith((npy.MAGIC_PREFIX, *_ZIP)):  # numpy would try to read it as Python objects
        raise DataError(f"{path} is no numpy file, whatever it is called. Write it with numpy.savez or numpy.save.")
    try:
        return np.load(stream, allow_pickle=False)
    except UNREADABLE as error:
        raise DataError(_unreadable(path, error)) from error


def _member(path: Path, opened: np.lib.npyio.NpzFile, name: str) -> np.ndarray:
    try:
        array = opened[name]
    except UNREADABLE as error:
        raise DataError(_unreadable(f"{path}[{name}]", error)) from error
    if not isinstance(array, np.ndarray):
        raise DataError(f"{path}[{name}] is not an array. Write the file again with numpy.savez.")
    return array


def _unreadable(where: Path | str, error: Exception) -> str:
    if "allow_pickle" in str(error):
        return (
            f"{where} holds Python objects or no array at all, and is not opened, since that could run code. "
            "Save plain numbers: numpy.savez(path, x=..., y=...)."
        )
    return f"{where} is damaged or no numpy file: {error or type(error).__name__}. Write it again with numpy.savez."


def _require_keys(path: Path, found: Collection[str], what: str, ending: str) -> None:
    if set(WHOLE_KEYS) <= set(found) or set(SPLIT_KEYS) <= set(found):
        return
    present = ", ".join(sorted(f"{name}{ending}" for name in found)) or "none"
    raise DataError(
        f"{path} has the {what}: {present}. It needs x{ending} and y{ending}, or "
        f"{', '.join(name + ending for name in SPLIT_KEYS)}."
    )


__all__ = ["SPLIT_KEYS", "WHOLE_KEYS", "read_archive", "read_arrays"]
