"""Ctrl-C that waits: between a release's record and its checkpoint an interruption would waste what was paid."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any


class DelayedInterrupt:
    """Holds back Ctrl-C between :meth:`hold` and :meth:`let_go`, which raises it then.

    Signals belong to the main thread; elsewhere this does nothing.
    """

    def __init__(self) -> None:
        self._waiting = False
        self._previous: Any = None

    def hold(self) -> None:
        if self._previous is None and threading.current_thread() is threading.main_thread():
            self._previous = signal.signal(signal.SIGINT, self._note)

    def let_go(self) -> None:
        """Hand signals back to whoever had them, and deliver one that came meanwhile."""
        if self._previous is None:
            return
        signal.signal(signal.SIGINT, self._previous)
        self._previous = None
        if self._waiting:
            self._waiting = False
            raise KeyboardInterrupt

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._waiting = True
