"""The journal beside the checkpoints: one entry for each release, from which the state since a checkpoint is made again.

An entry says what was released and is on disk before the next release is logged. It is written over an entry that no
checkpoint needs any more, so the journal keeps its size. Like a checkpoint it may hold un-noised state: it belongs in
``private/``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import count
from pathlib import Path
from typing import Any

from sluice._base.background import Background
from sluice._base.errors import DataError
from sluice._base.files import explained, flush, read_bytes
from sluice.runs.record_writer import RecordWriter
from sluice.runs.records import decode_record, encode_record, release_of_record

_MAGIC = b"sluice journal 1\n"
_NAME = re.compile(r"slot-(\d{4})\.journal")


class Journal:
    """The entries in a folder, each in a slot: a file that is written again and again.

    Args:
        folder: that of the checkpoints, used by one process at a time.
        config_hash: sha256 of the run's configuration; entries are only read back under the same one.

    Guarantee:
        When :meth:`wait` returns, the last entry is on disk; it is written there in the background meanwhile. A crash in
        between leaves an entry whose checksum is wrong, or the whole one, and no other that is needed is touched.
    """

    def __init__(self, folder: Path, *, config_hash: str) -> None:
        self._folder = folder
        self._config_hash = config_hash
        self._writer = RecordWriter()
        self._writing = Background()
        #: The release in each slot; None where the slot may be written to.
        self._slots: dict[int, int | None] = {
            number: release_of_record(_MAGIC, path) for number, path in _slots_in(folder).items()
        }

    def append(self, release: int, payload: Mapping[str, Any]) -> int:
        """Copy the entry that leads to this number of releases, and begin to write it; how many bytes it has.

        Guarantee:
            When this returns, tensors may change.
        """
        self.wait()
        record = encode_record(_MAGIC, payload, config_hash=self._config_hash, release=release)
        free = next((slot for slot, kept in self._slots.items() if kept is None), None)
        slot = next(slot for slot in count() if slot not in self._slots) if free is None else free
        write_entry = self._writer.write_over(self._path(slot), record)
        self._slots[slot] = release

        def on_disk() -> None:
            write_entry()
            if free is None:
                with explained("write", self._folder):
                    flush(self._folder)

        self._writing.start(on_disk)
        return record.size

    def wait(self) -> None:
        """Return when the last entry is on disk."""
        self._writing.wait()

    def _path(self, slot: int) -> Path:
        return self._folder / f"slot-{slot:04d}.journal"

    def entries(self, *, after: int) -> Iterator[dict[str, Any]]:
        """The entries that follow a state with so many releases, one by one, up to the first that is missing or damaged.

        Guarantee:
            They lead from that state without a gap.
        """
        while (payload := self.read(after + 1)) is not None:
            after += 1
            yield payload

    def read(self, release: int) -> dict[str, Any] | None:
        """The entry that led to this number of releases; None if it is missing or damaged."""
        slot = next((slot for slot, kept in self._slots.items() if kept == release), None)
        if slot is None:
            return None
        path = self._path(slot)
        what = f"The entry {path.name} of the journal"
        try:
            return decode_record(_MAGIC, read_bytes(path), what=what, config_hash=self._config_hash)[1]
        except DataError:
            return None

    def holds(self, releases: Iterable[int]) -> bool:
        """Whether the entries of all these releases are there."""
        return set(self._slots.values()).issuperset(releases)

    def keep(self, *, after: int, up_to: int) -> None:
        """Forget all entries but those that lead from one state to another.

        Guarantee:
            Entries of another history, which continued from a state that is gone, are removed from the disk when this returns.
        """
        removed = False
        for slot, release in list(self._slots.items()):
            if release is not None and release > up_to:
                with explained("clean up", self._folder):
                    self._path(slot).unlink(missing_ok=True)
                del self._slots[slot]
                removed = True
            elif release is None or release <= after:
                self._slots[slot] = None
        if removed:
            with explained("clean up", self._folder):
                flush(self._folder)

    def remove(self) -> None:
        """Remove all entries: a checkpoint has what they lead to."""
        self.wait()
        with explained("clean up", self._folder):
            for slot in self._slots:
                self._path(slot).unlink(missing_ok=True)
        self._slots = {}


def _slots_in(folder: Path) -> dict[int, Path]:
    if not folder.is_dir():
        return {}
    with explained("read", folder):
        named = {path: _NAME.fullmatch(path.name) for path in sorted(folder.iterdir())}
    return {int(match[1]): path for path, match in named.items() if match is not None}
