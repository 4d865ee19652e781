"""Waiting for the disk in the background: one job at a time, whose error comes out where it is waited for."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor


class Background:
    """Runs one job at a time in a thread that it keeps. The interpreter does not end before the job has.

    Jobs are for what the disk does: they may not touch anything that the program goes on to change.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="sluice-disk")
        self._job: Future[None] | None = None

    @property
    def busy(self) -> bool:
        return self._job is not None and not self._job.done()

    def start(self, job: Callable[[], None]) -> None:
        """Begin a job, after the one before, whose error is raised here."""
        self.wait()
        self._job = self._thread.submit(job)

    def wait(self) -> None:
        """Return when the job has ended; its error, if any, is raised once."""
        if self._job is not None:
            error = self._job.exception()
            self._job = None
            if error is not None:
                raise error
