"""Checkpoints: whole or not at all, checked when they are read, and the one before kept as a spare.

A checkpoint holds un-noised state (the sampler's, say) and tells when it was made. It belongs in ``private/``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sluice._base.errors import DataError
from sluice._base.files import explained, flush, read_bytes
from sluice.runs.record_writer import RecordWriter
from sluice.runs.records import decode_record, encode_record

_MAGIC = b"sluice checkpoint 2\n"
_READABLE = (_MAGIC, b"sluice checkpoint 1\n")
_NAME = re.compile(r"release-(\d{10})\.checkpoint")
_KEPT = 2
# Where the next one is written: the file of one that is no longer needed. What a kill leaves of it is removed like any
# other temporary file.
_DRAFT = ".checkpoint.partial"


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A checkpoint that was read back.

    Attributes:
        release: how many releases it contains.
        payload: what was saved, tensors on the CPU.
        note: which newer checkpoint was passed over because it is damaged, or None.
    """

    release: int
    payload: dict[str, Any]
    note: str | None = None


def save_checkpoint(folder: Path, payload: Mapping[str, Any], *, config_hash: str, release: int) -> Path:
    """Write a checkpoint and remove all but the last two.

    Args:
        folder: where checkpoints are kept, by one process at a time.
        payload: tensors, numbers, strings, bytes, None, and lists, tuples or dictionaries of them.
        config_hash: sha256 of the run's configuration; a checkpoint is only read back under the same one.
        release: how many releases the state contains.

    Guarantee:
        After a crash at any instant the last checkpoint that was returned from here can be read.
    """
    draft = draft_checkpoint(folder, payload, config_hash=config_hash, release=release, writer=RecordWriter())
    draft.complete()
    return draft.target


@dataclass(frozen=True, kw_only=True)
class CheckpointDraft:
    """A checkpoint that is copied, but neither on disk nor in its place.

    Attributes:
        size: in bytes.
        write: what to call, once, to write it and wait for the disk.
        reuse: whether to keep the file of the oldest checkpoint to write the next one into, which is faster.
    """

    target: Path
    size: int
    write: Callable[[], None]
    reuse: bool

    def complete(self) -> None:
        """Write the checkpoint, put it in its place, and remove all but the last two.

        It reads nothing but the copy and files, so it may run while the state changes.
        """
        folder = self.target.parent
        draft = folder / _DRAFT
        try:
            self.write()
            with explained("write", self.target):
                os.replace(draft, self.target)
                flush(folder)
        except BaseException:
            remove_draft(folder)
            raise
        with explained("clean up", folder):
            release = _number(self.target)
            # A damaged spare ahead of the run (another history) must not outlive the state that replaced it.
            for newer in [number for number in checkpoint_releases(folder) if number > release]:
                _path(folder, newer).unlink(missing_ok=True)
            for old in checkpoint_releases(folder)[_KEPT:]:
                if self.reuse:
                    os.replace(_path(folder, old), draft)
                else:
                    _path(folder, old).unlink(missing_ok=True)


def draft_checkpoint(
    folder: Path,
    payload: Mapping[str, Any],
    *,
    config_hash: str,
    release: int,
    writer: RecordWriter,
    reuse: bool = False,
) -> CheckpointDraft:
    """The first half of `save_checkpoint`: afterwards the state may change."""
    record = encode_record(_MAGIC, payload, config_hash=config_hash, release=release)
    with explained("create", folder):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        write = writer.write_over(folder / _DRAFT, record)
    except BaseException:
        remove_draft(folder)
        raise
    return CheckpointDraft(target=_path(folder, release), size=record.size, write=write, reuse=reuse)


def remove_draft(folder: Path) -> None:
    """Remove the file that was kept to write the next checkpoint into."""
    with explained("clean up", folder):
        (folder / _DRAFT).unlink(missing_ok=True)


def load_checkpoint(folder: Path, *, config_hash: str) -> Checkpoint | None:
    """Read the newest checkpoint that is whole; None if there is none at all.

    Guarantee:
        Nothing but plain data is unpickled (``weights_only``), and only after its checksum was found right. A
        checkpoint of another configuration is refused, never passed over.
    """
    problems: list[str] = []
    for number in checkpoint_releases(folder):
        path = _path(folder, number)
        try:
            release, payload = decode_record(
                _READABLE, read_bytes(path), what=f"The checkpoint {path.name}", config_hash=config_hash
            )
            if release != number:
                raise DataError(f"The checkpoint {path.name} is damaged (it contains {release} releases).")
        except DataError as error:
            problems.append(str(error))
            continue
        note = None
        if problems:
            note = f"{' '.join(problems)} Resuming from the one before, which contains {release} releases."
        return Checkpoint(release=release, payload=payload, note=note)
    if problems:
        raise DataError(f"no checkpoint in {folder} can be read: {' '.join(problems)} Restore one from a copy.")
    return None


def checkpoint_releases(folder: Path) -> list[int]:
    """How many releases each checkpoint of a folder contains, by its name; the newest first."""
    if not folder.is_dir():
        return []
    with explained("read", folder):
        return sorted((_number(path) for path in folder.iterdir() if _NAME.fullmatch(path.name)), reverse=True)


def _number(path: Path) -> int:
    match = _NAME.fullmatch(path.name)
    assert match is not None
    return int(match[1])


def _path(folder: Path, release: int) -> Path:
    return folder / f"release-{release:010d}.checkpoint"
