"""A lock on a folder that the operating system drops when its holder ends, however it ends."""

from __future__ import annotations

import fcntl
import os
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol

from sluice._base.errors import InputError
from sluice._base.files import explained


class Closable(Protocol):
    def close(self) -> None: ...


_held: weakref.WeakSet[Closable] = weakref.WeakSet()


def close_in_children(holder: Closable) -> None:
    """Close what holds a lock in forked children, such as data-loading workers.

    A lock lasts while any copy of its descriptor is open. Without this, a worker that outlives its killed parent would
    keep the run locked.
    """
    _held.add(holder)


def _close_all_in_child() -> None:
    for holder in list(_held):
        holder.close()


os.register_at_fork(after_in_child=_close_all_in_child)


@contextmanager
def held_alone(path: Path) -> Iterator[None]:
    """Wait until no other process holds this lock, and hold it."""
    with explained("lock", path):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


class ProcessLock:
    """An exclusive lock (flock) on a file, held until :meth:`close` or the end of the process, a crash included."""

    def __init__(self, path: Path) -> None:
        with explained("lock", path):
            self._descriptor: int | None = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.read(self._descriptor, 32).decode("ascii", "replace").strip()
            self.close()
            named = f"process {holder}" if holder.isdigit() else "another process"
            raise InputError(
                f"{path.parent.parent} is in use by {named}: wait until it ends, or stop it. (The lock ends with the "
                "process; there is nothing to clean up.)"
            ) from error
        except BaseException:
            self.close()
            raise
        # The lock itself does not need the number; on a full disk the message is only less helpful.
        with suppress(OSError):
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, f"{os.getpid()}\n".encode("ascii"), 0)
        close_in_children(self)

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
