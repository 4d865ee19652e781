"""Data files, named by the sha256 of what they must contain.

Nothing here parses a file. Whoever parses one is handed bytes that were read once and hashed in memory, so
a file that is exchanged between its check and its use cannot slip through.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from sluice._base.errors import DataError, InputError
from sluice._base.files import cache_dir
from sluice.data.transforms import Transform

Kind = Literal["image", "text", "features"]
FileState = Literal["ok", "damaged", "unreadable", "missing"]
Unpack = Callable[[Mapping[str, bytes]], dict[str, np.ndarray]]


@dataclass(frozen=True, kw_only=True)
class Content:
    """What a file may hold: one published version of it."""

    sha256: str
    size: int


@dataclass(frozen=True, kw_only=True)
class DataFile:
    """One file of a data set: where it may lie under a data folder, and which contents are accepted.

    The first place and the first content are those of a download.
    """

    name: str
    places: tuple[str, ...]
    contents: tuple[Content, ...]
    mirrors: tuple[str, ...] = ()
    optional: bool = False

    def found_in(self, root: Path) -> Path | None:
        """The first of the file's places under ``root`` where something lies (a broken link counts)."""
        candidates = (root / place for place in self.places)
        return next((path for path in candidates if os.path.lexists(path)), None)

    def root_of(self, path: Path) -> Path:
        """The data folder of which ``path`` is one of the file's places."""
        place = next(place for place in self.places if path.parts[-len(Path(place).parts) :] == Path(place).parts)
        return path.parents[len(Path(place).parts) - 1]

    @property
    def expected(self) -> str:
        """The accepted contents, in words for a message."""
        return " or ".join(f"sha256 {content.sha256} ({content.size} bytes)" for content in self.contents)


@dataclass(frozen=True, kw_only=True)
class CatalogEntry:
    """A published data set. Each layout is a complete set of files; the first is the one that is downloaded.

    ``unpack`` makes arrays of the verified files, ``transform`` makes model inputs of a batch of records.
    """

    name: str
    kind: Kind
    title: str
    train_size: int
    test_size: int
    classes: tuple[str, ...]
    licence: str
    layouts: tuple[tuple[DataFile, ...], ...]
    unpack: Unpack
    transform: Transform


@dataclass(frozen=True, kw_only=True)
class FileReport:
    """The outcome of checking one file: ``ok``, ``damaged``, ``unreadable`` or ``missing``."""

    path: Path
    state: FileState
    expected: str
    found: str


@dataclass(frozen=True, kw_only=True)
class Location:
    """Where the files of one layout lie; ``paths`` lacks those that were found nowhere."""

    layout: tuple[DataFile, ...]
    root: Path | None
    paths: Mapping[str, Path]

    @property
    def complete(self) -> bool:
        return all(file.optional or file.name in self.paths for file in self.layout)


def download_root() -> Path:
    """Where downloads are kept unless the user names another folder."""
    return cache_dir() / "data"


def search_roots(data_dir: str | Path | None = None) -> tuple[Path, ...]:
    """The folders that are searched, in order: ``data_dir``, ``$SLUICE_DATA``, the user's cache."""
    named = {"data_dir": data_dir, "SLUICE_DATA": os.environ.get("SLUICE_DATA")}
    roots = []
    for name, value in named.items():
        if value is None or value == "":
            continue
        root = Path(value).expanduser()
        if not root.is_dir():
            raise InputError(f"{name}={str(value)!r} is not a folder. Give an existing folder, or leave it out.")
        roots.append(root)
    return tuple(dict.fromkeys([*roots, download_root()]))


def locate(entry: CatalogEntry, roots: tuple[Path, ...]) -> Location:
    """Choose the first layout in the search order that is complete, else the first of which anything is there.

    A file that is missing beside its companions may lie in a later folder: contents are checked, so it does
    not matter where they come from.
    """
    candidates = [
        Location(layout=layout, root=root, paths=_paths(layout, roots[position:]))
        for position, root in enumerate(roots)
        for layout in entry.layouts
        if any(file.found_in(root) for file in layout)
    ]
    complete = (place for place in candidates if place.complete)
    return next(complete, next(iter(candidates), Location(layout=entry.layouts[0], root=None, paths={})))


def _paths(layout: tuple[DataFile, ...], roots: tuple[Path, ...]) -> dict[str, Path]:
    found = {}
    for file in layout:
        path = next((place for root in roots if (place := file.found_in(root))), None)
        if path is not None:
            found[file.name] = path
    return found


def repair_command(entry_name: str, root: Path | None = None) -> str:
    """The command that fetches a data set again, beside the bad file; without a root, into the user's cache."""
    command = f"sluice data get {entry_name}"
    if root is None:
        return command
    if root == download_root():
        return f"{command} --replace"
    return f"{command} --replace --data-dir {shlex.quote(str(root))}"


def read_verified(path: Path, file: DataFile, *, entry_name: str) -> tuple[bytes, str]:
    """Read the file once; return its bytes and their sha256.

    Raises a ``DataError`` that names the file, what was expected, what was found and the repair command
    unless these very bytes have an accepted sha256. The file itself is left as it is.
    """
    report, content = _examine(path, file)
    if content is None:
        raise DataError(describe(report, entry_name=entry_name, root=file.root_of(path)))
    return content, hashlib.sha256(content).hexdigest()


def check(path: Path, file: DataFile) -> FileReport:
    """Compare the file's sha256 with the accepted ones."""
    return _examine(path, file)[0]


def describe(report: FileReport, *, entry_name: str, root: Path) -> str:
    """Two lines: what is wrong with the file, and how to repair it."""
    return (
        f"{report.path} is {report.state}: expected {report.expected}; found {report.found}.\n"
        f"Repair it with: {repair_command(entry_name, root)}"
    )


def _examine(path: Path, file: DataFile) -> tuple[FileReport, bytes | None]:
    try:
        with path.open("rb") as stream:
            status = os.fstat(stream.fileno())
            if not stat.S_ISREG(status.st_mode):
                return _report(path, file, "unreadable", "no regular file"), None
            if status.st_size not in {content.size for content in file.contents}:
                # A file of another size is wrong whatever it holds, and may be too large to read into memory.
                digest = hashlib.file_digest(stream, "sha256").hexdigest()
                return _report(path, file, "damaged", f"sha256 {digest} ({status.st_size} bytes)"), None
            content = stream.read(status.st_size + 1)
    except OSError as error:
        return _report(path, file, "unreadable", error.strerror or str(error)), None
    digest = hashlib.sha256(content).hexdigest()
    found = f"sha256 {digest} ({len(content)} bytes)"
    if digest not in {accepted.sha256 for accepted in file.contents}:
        return _report(path, file, "damaged", found), None
    return _report(path, file, "ok", found), content


def _report(path: Path, file: DataFile, state: FileState, found: str) -> FileReport:
    return FileReport(path=path, state=state, expected=file.expected, found=found)
