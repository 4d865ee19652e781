"""Independent jobs, such as the cells of a table: in this process, in others, or on a Dask or Ray cluster.

A worker may die at any time: its machine is taken away, or memory runs out. What it had was lost then, so the job is given to
another worker, a bounded number of times; jobs that ended are not touched by it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol, TypeVar

from sluice._base import validate
from sluice._base.errors import InputError, SluiceError

Item = TypeVar("Item")
Value = TypeVar("Value")

BACKENDS = ("joblib", "dask", "ray")
RETRIES = 3
_EARLIER_NAMES = {"loky": "joblib"}
_POOLS = {"joblib": "joblib_pool", "dask": "dask_pool", "ray": "ray_pool"}


@dataclass(frozen=True, kw_only=True)
class JobOptions:
    """Where jobs run. None of it may change what a job gives.

    Attributes:
        backend: "joblib", processes of this machine; "dask" or "ray".
        address: of a running cluster; without it, Dask and Ray start one on this machine.
        jobs: how many at once; None is one, on a running cluster all that it takes; -1 as many as there are processors.
        retries: how often a job is given to another worker because its worker died.
    """

    backend: str = "joblib"
    address: str | None = None
    jobs: int | None = None
    retries: int = RETRIES

    def __post_init__(self) -> None:
        object.__setattr__(self, "backend", _EARLIER_NAMES.get(self.backend, self.backend))
        validate.one_of(BACKENDS, backend=self.backend)
        if self.jobs is not None and self.jobs != -1:
            validate.positive_integer(jobs=self.jobs)
        if self.retries != 0:
            validate.positive_integer(retries=self.retries)
        if self.address is not None and self.backend == "joblib":
            raise InputError(f"address={self.address!r} is not allowed for backend='joblib': choose dask or ray.")

    @property
    def here(self) -> bool:
        """Whether jobs run one by one in this very process."""
        return self.backend == "joblib" and self.jobs in (None, 1)


@dataclass(frozen=True, kw_only=True)
class Lost:
    """Instead of a result: every worker that had this job died."""

    reason: str


class WorkerDied(SluiceError):
    """The worker of a job died; the job itself may be fine."""


class Pool(Protocol):
    """What a backend offers. `width` is how many jobs it is given at once; None is all."""

    width: int | None

    def submit(self, function: Callable[[Any], Any], item: Any) -> Any: ...

    def wait(self, handles: Collection[Any]) -> Collection[Any]:
        """Those that have ended, at least one of them."""
        ...

    def result(self, handle: Any) -> Any:
        """What the function gave or raised; `WorkerDied` where it could do neither."""
        ...


def run_jobs(
    function: Callable[[Item], Value], items: Sequence[Item], options: JobOptions
) -> Iterator[tuple[Item, Value | Lost]]:
    """What the function gives for each item, in the order in which they end.

    An error that the function raises ends everything: what may fail must say so in its result.
    """
    if not items:
        return
    if options.here:
        for item in items:
            yield item, function(item)
        return
    with _opened(options) as pool:
        yield from _through(pool, function, items, options.retries)


def _through(
    pool: Pool, function: Callable[[Item], Value], items: Sequence[Item], retries: int
) -> Iterator[tuple[Item, Value | Lost]]:
    waiting = deque(range(len(items)))
    deaths = [0] * len(items)
    running: dict[Any, int] = {}
    while waiting or running:
        while waiting and (pool.width is None or len(running) < pool.width):
            number = waiting.popleft()
            running[pool.submit(function, items[number])] = number
        for handle in pool.wait(running.keys()):
            number = running.pop(handle)
            try:
                value: Value | Lost = pool.result(handle)
            except WorkerDied as error:
                deaths[number] += 1
                if deaths[number] <= retries:
                    waiting.append(number)
                    continue
                value = Lost(reason=f"its worker died {deaths[number]} times: {error}")
            yield items[number], value


def _opened(options: JobOptions) -> AbstractContextManager[Pool]:
    module = import_module(f"sluice.experiments.{_POOLS[options.backend]}")
    opened: AbstractContextManager[Pool] = module.opened(options)
    return opened


def not_installed(backend: str, package: str) -> InputError:
    return InputError(f"backend={backend!r} needs a package that is not installed: pip install '{package}'.")


def no_answer(options: JobOptions, error: Exception) -> InputError:
    return InputError(f"address={options.address!r} does not answer: {error}. Give the address of a running cluster.")
