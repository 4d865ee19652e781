"""Fetch one file from the first mirror that delivers it whole.

A file appears under its name only after its sha256 was checked; until then it is a temporary file that is
removed whatever happens. So a cache never holds half a file, nor another file under the right name.
"""

from __future__ import annotations

import hashlib
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from sluice._base.errors import DataError
from sluice._base.extras import needing_extras
from sluice._base.files import replaced_atomically
from sluice._base.progress import terminal_bar
from sluice.data.files import DataFile

if TYPE_CHECKING:
    from requests import RequestException

CHUNK_BYTES = 1 << 16
CONNECT_AND_READ_SECONDS = (10.0, 30.0)
ROUNDS = 2
PAUSE_SECONDS = 1.0


class _MirrorFault(Exception):
    """A mirror did not deliver; ``passing`` faults are worth a second try."""

    def __init__(self, reason: str, *, passing: bool) -> None:
        super().__init__(reason)
        self.passing = passing


class _Meter:
    """What pooch reports its progress to: fills the bar, and stops a mirror that sends too much."""

    def __init__(self, bar: Progress | None, file: DataFile) -> None:
        self.total = 0
        self._limit = file.contents[0].size
        self._received = 0
        self._bar = bar
        self._task = bar.add_task(file.name, total=self._limit) if bar else None

    def update(self, count: int) -> None:
        # Pooch counts whole chunks, so the last one may reach past the end.
        self._received += count
        if self._received >= self._limit + 2 * CHUNK_BYTES:
            raise _MirrorFault(f"sent more than the expected {self._limit} bytes", passing=False)
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=min(self._received, self._limit))

    def reset(self) -> None:
        self._received = 0

    def close(self) -> None:
        if self._bar is not None and self._task is not None:
            self._bar.stop_task(self._task)


def download(
    file: DataFile, root: Path, *, timeout: tuple[float, float] = CONNECT_AND_READ_SECONDS, pause: float = PAUSE_SECONDS
) -> Path:
    """Fetch ``file`` to its first place under ``root``, trying its mirrors in turn, and return the path.

    Mirrors that failed for a passing reason (no connection, a time-out, a cut-off transfer, a server error) are
    tried once more. If none delivers, a ``DataError`` says what each of them did, and nothing is left behind.
    """
    target = root / file.places[0]
    faults: dict[str, _MirrorFault] = {}
    created = [folder for folder in (target.parent, *target.parent.parents) if not folder.exists()]
    try:
        for number in range(ROUNDS):
            waiting = [url for url in file.mirrors if url not in faults or faults[url].passing]
            if number and waiting:
                time.sleep(pause)
            for url in waiting:
                try:
                    _fetch(file, url, target, timeout)
                except _MirrorFault as fault:
                    faults[url] = fault
                else:
                    return target
    finally:
        if not target.exists():
            _remove_empty(created)
    tried = "; ".join(f"{urlsplit(url).netloc}: {fault}" for url, fault in faults.items()) or "it has no mirrors"
    raise DataError(
        f"{file.name} could not be downloaded ({tried}).\n"
        f"Try again later, or put the file yourself at {target} ({file.expected})."
    )


def _fetch(file: DataFile, url: str, target: Path, timeout: tuple[float, float]) -> None:
    with needing_extras():
        import pooch  # with requests: slow to load, and needed only where a file is missing
        import requests

    with _progress(file, url) as bar, replaced_atomically(target) as temporary, ExitStack() as connections:
        fetch = pooch.HTTPDownloader(
            progressbar=_Meter(bar, file),
            chunk_size=CHUNK_BYTES,
            timeout=timeout,
            # Pooch leaves the connection of a failed transfer open, so each response is closed here.
            hooks={"response": lambda response, *_, **__: connections.enter_context(response)},
        )
        try:
            fetch(url, str(temporary), None)
        except requests.HTTPError as error:
            status = 0 if error.response is None else error.response.status_code
            raise _MirrorFault(f"answered {status}", passing=status >= 500 or status in (408, 429)) from error
        except requests.Timeout as error:
            raise _MirrorFault("did not answer in time", passing=True) from error
        except requests.RequestException as error:
            raise _MirrorFault(_first_words(error), passing=True) from error
        with temporary.open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
        if digest != file.contents[0].sha256:
            size = temporary.stat().st_size
            raise _MirrorFault(f"sent other content (sha256 {digest}, {size} bytes)", passing=False)


def _first_words(error: RequestException) -> str:
    import requests

    if "timed out" in str(error).lower():
        return "did not answer in time"
    if isinstance(error, requests.exceptions.ChunkedEncodingError):
        return "broke off the transfer"
    return "could not be reached" if isinstance(error, requests.ConnectionError) else type(error).__name__


@contextmanager
def _progress(file: DataFile, url: str) -> Iterator[Progress | None]:
    """A bar on a terminal, one plain line elsewhere."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with terminal_bar(*columns, TimeRemainingColumn()) as bar:
        if bar is None:
            place, megabytes = urlsplit(url).netloc, file.contents[0].size / 1e6
            print(f"Downloading {file.name} ({megabytes:.1f} MB) from {place}", file=sys.stderr, flush=True)
        yield bar


def _remove_empty(folders: list[Path]) -> None:
    for folder in folders:
        if folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()
