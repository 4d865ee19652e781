"""A content hash of training data, to notice that a run is resumed with other data. It is itself private."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor

from sluice._base.errors import InputError
from sluice._base.records import reads_by_index

if TYPE_CHECKING:
    from hashlib import _Hash

_RECORDS_AT_ONCE = 4096


class SizedRecords(Protocol):
    """A map-style data set: records by position."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


def fingerprint(examples: SizedRecords) -> str:
    """The sha256 of all records in order: their types, shapes and values, as training sees them.

    Guarantee:
        None of privacy: the result is a function of the data that no noise protects. Keep it in ``private/``. Any
        changed, added, removed or moved record changes it; a data set that gives something random changes it always.
    """
    digest = hashlib.sha256(b"sluice data, version 1\n")
    count = len(examples)
    digest.update(f"{count} records\n".encode("ascii"))
    if reads_by_index(examples):
        for start in range(0, count, _RECORDS_AT_ONCE):
            _add(digest, examples.batch(torch.arange(start, min(start + _RECORDS_AT_ONCE, count))), "examples")  # type: ignore[attr-defined]
    else:
        for index in range(count):
            _add(digest, examples[index], f"examples[{index}]")
    return digest.hexdigest()


def _add(digest: _Hash, value: Any, place: str) -> None:
    if isinstance(value, Tensor):
        _add_bytes(digest, f"{value.dtype} {tuple(value.shape)}", _tensor_bytes(value))
    elif isinstance(value, np.ndarray | np.generic):
        _add_bytes(digest, f"{value.dtype} {value.shape}", np.ascontiguousarray(value).tobytes())
    elif isinstance(value, bytes):
        _add_bytes(digest, "bytes", value)
    elif value is None or isinstance(value, str | bool | int | float):
        _add_bytes(digest, type(value).__name__, repr(value).encode("utf-8", "surrogatepass"))
    elif isinstance(value, Mapping):
        _add_bytes(digest, f"mapping of {len(value)}", b"")
        for key, item in value.items():
            _add(digest, key, place)
            _add(digest, item, f"{place}[{key!r}]")
    elif isinstance(value, Sequence):
        _add_bytes(digest, f"sequence of {len(value)}", b"")
        for item in value:
            _add(digest, item, place)
    else:
        raise InputError(
            f"{place} holds a {type(value).__name__}, which has no fingerprint: allowed are tensors, arrays, numbers, "
            "strings, and lists, tuples or dictionaries of them."
        )


def _tensor_bytes(value: Tensor) -> memoryview:
    plain = value.detach().cpu().contiguous().reshape(-1)
    return plain.view(torch.uint8).numpy().data if plain.numel() else memoryview(b"")


def _add_bytes(digest: _Hash, description: str, content: bytes | memoryview) -> None:
    size = content.nbytes if isinstance(content, memoryview) else len(content)
    digest.update(f"{description}: {size} bytes\n".encode())
    digest.update(content)
