"""Progress of long public work: a bar on a terminal, a plain line every few seconds elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn

SECONDS_BETWEEN_LINES = 10.0


@contextmanager
def progress(title: str, *, total: int, shown: bool = True) -> Iterator[Callable[[int], None]]:
    """Gives a function to call with the number of items just finished. Everything goes to standard error.

    Guarantee:
        The title and the counts are all that is shown, so both must be public. Data passes through unseen.
    """
    if not shown:
        yield lambda finished: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with terminal_bar(*columns) as bar:
        if bar is None:
            yield _Lines(title, total).advance
        else:
            task = bar.add_task(title, total=total)
            yield lambda finished: bar.advance(task, finished)


@contextmanager
def terminal_bar(*columns: ProgressColumn) -> Iterator[Progress | None]:
    """A bar with these columns on standard error, which leaves standard output to results; None if it is no terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    with Progress(*columns, console=Console(stderr=True)) as bar:
        yield bar


class _Lines:
    def __init__(self, title: str, total: int) -> None:
        self._title, self._total, self._finished = title, total, 0
        self._due = time.monotonic() + SECONDS_BETWEEN_LINES

    def advance(self, finished: int) -> None:
        self._finished += finished
        if time.monotonic() >= self._due:
            print(f"{self._title}: {self._finished} of {self._total}", file=sys.stderr, flush=True)
            self._due = time.monotonic() + SECONDS_BETWEEN_LINES
