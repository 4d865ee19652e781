"""A Ray cluster that is running, or one of this machine for as long as the jobs last."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

from sluice.experiments.jobs import JobOptions, WorkerDied, no_answer, not_installed


class _Cluster:
    def __init__(self, ray: Any, width: int | None) -> None:
        self.width = width
        self._ray = ray

    def submit(self, function: Callable[[Any], Any], item: Any) -> Any:
        # Deaths are counted in one place, `run_jobs`.
        return self._ray.remote(num_cpus=1, max_retries=0)(function).remote(item)

    def wait(self, handles: Collection[Any]) -> Collection[Any]:
        ended, _ = self._ray.wait(list(handles), num_returns=1)
        return list(ended)

    def result(self, handle: Any) -> Any:
        errors = self._ray.exceptions
        try:
            return self._ray.get(handle)
        except errors.RayTaskError as error:
            raise getattr(error, "cause", error) from error
        except (errors.WorkerCrashedError, errors.NodeDiedError, errors.OutOfMemoryError) as error:
            raise WorkerDied(f"Ray says: {str(error).splitlines()[0]}") from error


@contextmanager
def opened(options: JobOptions) -> Iterator[_Cluster]:
    try:
        import ray
    except ImportError as error:
        raise not_installed("ray", "ray") from error

    if options.address is None:
        count = None if options.jobs == -1 else options.jobs or 1
        ray.init(num_cpus=count, include_dashboard=False, log_to_driver=False)
    else:
        try:
            ray.init(address=options.address, log_to_driver=False)
        except (OSError, ValueError) as error:
            raise no_answer(options, error) from error
    try:
        yield _Cluster(ray, None if options.jobs == -1 else options.jobs)
    finally:
        ray.shutdown()
