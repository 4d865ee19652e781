"""Ctrl-C that waits: while a release is being applied an interruption would leave it half done."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, ClassVar

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class DelayedInterrupt:
    """Holds back Ctrl-C and SIGTERM between :meth:`hold` and :meth:`let_go`.

    Holds may overlap: signals are delivered when the last one ends. They belong to the main thread; elsewhere this does
    nothing.
    """

    _holding: ClassVar[set[DelayedInterrupt]] = set()
    _waiting: ClassVar[list[int]] = []
    _previous: ClassVar[dict[int, Any]] = {}

    def hold(self) -> None:
        if not _in_main_thread():
            return
        self._holding.add(self)
        for number in _SIGNALS:
            handler = signal.getsignal(number)
            if handler != self._note:
                self._previous[number] = handler  # known before it is replaced: a signal may come in between
                signal.signal(number, self._note)

    def let_go(self) -> None:
        """End this hold; with the last one, hand signals back to whoever had them and deliver those that came."""
        self._holding.discard(self)
        if self._holding or not self._previous:
            return
        try:
            self._hand_back()
        finally:  # one that is handed back may come, and raise, before the other one is
            self._hand_back()
            waiting = list(self._waiting)  # not before: until now more could come
            self._waiting.clear()
        for number in waiting:
            signal.raise_signal(number)

    def _hand_back(self) -> None:
        for number in list(self._previous):
            signal.signal(number, self._previous[number])
            del self._previous[number]

    @classmethod
    def _note(cls, number: int, frame: FrameType | None) -> None:
        cls._waiting.append(number)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Inside the block Ctrl-C and SIGTERM wait; they are delivered at its end."""
    interrupt = DelayedInterrupt()
    try:
        interrupt.hold()
        yield
    finally:
        interrupt.let_go()


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
