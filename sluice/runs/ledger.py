"""The ledger of a run: every release is on disk before its update is applied.

A crash can therefore make the ledger count a release that never happened, and can never make it miss one that did.
Lines hold public values only: no times, no attempts, no batch sizes. Nor does the file show when the last was written.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Self

from sluice._base import validate
from sluice._base.closing import Closing
from sluice._base.errors import DataError, InputError
from sluice._base.files import PUBLIC_TIME, explained, flush, hide_time, read_bytes, write_atomically
from sluice._base.locks import close_in_children
from sluice.runs.ledger_entries import (
    GENESIS,
    LedgerContents,
    LedgerEntry,
    LedgerHeader,
    Published,
    Recovered,
    Release,
    encode_line,
    library_versions,
    parse_ledger,
)

__all__ = ["Ledger", "LedgerContents", "LedgerHeader", "library_versions", "read_ledger"]

#: What file systems without hard links answer.
_NO_LINKS = (errno.EPERM, errno.EACCES, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP)


def read_ledger(path: Path) -> LedgerContents:
    """Read and check a ledger without changing or locking it.

    Guarantee:
        ``spent`` of the result is at least the number of releases whose entry was begun. Damage is a DataError.
    """
    return parse_ledger(read_bytes(path), where=str(path))


class Ledger(Closing):
    """A ledger open for writing, by one process at a time.

    Guarantee:
        When :meth:`append_release` returns, the release is on disk. When it raises, the release must not be
        applied; the ledger then refuses further entries until it is opened again.
    """

    def __init__(self, *, path: Path, descriptor: int, contents: LedgerContents, note: str | None) -> None:
        """Not for callers: use :meth:`create` or :meth:`open`."""
        self.path = path
        self.header = contents.header
        #: What was repaired when the ledger was opened, or None.
        self.note = note
        self._descriptor: int | None = descriptor
        self._spent = contents.counted
        self._head = contents.head
        self._size = contents.complete_bytes
        self._broken = False
        close_in_children(self)

    @classmethod
    def create(cls, path: Path, *, header: LedgerHeader) -> Self:
        """Begin a ledger; the header is on disk when this returns. An existing file is refused.

        Guarantee:
            Of processes that begin a ledger of one name at the same time, one succeeds.
        """
        path = Path(path)
        line, _ = encode_line(header, previous=GENESIS)
        parse_ledger(line, where="the new header")
        if path.exists() or not _write_new(path, line):
            raise InputError(
                f"path={str(path)!r} is not allowed: it exists. Open it to resume, or choose another path."
            )
        return cls.open(path)

    @classmethod
    def open(cls, path: Path) -> Self:
        """Open a ledger to append to it. A torn last line becomes a "recovered" entry, which counts it as spent.

        Guarantee:
            The repaired file replaces the torn one as a whole, so no crash in between can lose the count.
        """
        path = Path(path)
        descriptor = _open_locked(path)
        note = None
        try:
            contents = read_ledger(path)
            if contents.torn:
                note = _repair(path, contents)
                repaired = _open_locked(path)
                os.close(descriptor)
                descriptor = repaired
                contents = read_ledger(path)
        except BaseException:
            os.close(descriptor)
            raise
        return cls(path=path, descriptor=descriptor, contents=contents, note=note)

    @property
    def spent(self) -> int:
        """How many releases are in the ledger, and are charged."""
        return self._spent

    @property
    def head(self) -> str:
        """The hash of the last line."""
        return self._head

    def append_release(self, number: int) -> None:
        """Write a release to the ledger. Call it before anything of the release is applied or shown.

        Guarantee:
            The entry is on disk when this returns.
        """
        validate.positive_integer(number=number)
        if number != self._spent + 1:
            raise InputError(f"number={number} is not allowed: {self._spent} releases are logged in {self.path}.")
        if number > self.header.planned_releases:
            raise InputError(
                f"number={number} is not allowed: the mechanism has {self.header.planned_releases} releases, all "
                "logged. Start a run with more releases, calibrated for them."
            )
        self._append(Release(number=number), spent=number)

    def append_published(self, file: str, *, sha256: str) -> None:
        """Log which bytes are published under a name. Call it before the file is put in place."""
        self._append(Published(file=file, sha256=sha256), spent=self._spent)

    def resume(self, *, applied: int, repeats_noise: bool) -> Callable[[int], None]:
        """What to call before each release when training resumes from a checkpoint.

        Args:
            applied: how many releases the checkpoint contains.
            repeats_noise: whether the noise continues from a saved state (a seeded source). Then releases beyond the
                checkpoint come out exactly as before and are not new. Otherwise each one is counted again.

        Returns:
            A function of the release's number as the trainer counts it, ``applied + 1`` at first.

        Guarantee:
            With fresh noise every call is a new entry, so what a crash cost is charged. It raises where the budget of
            releases is used up: see :meth:`remaining`.
        """
        if not 0 <= applied <= self._spent:
            raise DataError(
                f"the checkpoint contains {applied} releases and {self.path} has {self._spent} logged: entries were "
                "removed from the ledger, or it belongs to another run. Restore both from the same copy."
            )
        lost = 0 if repeats_noise else self._spent - applied

        def before_release(number: int) -> None:
            if repeats_noise and number <= self._spent:
                return
            self.append_release(number + lost)

        return before_release

    def remaining(self) -> int:
        """How many releases of the plan are not logged yet."""
        return max(0, self.header.planned_releases - self._spent)

    def close(self) -> None:
        """Release the lock, so that another process can open the ledger."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _append(self, entry: LedgerEntry, *, spent: int) -> None:
        if self._descriptor is None or self._broken:
            raise InputError(f"the ledger {self.path} is closed, or an entry failed: close it and open it again.")
        line, head = encode_line(entry, previous=self._head)
        # Whatever interrupts this, Ctrl-C included, leaves a ledger object that writes nothing more.
        self._broken = True
        try:
            with explained("write", self.path):
                _write_all(self._descriptor, line)
                hide_time(self._descriptor)
                os.fsync(self._descriptor)
        except BaseException:
            self._take_back(self._descriptor)
            raise
        self._spent, self._head, self._size = spent, head, self._size + len(line)
        self._broken = False

    def _take_back(self, descriptor: int) -> None:
        """Remove an entry that failed. If even that fails the torn line stays, and is counted as spent."""
        with suppress(OSError):
            os.ftruncate(descriptor, self._size)
            hide_time(descriptor)
            os.fsync(descriptor)
        self.close()


def _write_new(path: Path, content: bytes) -> bool:
    """Put a file in place as a whole, and wait for the disk; False if the name is taken, were it a moment ago."""
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}.partial")
    with explained("write", path):
        path.parent.mkdir(parents=True, exist_ok=True)
        hidden = path.parent.stat().st_mtime == PUBLIC_TIME
        try:
            write_atomically(draft, content, public=True)
            return _renamed(draft, path)
        finally:
            draft.unlink(missing_ok=True)
            if hidden:
                hide_time(path.parent)
            flush(path.parent)


def _renamed(draft: Path, path: Path) -> bool:
    """Whether a file could be given a name that nothing had; the first name may remain beside it."""
    try:
        os.link(draft, path)
    except FileExistsError:
        return False
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        if not _claimed(path):
            return False
        draft.replace(path)
    return True


def _claimed(path: Path) -> bool:
    """Take a name by an empty file, where there are no links. A kill leaves it empty, which says that nothing was released."""
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def _repair(path: Path, contents: LedgerContents) -> str:
    kept = read_bytes(path)[: contents.complete_bytes]
    if not contents.torn_release:
        write_atomically(path, kept, public=True)
        return "the last line of the ledger was torn; all planned releases were logged before, so it was dropped"
    number = contents.counted + 1
    line, _ = encode_line(Recovered(number=number), previous=contents.head)
    write_atomically(path, kept + line, public=True)
    return f"the last line of the ledger was torn; release {number} is counted as spent though it was not applied"


def _open_locked(path: Path) -> int:
    """A descriptor for appending to the file that the path names now, locked against other processes."""
    while True:
        with explained("write", path):
            descriptor = os.open(path, os.O_RDWR | os.O_APPEND)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(descriptor)
            raise InputError(f"the ledger {path} is in use by another process: wait for it, or stop it.") from error
        with explained("read", path):
            here, there = os.fstat(descriptor), path.stat()
        if os.path.samestat(here, there):
            return descriptor
        os.close(descriptor)


def _write_all(descriptor: int, content: bytes) -> None:
    rest = memoryview(content)
    while rest:
        rest = rest[os.write(descriptor, rest) :]
