"""Ctrl-C that waits: between a release's record and its checkpoint an interruption would waste what was paid."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class DelayedInterrupt:
    """Holds back Ctrl-C and SIGTERM between :meth:`hold` and :meth:`let_go`, which delivers them then.

    Signals belong to the main thread; elsewhere this does nothing.
    """

    def __init__(self) -> None:
        self._waiting: list[int] = []
        self._previous: dict[int, Any] = {}

    def hold(self) -> None:
        if not self._previous and _in_main_thread():
            self._previous = {number: signal.signal(number, self._note) for number in _SIGNALS}

    def let_go(self) -> None:
        """Hand signals back to whoever had them, and deliver those that came meanwhile."""
        previous, waiting = self._previous, self._waiting
        self._previous, self._waiting = {}, []
        for number, handler in previous.items():
            signal.signal(number, handler)
        for number in waiting:
            signal.raise_signal(number)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._waiting.append(number)


@contextmanager
def sigterm_as_interrupt() -> Iterator[None]:
    """Inside the block SIGTERM, by which schedulers end programs, is a KeyboardInterrupt like Ctrl-C."""
    if not _in_main_thread():
        yield
        return
    previous = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
