"""The private trace: one line for each release, with everything that must never be published."""

from __future__ import annotations

import math
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from sluice._base import codec
from sluice._base.errors import DataError, InputError
from sluice._base.files import canonical_json, explained, parse_json, read_bytes


@dataclass(frozen=True, kw_only=True)
class TraceRow:
    """What it took to make one release. All of it is sensitive.

    Attributes:
        release: number of the release.
        attempts: how many attempts it took, the accepted one included.
        measured: how many records were measured in them.
        metric: the un-noised metric of the accepted batch.
        seconds: how long it took.
    """

    release: int
    attempts: int
    measured: int
    metric: float
    seconds: float

    def __post_init__(self) -> None:
        for name, least in (("release", 1), ("attempts", 1), ("measured", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise InputError(f"{name}={value!r} is not allowed: it must be an integer >= {least}.")
        for name in ("metric", "seconds"):
            value = getattr(self, name)
            if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
                raise InputError(f"{name}={value!r} is not allowed: it must be a finite number.")


class TraceFile:
    """Appends rows to a file in ``private/``. It is not flushed for each row: a crash may lose the last ones.

    Guarantee:
        The file is made readable by its owner only.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        # The end of a line that a crash has torn must not become the beginning of the next row.
        self._separator = b"\n" if path.exists() and not read_bytes(path).endswith(b"\n") else b""

    def append(self, row: TraceRow) -> None:
        line = self._separator + canonical_json(asdict(row)) + b"\n"
        self._separator = b""
        with explained("write", self.path), open(self.path, "ab", opener=_owner_only) as stream:
            stream.write(line)


def read_trace(path: Path) -> list[TraceRow]:
    """The rows by release. Of rows for the same release, as a resumed run writes them, the last one counts.

    A torn line is skipped where a crash can have left one: at the end, or before the first row of a resumed run.
    """
    rows: dict[int, TraceRow] = {}
    keys = ("release", "attempts", "measured", "metric", "seconds")
    for index, line in enumerate(read_bytes(path).splitlines(), start=1):
        if not line.startswith(b"{") or not line.endswith(b"}"):
            continue
        place = f"{path}, line {index}"
        data = parse_json(line, what=place)
        try:
            codec.require_keys(data, what="the row", required=keys)
            row = TraceRow(**{key: data[key] for key in keys})
        except InputError as error:
            raise DataError(f"{place}: {error}") from error
        rows[row.release] = row
    return [rows[release] for release in sorted(rows)]


def _owner_only(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
