"""What the ``sluice data`` commands do: list the data sets, get their files, verify every copy of them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path
from typing import Literal

from sluice._base.errors import DataError
from sluice.data.catalog import CATALOG, DIGITS, entry_named
from sluice.data.download import download
from sluice.data.files import (
    CatalogEntry,
    DataFile,
    Location,
    check,
    describe,
    download_root,
    locate,
    repair_command,
    search_roots,
)
from sluice.data.loading import DIGITS_SHA256, DIGITS_TEST_SIZE, read_digits

State = Literal["ok", "damaged", "unreadable", "missing", "absent"]


@dataclass(frozen=True, kw_only=True)
class Summary:
    """One data set: what it is, and where its files lie (an empty string: nowhere yet)."""

    name: str
    kind: str
    title: str
    train: int
    test: int
    classes: int
    licence: str
    download_bytes: int
    found: str


@dataclass(frozen=True, kw_only=True)
class Obtained:
    """One file of a data set that is now there, complete and checked."""

    name: str
    path: str
    action: Literal["found", "downloaded", "embedded"]


@dataclass(frozen=True, kw_only=True)
class Check:
    """One file that was looked at. ``absent`` is not there and not needed; ``mend`` is the command that helps."""

    name: str
    path: str
    state: State
    expected: str
    found: str
    mend: str

    @property
    def bad(self) -> bool:
        return self.state not in ("ok", "absent")


def summaries(data_dir: Path | None = None) -> list[Summary]:
    """All data sets, without opening any file."""
    images, _ = read_digits()
    digits = Summary(
        name=DIGITS,
        kind="image",
        title="handwritten digits, 8x8 grey (scikit-learn)",
        train=len(images) - DIGITS_TEST_SIZE,
        test=DIGITS_TEST_SIZE,
        classes=10,
        licence="CC BY 4.0",
        download_bytes=0,
        found="embedded",
    )
    roots = search_roots(data_dir)
    return [digits, *(_summary(entry, roots) for entry in CATALOG.values())]


def _summary(entry: CatalogEntry, roots: tuple[Path, ...]) -> Summary:
    location = locate(entry, roots)
    return Summary(
        name=entry.name,
        kind=entry.kind,
        title=entry.title,
        train=entry.train_size,
        test=entry.test_size,
        classes=len(entry.classes),
        licence=entry.licence,
        download_bytes=sum(file.contents[0].size for file in entry.layouts[0]),
        found=str(location.root) if location.complete else "",
    )


def get(name: str, *, data_dir: Path | None = None, replace: bool = False) -> list[Obtained]:
    """Make sure that every file of a data set is there and has its sha256; download what is missing.

    With ``data_dir`` only that folder is looked at and filled; otherwise downloads go to the user's cache.
    A damaged file is an error, unless ``replace`` is given: then it is set aside under the name
    ``FILE.damaged`` (``FILE.damaged.2``, ...) and downloaded again. No file is ever deleted.
    """
    if name == DIGITS:
        read_digits()
        return [Obtained(name=DIGITS, path="scikit-learn", action="embedded")]
    entry = entry_named(name)
    roots = (data_dir,) if data_dir is not None else search_roots()
    location = locate(entry, roots)
    while damaged := _first_damaged(location):
        file, path = damaged
        if not replace:
            raise DataError(describe(check(path, file), entry_name=name, root=file.root_of(path)))
        path.rename(_aside(path))
        location = locate(entry, roots)
    layout = location.layout
    if any(file.name not in location.paths and not file.mirrors for file in layout):
        layout = entry.layouts[0]
    return [_obtain(file, location.paths.get(file.name), data_dir or download_root()) for file in layout]


def _first_damaged(location: Location) -> tuple[DataFile, Path] | None:
    for file in location.layout:
        path = location.paths.get(file.name)
        if path is not None and check(path, file).state != "ok":
            return file, path
    return None


def _aside(path: Path) -> Path:
    """A free name beside a damaged file."""
    plain = path.with_name(f"{path.name}.damaged")
    numbered = (path.with_name(f"{path.name}.damaged.{number}") for number in count(2))
    return next(name for name in chain([plain], numbered) if not os.path.lexists(name))


def _obtain(file: DataFile, path: Path | None, target: Path) -> Obtained:
    if path is not None:
        return Obtained(name=file.name, path=str(path), action="found")
    return Obtained(name=file.name, path=str(download(file, target)), action="downloaded")


def verify(chosen: Sequence[str] = (), *, data_dir: Path | None = None) -> Iterator[Check]:
    """Check every copy of every file: in ``data_dir`` alone if given, else in ``$SLUICE_DATA`` and the user's cache.

    A data set of which no file is found is ``absent``, or ``missing`` if it was chosen by name. A file that lacks
    beside its companions is ``missing``.
    """
    entries = [entry_named(name) for name in chosen if name != DIGITS]
    roots = search_roots(data_dir)[:1] if data_dir is not None else search_roots()
    if not chosen or DIGITS in chosen:
        read_digits()
        yield Check(name=DIGITS, path="scikit-learn", state="ok", expected=DIGITS_SHA256, found=DIGITS_SHA256, mend="")
    for entry in entries if chosen else CATALOG.values():
        yield from _verify(entry, roots, needed=bool(chosen))


def _verify(entry: CatalogEntry, roots: tuple[Path, ...], *, needed: bool) -> Iterator[Check]:
    copies = [(root, layout) for root in roots for layout in entry.layouts if any(f.found_in(root) for f in layout)]
    for root, layout in copies:
        for file in layout:
            path = file.found_in(root)
            if path is not None:
                report = check(path, file)
                mend = "" if report.state == "ok" else repair_command(entry.name, root)
                yield _check(entry, report.path, report.state, report.found, file, mend)
    if copies:
        location = locate(entry, roots)
        lacking = [file for file in location.layout if file.name not in location.paths]
    else:
        location = None
        lacking = list(entry.layouts[0])
    for file in lacking:
        state: State = "absent" if file.optional or (location is None and not needed) else "missing"
        root = location.root if location is not None and location.root is not None else roots[-1]
        mend = "" if state == "absent" else repair_command(entry.name, None if root == download_root() else root)
        yield _check(entry, root / file.places[0], state, "nothing", file, mend)


def _check(entry: CatalogEntry, path: Path, state: State, found: str, file: DataFile, mend: str) -> Check:
    return Check(name=entry.name, path=str(path), state=state, expected=file.expected, found=found, mend=mend)
