"""The folder of a run, split by threat model: ``public/`` may be published as a whole, ``private/`` never.

Rejected attempts are free only while nobody sees them. Whatever tells about them (their number, batch sizes,
training losses, timings, checkpoints) therefore lives in ``private/``, which only its owner can enter.
"""

from __future__ import annotations

import json
import stat
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from sluice._base.closing import Closing
from sluice._base.errors import DataError, InputError
from sluice._base.files import (
    canonical_json,
    explained,
    hide_time,
    hide_times,
    parse_json,
    read_bytes,
    remove_partial_files,
    sha256_hex,
    write_atomically,
)
from sluice._base.locks import ProcessLock


def configuration_hash(config: Mapping[str, Any]) -> str:
    """The sha256 of a configuration's canonical JSON: the same for the same settings, however they were written."""
    try:
        return sha256_hex(canonical_json(dict(config)))
    except (TypeError, ValueError) as error:
        raise InputError(
            f"config is not allowed: it must be plain, strict JSON (strings, finite numbers, lists, objects): {error}."
        ) from error


class RunFolder(Closing):
    """Paths and settings of one run, and the lock that keeps a second process out.

    Use :meth:`create` to begin a run, :meth:`open` to resume one, :meth:`look` to read one without changing it.
    """

    def __init__(self, *, path: Path, config: Mapping[str, Any], lock: ProcessLock | None) -> None:
        """Not for callers: use :meth:`create`, :meth:`open` or :meth:`look`."""
        self.path = path
        self.config = config
        self.config_hash = configuration_hash(config)
        self._lock = lock

    @classmethod
    def create(cls, path: Path | str, *, config: Mapping[str, Any]) -> Self:
        """Begin a run in a new or empty folder, locked for this process.

        A folder that a killed process made, without coming as far as its settings, counts as empty.

        Guarantee:
            ``private/`` can be entered by its owner only. On an error no configuration is left behind, so nothing
            that looks like a run.
        """
        path = Path(path)
        configuration_hash(config)
        with explained("create", path):
            if not may_begin(path):
                raise _in_use(path)
            (path / "public").mkdir(parents=True, exist_ok=True)
            (path / "private").mkdir(mode=0o700, exist_ok=True)
            (path / "private").chmod(0o700)
            hide_time(path / "public")
        lock = ProcessLock(path / "private" / "lock")
        try:
            folder = cls(path=path, config=dict(config), lock=lock)
            if not may_begin(path):  # another process was quicker
                raise _in_use(path)
            _remove_leftovers(folder)
            write_atomically(folder.config_path, _readable(config), public=True)
        except BaseException:
            lock.close()
            raise
        return folder

    @classmethod
    def open(cls, path: Path | str) -> Self:
        """Resume a run, locked for this process. The error names the other process if there is one."""
        looked = cls.look(path)
        with explained("open", looked.private):
            looked.private.mkdir(mode=0o700, exist_ok=True)
        looked.close_private()
        looked._lock = ProcessLock(looked.private / "lock")
        try:
            _remove_leftovers(looked)
            looked.hide_times()
        except BaseException:
            looked.close()
            raise
        return looked

    @classmethod
    def look(cls, path: Path | str) -> Self:
        """Read a run without locking or changing anything; ``private/`` need not be there, as in a published copy."""
        path = Path(path)
        config_path = path / "public" / "config.json"
        if not config_path.is_file():
            if path.is_dir() and any(path.iterdir()) and may_begin(path):
                raise InputError(
                    f"path={str(path)!r} is not allowed: the run was stopped before its settings were written, and "
                    "nothing was spent. Start it again by the command that it was started with."
                )
            raise InputError(f"path={str(path)!r} is not allowed: it is not a run folder ({config_path} is missing).")
        config = parse_json(read_bytes(config_path), what=str(config_path))
        if not isinstance(config, dict):
            raise DataError(f"{config_path} must hold a JSON object.")
        return cls(path=path, config=config, lock=None)

    @property
    def public(self) -> Path:
        return self.path / "public"

    @property
    def private(self) -> Path:
        return self.path / "private"

    @property
    def config_path(self) -> Path:
        return self.public / "config.json"

    @property
    def ledger_path(self) -> Path:
        return self.public / "ledger.jsonl"

    @property
    def weights_path(self) -> Path:
        return self.public / "model.safetensors"

    @property
    def accuracy_path(self) -> Path:
        return self.public / "accuracy.jsonl"

    @property
    def certificate_path(self) -> Path:
        return self.public / "certificate.json"

    @property
    def audit_path(self) -> Path:
        return self.public / "audit.json"

    @property
    def audit_page_path(self) -> Path:
        return self.public / "audit.html"

    @property
    def audit_ledger_path(self) -> Path:
        """The releases of an audit that used the run's own records a second time."""
        return self.public / "audit-ledger.jsonl"

    @property
    def coins_path(self) -> Path:
        return self.private / "canaries.bin"

    @property
    def checkpoints(self) -> Path:
        return self.private / "checkpoints"

    @property
    def trace_path(self) -> Path:
        return self.private / "trace.jsonl"

    @property
    def fingerprint_path(self) -> Path:
        return self.private / "data.sha256"

    def began_with(self, fingerprint: str) -> bool:
        """Whether this is the fingerprint of the training data that was remembered, or none was."""
        if not self.fingerprint_path.exists():
            return True
        return read_bytes(self.fingerprint_path).decode("ascii", "replace").strip() == fingerprint

    def check_data(self, fingerprint: str) -> None:
        """Remember the training data by its fingerprint before the ledger is begun, and refuse other data from then on.

        Guarantee:
            The fingerprint is written to ``private/`` only and is not part of any message.
        """
        if not self.fingerprint_path.exists():
            if self.ledger_path.exists():
                raise DataError(
                    f"{self.fingerprint_path} is missing though the run had begun, so nobody can tell whether the training "
                    "data is what it began with: restore it from a copy, or start a new run (its cost adds to this one's: "
                    "sluice verify RUN1 RUN2)."
                )
            write_atomically(self.fingerprint_path, f"{fingerprint}\n".encode("ascii"), public=False)
        elif not self.began_with(fingerprint):
            raise DataError(
                f"the training data is not what {self.path} began with: resume with the same records in the same "
                "order, or start a new run (its cost adds to this one's: sluice verify RUN1 RUN2). Earlier versions of "
                "Sluice chose other records to hold out or to test on: resume a run of theirs with the version that began it."
            )

    def close_private(self) -> None:
        """Let nobody but its owner enter ``private/``, which somebody may have opened up since."""
        with explained("protect", self.private):
            if self.private.is_dir() and stat.S_IMODE(self.private.stat().st_mode) != 0o700:
                self.private.chmod(0o700)

    def hide_times(self) -> None:
        """Give ``public/`` and all in it one constant time, though reading, or an earlier version, set another."""
        with explained("set the times of", self.public):
            hide_times(self.public)

    def close(self) -> None:
        """Unlock the folder for another process."""
        if self._lock is not None:
            with suppress(DataError):  # whatever made the disk fail has been reported before
                self.hide_times()
            self._lock.close()
            self._lock = None


def may_begin(path: Path) -> bool:
    """Whether a run can begin there: nothing exists, or nothing but what a start that was killed has left."""
    if not path.exists():
        return True
    if not path.is_dir():
        return False
    public, private = path / "public", path / "private"
    if not {public, private}.issuperset(path.iterdir()):
        return False
    left = [file for folder in (public, private) if folder.is_dir() for file in folder.iterdir()]
    return all(file == private / "lock" or file.match("public/.config.json.*.partial") for file in left)


def _in_use(path: Path) -> InputError:
    return InputError(
        f"path={str(path)!r} is not allowed: it exists and is not an empty folder. "
        "Resume that run, or choose another name."
    )


def _remove_leftovers(folder: RunFolder) -> None:
    with explained("clean up", folder.path):
        for part in (folder.public, folder.private, folder.checkpoints):
            remove_partial_files(part)


def _readable(config: Mapping[str, Any]) -> bytes:
    return (json.dumps(dict(config), indent=2, sort_keys=True, allow_nan=False) + "\n").encode("ascii")
