"""Small rules for files that have to survive anything: one JSON form, one checksum, errors that say what to do."""

from __future__ import annotations

import errno
import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sluice._base.errors import DataError
from sluice._base.files import hide_time, replaced_atomically, without_access_time

_REMEDIES = {
    errno.ENOSPC: "free some space and resume; everything that was on the disk before is unchanged",
    errno.EDQUOT: "free some of your quota and resume; everything that was on the disk before is unchanged",
    errno.EROFS: "the file system is read-only; copy the folder to a place that can be written",
    errno.EACCES: "you may not write there; fix the permissions or choose another folder",
    errno.EPERM: "you may not write there; fix the permissions or choose another folder",
    errno.ENOENT: "check the path",
    errno.EISDIR: "this should be a file, not a folder",
    errno.ENOTDIR: "a part of the path is a file, not a folder",
}


@contextmanager
def explained(action: str, path: Path) -> Iterator[None]:
    """Turn errors of the operating system into a DataError that names the file, the cause and the remedy."""
    try:
        yield
    except OSError as error:
        cause = error.strerror or str(error)
        remedy = _REMEDIES.get(error.errno or 0, "see to the disk and try again")
        raise DataError(f"cannot {action} {path}: {cause}: {remedy}.") from error


def canonical_json(value: Any) -> bytes:
    """The one spelling of a value as JSON: sorted keys, no blanks, ASCII, no NaN. Hashes are taken of this."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode("ascii")


def parse_json(text: bytes, *, what: str) -> Any:
    """Strict JSON: no repeated keys, no NaN or infinity. Anything else is a DataError that begins with ``what``."""
    try:
        return json.loads(text.decode("utf-8"), object_pairs_hook=_unique_keys, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{what} is not strict JSON: {str(error) or 'nested too deeply'}.") from error


def read_bytes(path: Path) -> bytes:
    with explained("read", path), open(path, "rb", opener=without_access_time) as stream:
        return stream.read()


def write_atomically(path: Path, content: bytes, *, public: bool) -> None:
    """Replace a file as a whole.

    Public ones may be read by everyone that the umask allows and carry no time; others are for the owner.
    """
    with explained("write", path), replaced_atomically(path, owner_only=not public) as temporary:
        temporary.write_bytes(content)
        if public:
            hide_time(temporary)


def sha256_hex(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def sha256_of_file(path: Path) -> str:
    with explained("read", path), open(path, "rb", opener=without_access_time) as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        raise ValueError("a key appears twice")
    return result


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")
