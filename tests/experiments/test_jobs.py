"""Jobs in other processes: what ended stays, what a dead worker had is done again, and not for ever."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice._base.errors import InputError
from sluice.experiments import jobs
from sluice.experiments.jobs import JobOptions, Lost, WorkerDied, run_jobs

# A cluster's own threads and sockets end when they like.
quiet = pytest.mark.filterwarnings("default")


class Faulty:
    """A backend whose workers die as often as it is told, item by item."""

    def __init__(self, deaths: list[int], width: int | None) -> None:
        self.width = width
        self.deaths = list(deaths)
        self.running: dict[object, int] = {}
        self.most = 0
        self.calls = [0] * len(deaths)

    def submit(self, function: Callable[[Any], Any], item: Any) -> object:
        handle = object()
        self.running[handle] = item
        self.most = max(self.most, len(self.running))
        self.calls[item] += 1
        return handle

    def wait(self, handles: Collection[Any]) -> Collection[Any]:
        return list(handles)[-1:]  # the last one first

    def result(self, handle: Any) -> Any:
        item = self.running.pop(handle)
        if self.deaths[item]:
            self.deaths[item] -= 1
            raise WorkerDied("gone")
        return 10 * item


@given(
    deaths=st.lists(st.integers(0, 5), max_size=8),
    width=st.none() | st.integers(1, 3),
    retries=st.integers(0, 4),
)
def test_a_job_is_done_again_as_often_as_allowed_and_others_are_left_alone(deaths, width, retries):
    pool = Faulty(deaths, width)
    found = dict(jobs._through(pool, lambda item: item, range(len(deaths)), retries))
    assert sorted(found) == list(range(len(deaths)))
    for item, died in enumerate(deaths):
        assert pool.calls[item] == min(died, retries) + 1
        if died <= retries:
            assert found[item] == 10 * item
        else:
            assert found[item] == Lost(reason=f"its worker died {retries + 1} times: gone")
    assert pool.most <= (len(deaths) if width is None else width)


def dies_once(folder: Path) -> Callable[[int], int]:
    """Squares. Item 1 kills its worker the first time, a negative item whenever it is tried. A closure is sent by value."""

    def job(item: int) -> int:
        (folder / f"{item}-{os.getpid()}").touch()
        tries = len(list(folder.glob(f"{item}-*")))
        if item < 0 or (item == 1 and tries == 1):
            os.kill(os.getpid(), signal.SIGKILL)
        return item * item

    return job


def tries_of(item: int, folder: Path) -> int:
    return len(list(folder.glob(f"{item}-*")))


def with_a_worker_killed(options: JobOptions, folder: Path) -> None:
    found = dict(run_jobs(dies_once(folder), [0, 1, 2, 3], options))
    assert found == {0: 0, 1: 1, 2: 4, 3: 9}
    assert tries_of(1, folder) == 2, "done again by another process"


def with_a_job_that_kills(options: JobOptions, folder: Path) -> None:
    found = dict(run_jobs(dies_once(folder), [0, -1, 2], options))
    lost = found.pop(-1)
    assert isinstance(lost, Lost)
    assert f"its worker died {options.retries + 1} times" in lost.reason
    assert found == {0: 0, 2: 4}
    assert tries_of(-1, folder) == options.retries + 1


def test_processes_that_are_killed(tmp_path):
    with_a_worker_killed(JobOptions(jobs=2, retries=1), tmp_path)


def test_a_job_that_kills_its_process_is_given_up(tmp_path):
    with_a_job_that_kills(JobOptions(jobs=2, retries=1), tmp_path)


@quiet
def test_dask_workers_that_are_killed(tmp_path):
    pytest.importorskip("distributed", reason="dask[distributed] is not installed: pip install 'sluice[cluster]'")
    with_a_worker_killed(JobOptions(backend="dask", jobs=2, retries=1), tmp_path)


@quiet
@pytest.mark.slow
def test_a_job_that_kills_its_dask_worker_is_given_up(tmp_path):
    pytest.importorskip("distributed", reason="dask[distributed] is not installed: pip install 'sluice[cluster]'")
    with_a_job_that_kills(JobOptions(backend="dask", jobs=2), tmp_path)


@quiet
@pytest.mark.slow
def test_ray_workers_that_are_killed(tmp_path):
    pytest.importorskip("ray", reason="ray is not installed: pip install 'sluice[ray]'")
    with_a_worker_killed(JobOptions(backend="ray", jobs=2, retries=1), tmp_path)


@quiet
@pytest.mark.slow
def test_a_job_that_kills_its_ray_worker_is_given_up(tmp_path):
    pytest.importorskip("ray", reason="ray is not installed: pip install 'sluice[ray]'")
    with_a_job_that_kills(JobOptions(backend="ray", jobs=2, retries=1), tmp_path)


def test_a_mistake_in_a_job_is_raised_here_and_ends_the_others():
    def wrong(item: int) -> int:
        raise ZeroDivisionError(f"item {item}")

    with pytest.raises(ZeroDivisionError, match=r"item [78]"):  # whichever fails first
        list(run_jobs(wrong, [7, 8], JobOptions(jobs=2)))


@quiet
@pytest.mark.slow
def test_a_mistake_in_a_job_on_ray_is_raised_here():
    pytest.importorskip("ray", reason="ray is not installed: pip install 'sluice[ray]'")

    def wrong(item: int) -> int:
        raise InputError(f"item {item}")

    with pytest.raises(InputError, match="item 7"):
        list(run_jobs(wrong, [7], JobOptions(backend="ray")))


def test_without_other_workers_jobs_run_here_in_order():
    seen: list[int] = []
    assert [value for _, value in run_jobs(seen.append, [3, 1, 2], JobOptions())] == [None] * 3
    assert seen == [3, 1, 2]


def test_nothing_to_do_starts_nothing(monkeypatch):
    monkeypatch.setattr(jobs, "_opened", lambda options: pytest.fail("a cluster was started"))
    assert list(run_jobs(str, [], JobOptions(backend="dask", jobs=2))) == []


def test_the_earlier_name_of_joblib_is_understood():
    assert JobOptions(backend="loky") == JobOptions(backend="joblib")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"backend": "threads"}, "backend='threads' is not allowed: it must be one of dask, joblib, ray"),
        ({"jobs": 0}, "jobs=0 is not allowed"),
        ({"retries": -1}, "retries=-1 is not allowed"),
        ({"address": "here:1"}, "address='here:1' is not allowed for backend='joblib'"),
    ],
)
def test_bad_ways_to_run(changes, message):
    with pytest.raises(InputError, match=message):
        JobOptions(**changes)


@pytest.mark.parametrize(("backend", "module"), [("dask", "distributed"), ("ray", "ray")])
def test_a_backend_that_is_not_installed_is_named(monkeypatch, backend, module):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(InputError, match=rf"backend='{backend}' needs a package .* pip install '{backend}"):
        list(run_jobs(str, [1], JobOptions(backend=backend)))


@quiet
def test_a_cluster_that_does_not_answer_is_named():
    distributed = pytest.importorskip("distributed", reason="dask[distributed] is not installed")
    import dask

    assert distributed
    with (
        dask.config.set({"distributed.comm.timeouts.connect": "0.2s"}),
        pytest.raises(InputError, match=r"address='127.0.0.1:9' does not answer"),
    ):
        list(run_jobs(str, [1], JobOptions(backend="dask", address="127.0.0.1:9")))
