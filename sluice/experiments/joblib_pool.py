"""Processes of this machine, by joblib's own executor (loky)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from typing import Any

from joblib import cpu_count
from joblib.externals.loky import ProcessPoolExecutor

from sluice.experiments.jobs import JobOptions, WorkerDied

_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


class _Processes:
    """One executor for each process: of an executor that loses a process, all jobs would be lost."""

    def __init__(self, count: int) -> None:
        self.width: int | None = count
        self._threads = dict.fromkeys(_THREADS, str(max(1, cpu_count() // count)))
        self._idle: list[Any] = []
        self._busy: dict[Future[Any], Any] = {}

    def submit(self, function: Callable[[Any], Any], item: Any) -> Future[Any]:
        executor = self._idle.pop() if self._idle else ProcessPoolExecutor(max_workers=1, env=self._threads)
        future: Future[Any] = executor.submit(function, item)
        self._busy[future] = executor
        return future

    def wait(self, handles: Collection[Future[Any]]) -> Collection[Future[Any]]:
        return wait(handles, return_when=FIRST_COMPLETED).done

    def result(self, handle: Future[Any]) -> Any:
        executor = self._busy.pop(handle)
        try:
            value = handle.result()
        except BrokenProcessPool as error:
            executor.shutdown(wait=False, kill_workers=True)
            raise WorkerDied("a process ended by itself, by a signal or for want of memory") from error
        self._idle.append(executor)
        return value

    def close(self) -> None:
        for executor in (*self._idle, *self._busy.values()):
            executor.shutdown(wait=True, kill_workers=True)


@contextmanager
def opened(options: JobOptions) -> Iterator[_Processes]:
    processes = _Processes(cpu_count() if options.jobs == -1 else options.jobs or 1)
    try:
        yield processes
    finally:
        processes.close()
