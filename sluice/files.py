"""Where files are kept, and how they are replaced: after a crash there is the old or the new, never half."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import platformdirs


def cache_dir() -> Path:
    """The user's cache: ``$SLUICE_CACHE``, else the platform's place for it."""
    configured = os.environ.get("SLUICE_CACHE")
    return Path(configured) if configured else Path(platformdirs.user_cache_dir("sluice"))


@contextmanager
def replaced_atomically(target: Path, *, owner_only: bool = False) -> Iterator[Path]:
    """Give a temporary path in the target's folder; move it over the target if the block succeeds.

    The file is flushed to the disk before the move, and the folder after it. Two processes may do this at
    once: each writes its own temporary file and the last move wins. Others may read it as far as the umask allows,
    unless it is for the owner only.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.", suffix=".partial")
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        if not owner_only:
            temporary.chmod(0o666 & ~_umask())
        _flush(temporary)
        temporary.replace(target)
        _flush(target.parent)
    finally:
        temporary.unlink(missing_ok=True)


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
