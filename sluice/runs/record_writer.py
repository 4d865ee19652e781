"""How records get to the disk: from memory of the writer's own, past the system's, and over files that exist.

By default a system copies what is written into memory that it takes for the purpose, and keeps it there. Fresh memory costs
several times what the copy does, and so do fresh blocks of the file system.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable
from mmap import mmap
from pathlib import Path

from sluice._base.files import explained, flush_data
from sluice.runs.records import BLOCK, Record

# What is larger is written in parts while it is copied.
_MOST_ROOM = 64 << 20
# Copied and then added to the checksum, while it is in the processor's cache.
_PIECE = 1 << 17
_PAST_THE_SYSTEM = getattr(os, "O_DIRECT", 0)


class RecordWriter:
    """Writes one record at a time.

    Args:
        most_room: the most memory that it takes, in bytes: at least two blocks, and whole ones.
    """

    def __init__(self, *, most_room: int = _MOST_ROOM) -> None:
        self._most_room = most_room
        self._room = memoryview(b"")

    def write_over(self, path: Path, record: Record) -> Callable[[], None]:
        """Copy a record that is to be written over a file, or into a new one for the owner only.

        The file is not whole in between: whoever reads it must be able to do without it. That a new file is there at all is
        on disk only once its folder is (`sluice._base.files.flush`).

        Returns:
            What to call, once, and in any thread, to write the record and wait until it is on disk. Until then the writer
            is not free for another, and the end of the process takes the record with it.

        Guarantee:
            When this returns, tensors may change.
        """
        with explained("write", path):
            file = _File(path)
            try:
                room, place = self._copy(record, file)
            except BaseException:
                file.close()
                raise

        def finish() -> None:
            try:
                with explained("write", path):
                    if place == BLOCK:
                        file.write(room, 0)
                    else:
                        file.write(room[BLOCK:], place)
                        file.write(room[:BLOCK], 0)
                    file.flush(record.size)
            finally:
                file.close()

        return finish

    def _copy(self, record: Record, file: _File) -> tuple[memoryview, int]:
        """Copy a record, and write what there is no room for; what is left, its first block before it, and its place."""
        room = self._room_for(record.size)
        place, at, checksum = BLOCK, record.begin, record.begin_checksum()
        for part in record.parts:
            rest = memoryview(part)
            while rest:
                if at == len(room):
                    file.write(room[BLOCK:], place)
                    place, at = place + at - BLOCK, BLOCK
                piece = room[at : min(at + len(rest), at + _PIECE)]
                piece[:] = rest[: len(piece)]
                checksum.update(piece)
                at, rest = at + len(piece), rest[len(piece) :]
        room[: record.begin] = record.first_line(checksum.finalize())
        return room[:at], place

    def _room_for(self, size: int) -> memoryview:
        wanted = min(size, self._most_room)
        if len(self._room) < wanted:
            self._room = memoryview(mmap(-1, wanted))  # it begins at a page, as the system wants it
        return self._room[:wanted]


class _File:
    """A file that is written to in whole blocks; where the file system allows it, past the system's memory."""

    def __init__(self, path: Path) -> None:
        flags = os.O_WRONLY | os.O_CREAT
        try:
            self._descriptor = os.open(path, flags | _PAST_THE_SYSTEM, 0o600)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self._descriptor = os.open(path, flags, 0o600)

    def write(self, blocks: memoryview, place: int) -> None:
        while blocks:
            try:
                written = os.pwrite(self._descriptor, blocks, place)
            except OSError as error:
                if error.errno != errno.EINVAL or not self._past_the_system:
                    raise
                # Blocks of this disk are larger, or only a part of one was written.
                fcntl.fcntl(self._descriptor, fcntl.F_SETFL, 0)
                continue
            blocks, place = blocks[written:], place + written

    @property
    def _past_the_system(self) -> bool:
        return bool(fcntl.fcntl(self._descriptor, fcntl.F_GETFL) & _PAST_THE_SYSTEM)

    def flush(self, size: int) -> None:
        """Wait until the file is on disk, and has this size."""
        if os.fstat(self._descriptor).st_size != size:  # else the disk would have to note the size again
            os.ftruncate(self._descriptor, size)
        flush_data(self._descriptor)

    def close(self) -> None:
        os.close(self._descriptor)


__all__ = ["RecordWriter"]
