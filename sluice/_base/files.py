"""Where files are kept, how they are read and replaced, and what they show of when.

After a crash there is the old or the new, never half. What will be published carries no time: the times of a run's files
tell how long it took, and so how many attempts it needed. There is one JSON form and one checksum, and errors say what
to do.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import platformdirs

from sluice._base.errors import DataError

#: Of all that is published: 1980-01-02, in every time zone a day that a zip archive can hold.
PUBLIC_TIME = 315_619_200

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


def cache_dir() -> Path:
    """The user's cache: ``$SLUICE_CACHE``, else the platform's place for it."""
    configured = os.environ.get("SLUICE_CACHE")
    return Path(configured) if configured else Path(platformdirs.user_cache_dir("sluice"))


@contextmanager
def replaced_atomically(target: Path, *, owner_only: bool = False) -> Iterator[Path]:
    """Give a temporary path in the target's folder; move it over the target if the block succeeds.

    The file is flushed to the disk before the move, and the folder after it. Two processes may do this at
    once: each writes its own temporary file and the last move wins. Others may read it as far as the umask allows,
    unless it is for the owner only. A folder whose time is hidden keeps it so.
    """
    folder = target.parent
    folder.mkdir(parents=True, exist_ok=True)
    hidden = folder.stat().st_mtime == PUBLIC_TIME
    handle, name = tempfile.mkstemp(dir=folder, prefix=f".{target.name}.", suffix=".partial")
    os.close(handle)
    temporary = Path(name)
    try:
        if hidden:
            hide_time(folder)
        yield temporary
        if not owner_only:
            temporary.chmod(0o666 & ~_umask())
        flush(temporary)
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)
        if hidden:
            hide_time(folder)
        flush(folder)


def hide_time(file: Path | int) -> None:
    """Give a file (by path or descriptor) or a folder the time that all published ones have."""
    os.utime(file, (PUBLIC_TIME, PUBLIC_TIME))


def hide_times(folder: Path) -> None:
    """`hide_time` for a folder and everything below it."""
    for path in [*folder.rglob("*"), folder]:
        with suppress(FileNotFoundError):  # a temporary file that another process has just moved
            hide_time(path)


def without_access_time(path: str, flags: int) -> int:
    """An opener whose reading leaves the time of the last access alone, where the system lets the owner do so."""
    try:
        return os.open(path, flags | getattr(os, "O_NOATIME", 0))
    except PermissionError:
        return os.open(path, flags)


def remove_partial_files(folder: Path) -> None:
    """Remove what processes that were killed in the middle of `replaced_atomically` have left in a folder.

    Only for a folder that no other process writes to at the moment.
    """
    for left in folder.glob(".*.partial"):
        left.unlink(missing_ok=True)


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


def flush(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def flush_data(descriptor: int) -> None:
    """Wait until what a file holds is on the disk; when it was changed need not be."""
    if hasattr(os, "fdatasync"):
        os.fdatasync(descriptor)
    else:
        os.fsync(descriptor)


def _umask() -> int:
    current = os.umask(0o077)
    os.umask(current)
    return current


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        raise ValueError("a key appears twice")
    return result


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")
