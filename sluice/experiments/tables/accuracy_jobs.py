"""Cells as independent jobs through joblib, which runs them here, in processes, or on a Dask or Ray cluster."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from joblib import Parallel, delayed, parallel_config

from sluice._base import validate
from sluice._base.errors import InputError
from sluice.experiments.run import Progress
from sluice.experiments.tables.accuracy_cells import PlannedCell
from sluice.experiments.tables.accuracy_results import result_path, store_result
from sluice.experiments.tables.accuracy_run import Conditions, Outcome, Watch, run_cell

BACKENDS = ("loky", "dask", "ray")


def run_cells(
    cells: Sequence[PlannedCell],
    conditions: Conditions,
    *,
    jobs: int | None = None,
    backend: str = "loky",
    scheduler: str | None = None,
    report: Callable[[PlannedCell, Progress], None] | None = None,
    watch: Watch | None = None,
) -> Iterator[Outcome]:
    """What becomes of each cell, in the order in which they end; every job stores its own result.

    Args:
        jobs: how many at once. None is one; on a cluster, all that it takes.
        backend: "loky" is processes of this machine.
        scheduler: address of a Dask or Ray cluster; None starts a Dask cluster on this machine.
        report: called after every release, where cells are run one by one in this process.
        watch: makes what watches a cell's run, and adds to its result.
    """
    check_jobs(jobs=jobs, backend=backend, scheduler=scheduler)
    if not cells:
        return
    if backend == "loky" and jobs in (None, 1):
        for planned in cells:
            yield run_cell(planned, conditions, _bound(report, planned), watch)
        return
    with _BACKENDS[backend](jobs, scheduler) as (count, options):
        # Cells are long, so they are handed out one by one; each result comes back when it is there.
        parallel = Parallel(n_jobs=count, batch_size=1, pre_dispatch="all", **options)
        for outcome in parallel(delayed(run_cell)(planned, conditions, watch=watch) for planned in cells):
            if outcome.result is not None and not result_path(conditions.results, outcome.cell).exists():
                store_result(conditions.results, outcome.cell, outcome.result)  # the worker has a disk of its own
            yield outcome


def check_jobs(*, jobs: int | None, backend: str, scheduler: str | None) -> None:
    """Refuse what no backend can do, before anything is run."""
    validate.one_of(BACKENDS, backend=backend)
    if jobs is not None and jobs != -1:
        validate.positive_integer(jobs=jobs)
    if scheduler is not None and backend == "loky":
        raise InputError(f"scheduler={scheduler!r} is not allowed for backend='loky': choose dask or ray.")


def _bound(
    report: Callable[[PlannedCell, Progress], None] | None, planned: PlannedCell
) -> Callable[[Progress], None] | None:
    return None if report is None else lambda progress: report(planned, progress)


@contextmanager
def _loky(jobs: int | None, scheduler: str | None) -> Iterator[tuple[int, dict[str, Any]]]:
    with parallel_config(backend="loky"):
        yield jobs or 1, {"return_as": "generator_unordered"}


@contextmanager
def _dask(jobs: int | None, scheduler: str | None) -> Iterator[tuple[int, dict[str, Any]]]:
    try:
        from distributed import Client, LocalCluster
    except ImportError as error:
        raise _not_installed("dask", "dask[distributed]") from error

    if scheduler is not None:
        try:
            client = Client(scheduler)
        except (OSError, ValueError) as error:
            raise InputError(
                f"scheduler={scheduler!r} does not answer: {error}. Give its address, host:port."
            ) from error
        with client, parallel_config(backend="dask"):
            yield jobs or -1, {"return_as": "generator_unordered"}
        return
    # One thread for each worker: a process runs one cell at a time.
    workers = {} if jobs == -1 else {"n_workers": jobs or 1}
    with (
        LocalCluster(threads_per_worker=1, processes=True, dashboard_address=None, **workers) as cluster,
        Client(cluster),
        parallel_config(backend="dask"),
    ):
        yield jobs or 1, {"return_as": "generator_unordered"}


@contextmanager
def _ray(jobs: int | None, scheduler: str | None) -> Iterator[tuple[int, dict[str, Any]]]:
    try:
        import ray
        from ray.util.joblib import register_ray
    except ImportError as error:
        raise _not_installed("ray", "ray") from error

    ray.init(address=scheduler, num_cpus=jobs if scheduler is None and jobs != -1 else None)
    register_ray()
    try:
        with parallel_config(backend="ray"):
            # Ray's backend gives results back all at once; each job has stored its own by then.
            yield jobs or -1, {}
    finally:
        ray.shutdown()


_BACKENDS = {"loky": _loky, "dask": _dask, "ray": _ray}


def _not_installed(backend: str, package: str) -> InputError:
    return InputError(f"backend={backend!r} needs a package that is not installed: pip install '{package}'.")
