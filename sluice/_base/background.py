"""Waiting for the disk in the background: one job at a time, whose error comes out where it is waited for."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Background:
    """Runs one job at a time in a thread of its own. The interpreter does not end before it has.

    Jobs are for what the disk does: they may not touch anything that the program goes on to change.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    @property
    def busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def start(self, job: Callable[[], None]) -> None:
        """Begin a job, after the one before, whose error is raised here."""
        self.wait()
        thread = threading.Thread(target=self._run, args=(job,), name="sluice-disk")
        thread.start()
        self._thread = thread

    def wait(self) -> None:
        """Return when the job has ended; its error, if any, is raised once."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _run(self, job: Callable[[], None]) -> None:
        try:
            job()
        except BaseException as error:
            self._error = error
