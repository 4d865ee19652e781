"""Where files are kept, how they are replaced, and what they show of when.

After a crash there is the old or the new, never half. What will be published carries no time: the times of a run's files
tell how long it took, and so how many attempts it needed.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import platformdirs

#: Of all that is published: 1980-01-02, in every time zone a day that a zip archive can hold.
PUBLIC_TIME = 315_619_200


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
        _flush(temporary)
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)
        if hidden:
            hide_time(folder)
        _flush(folder)


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


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _umask() -> int:
    current = os.umask(0o077)
    os.umask(current)
    return current
