"""A Dask cluster that is running, or one of this machine for as long as the jobs last."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

from sluice._base.errors import DataError
from sluice.experiments.jobs import JobOptions, WorkerDied, no_answer, not_installed


class _Cluster:
    def __init__(self, client: Any, width: int | None) -> None:
        self.width = width
        self._client = client

    def submit(self, function: Callable[[Any], Any], item: Any) -> Any:
        # Not pure: the same item twice is two jobs.
        return self._client.submit(function, item, pure=False)

    def wait(self, handles: Collection[Any]) -> Collection[Any]:
        from distributed import CancelledError, wait

        try:
            return list(wait(list(handles), return_when="FIRST_COMPLETED").done)
        except CancelledError as error:
            raise DataError(
                "the Dask scheduler was lost. Results of jobs that ended are stored: start it, and run the same command."
            ) from error

    def result(self, handle: Any) -> Any:
        from distributed import KilledWorker

        try:
            return handle.result()
        except KilledWorker as error:
            raise WorkerDied(f"Dask lost {error.last_worker.address}") from error


@contextmanager
def opened(options: JobOptions) -> Iterator[_Cluster]:
    try:
        import dask
        from distributed import Client, LocalCluster
    except ImportError as error:
        raise not_installed("dask", "dask[distributed]") from error

    if options.address is not None:
        try:
            client = Client(options.address)
        except (OSError, ValueError) as error:
            raise no_answer(options, error) from error
        with client:
            yield _Cluster(client, None if options.jobs == -1 else options.jobs)
        return
    count = {} if options.jobs == -1 else {"n_workers": options.jobs or 1}
    with (
        # Deaths are counted in one place, `run_jobs`; a running cluster has a setting of its own.
        dask.config.set({"distributed.scheduler.allowed-failures": 0}),
        # One thread for each worker: a process runs one job at a time.
        LocalCluster(threads_per_worker=1, processes=True, dashboard_address=None, **count) as cluster,
        Client(cluster) as client,
    ):
        yield _Cluster(client, len(cluster.workers))
