from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Collection
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from sluice._base.errors import DataError
from sluice.experiments import jobs
from sluice.experiments.jobs import JobOptions, WorkerDied
from sluice.experiments.run import Progress
from sluice.experiments.tables import accuracy_run
from sluice.experiments.tables.accuracy import take_stock
from sluice.experiments.tables.accuracy_cells import Plan, PlannedCell, plan_cells
from sluice.experiments.tables.accuracy_jobs import run_cells
from sluice.experiments.tables.accuracy_results import SourceState, result_path, source_state, store_result
from sluice.experiments.tables.accuracy_run import Conditions, Outcome, forget_cell, run_cell, run_folder

RELEASES = 4
SMALL = {"releases": RELEASES, "batch_size": 64}


def small_plan(methods="dpsgd", seeds=(0,), **changes: Any) -> Plan:
    return plan_cells(
        datasets=["digits"],
        methods=methods.split(","),
        epsilons=[3.0],
        seeds=seeds,
        overrides={**SMALL, **changes},
        tag="small",
    )


def conditions(folder: Path, **changes: Any) -> Conditions:
    source = SourceState(commit="abc", dirty=False)
    return replace(Conditions(results=folder / "results", work=folder / "work", source=source), **changes)


def interrupted(planned: PlannedCell, where: Conditions, *, at: int) -> None:
    def stop(progress: Progress) -> None:
        if progress.release == at:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_cell(planned, where, stop)


def test_a_result_says_what_was_run_what_is_proved_and_what_is_claimed(tmp_path):
    where = conditions(tmp_path)
    plan = small_plan("dpsr-cg")
    outcome = run_cell(plan.cells[0], where)
    stored = json.loads(result_path(where.results, plan.cells[0].cell).read_text())
    assert stored == outcome.result
    assert stored["settings"] == plan.cells[0].settings.to_dict()
    assert stored["mechanism"]["releases"] == stored["releases"] == RELEASES
    assert 0 < stored["test_accuracy"] <= 1
    assert stored["target_epsilon"] == 3.0
    assert 2.9 < stored["epsilon"] <= 3.0
    proved = {figure["label"]: figure["value"] for figure in stored["figures"] if figure["proved"]}
    assert proved["pld"] == stored["epsilon"]
    assert set(proved) == {"pld", "rdp"}
    assert {figure["label"] for figure in stored["figures"] if not figure["proved"]} == {"claimed (paper)"}
    assert (stored["commit"], stored["dirty"], stored["earlier_sources"]) == ("abc", False, [])
    assert stored["libraries"]["torch"] == torch.__version__
    assert stored["threads"] == torch.get_num_threads()
    assert stored["seed"] == 0
    assert stored["wall_seconds"] > 0
    assert not {"attempts", "data_passes_per_release"} & set(stored)
    assert not run_folder(where.work, plan.cells[0]).exists()


def test_what_is_only_claimed_has_no_epsilon(tmp_path):
    outcome = run_cell(small_plan("dpsr-cg-paper").cells[0], conditions(tmp_path))
    assert outcome.result is not None
    assert outcome.result["epsilon"] is None
    assert outcome.result["target_epsilon"] is None
    assert not any(figure["proved"] for figure in outcome.result["figures"])
    assert "un-noised" in outcome.result["unproved_because"]


def test_an_interrupted_cell_goes_on_where_it_was_and_ends_the_same(tmp_path):
    (planned,) = small_plan().cells
    undisturbed = run_cell(planned, conditions(tmp_path / "a")).result
    where = conditions(tmp_path / "b")
    interrupted(planned, where, at=3)
    assert not result_path(where.results, planned.cell).exists()
    seen: list[int] = []
    later = replace(where, source=SourceState(commit="def", dirty=True))
    resumed = run_cell(planned, later, lambda progress: seen.append(progress.release)).result
    assert seen == [4], "the first three releases are not made again"
    assert undisturbed is not None
    assert resumed is not None
    for key in ("test_accuracy", "epsilon", "mechanism", "figures", "releases", "settings"):
        assert resumed[key] == undisturbed[key]
    assert (undisturbed["sittings"], resumed["sittings"]) == (1, 2)
    assert (resumed["commit"], resumed["earlier_sources"]) == ("def", [{"commit": "abc", "dirty": False}])
    assert not run_folder(where.work, planned).exists()


def test_a_cell_that_ended_but_was_not_stored_is_not_run_again(tmp_path, monkeypatch):
    (planned,) = small_plan().cells
    where = conditions(tmp_path)

    def full(*arguments: object) -> None:
        raise DataError("cannot write: no space left")

    with monkeypatch.context() as patch:
        patch.setattr("sluice.experiments.tables.accuracy_run.store_result", full)
        assert run_cell(planned, where).failure == "cannot write: no space left"
    seen: list[Progress] = []
    outcome = run_cell(planned, where, seen.append)
    assert outcome.result is not None
    assert outcome.result["releases"] == RELEASES
    assert seen == []


def test_other_settings_have_another_folder_and_are_not_taken_for_these(tmp_path):
    (planned,) = small_plan("non-private").cells
    (other,) = small_plan("non-private", lr=0.4).cells
    assert planned.cell == other.cell
    assert run_folder(tmp_path, planned) != run_folder(tmp_path, other)
    where = conditions(tmp_path)
    run_cell(planned, where)
    stock = take_stock(small_plan("non-private", lr=0.4), where.results)
    assert stock.results == {}
    assert stock.open == (other,)
    assert stock.remarks == (f"{result_path(where.results, planned.cell)} was made with other settings (lr)",)
    assert take_stock(small_plan("non-private"), where.results).open == ()


def test_a_setting_that_is_younger_than_the_result_had_its_default(tmp_path):
    plan = small_plan("non-private")
    where = conditions(tmp_path)
    result = run_cell(plan.cells[0], where).result
    assert result is not None
    del result["settings"]["reference_decay"]
    store_result(where.results, plan.cells[0].cell, result)
    assert take_stock(plan, where.results).open == ()
    result["settings"]["no_longer_there"] = 1
    store_result(where.results, plan.cells[0].cell, result)
    assert "of another version" in take_stock(plan, where.results).remarks[0]


@pytest.mark.parametrize(("content", "message"), [("{", "not strict JSON"), ("{}", "lacks settings"), ("[]", "lacks")])
def test_a_damaged_result_is_named(tmp_path, content, message):
    plan = small_plan("non-private")
    path = result_path(tmp_path, plan.cells[0].cell)
    path.write_text(content)
    with pytest.raises(DataError, match=message):
        take_stock(plan, tmp_path)


def test_forgetting_a_cell_leaves_nothing_of_it(tmp_path):
    (planned,) = small_plan().cells
    where = conditions(tmp_path)
    interrupted(planned, where, at=1)
    store_result(where.results, planned.cell, {})
    forget_cell(where, planned)
    assert not result_path(where.results, planned.cell).exists()
    assert not run_folder(where.work, planned).exists()
    forget_cell(where, planned)


def test_a_cell_that_fails_does_not_stop_the_others(tmp_path):
    cells = [*small_plan("non-private", features="bag-of-words").cells, *small_plan("non-private", (1,)).cells]
    failed, done = run_cells(cells, conditions(tmp_path))
    assert failed.result is None
    assert "bag-of-words" in failed.failure
    assert done.result is not None


def test_threads_are_those_asked_for_and_left_as_they_were(tmp_path, monkeypatch):
    (planned,) = small_plan("non-private").cells
    before = torch.get_num_threads()
    outcome = run_cell(planned, conditions(tmp_path, threads=before + 1))
    assert outcome.result is not None
    assert outcome.result["threads"] == before + 1
    assert torch.get_num_threads() == before


def summary(outcomes: list[Outcome]) -> dict[int, float]:
    return {outcome.cell.seed: outcome.result["test_accuracy"] for outcome in outcomes if outcome.result is not None}


def same_as_alone(plan: Plan, folder: Path, *, backend: str) -> None:
    alone = list(run_cells(plan.cells, conditions(folder / "a", threads=1)))
    where = conditions(folder / "b", threads=1)
    together = list(run_cells(plan.cells, where, options=JobOptions(backend=backend, jobs=2)))
    assert len(summary(together)) == len(plan.cells)
    assert summary(together) == summary(alone)
    assert take_stock(plan, where.results).open == ()


class Threads:
    """A backend whose workers are threads of this process."""

    def __init__(self, width: int | None) -> None:
        self.width = width
        self._executor = ThreadPoolExecutor(3)

    def submit(self, function: Callable[[Any], Any], item: Any) -> Future[Any]:
        return self._executor.submit(function, item)

    def wait(self, handles: Collection[Future[Any]]) -> Collection[Future[Any]]:
        return wait(handles, return_when=FIRST_COMPLETED).done

    def result(self, handle: Future[Any]) -> Any:
        return handle.result()


def test_cells_in_threads_of_one_process_take_turns(tmp_path, monkeypatch):
    running, most = 0, 0

    def run(planned: PlannedCell, *others: object) -> dict[str, Any]:
        nonlocal running, most
        running += 1
        most = max(most, running)
        time.sleep(0.05)
        running -= 1
        return {"seed": planned.cell.seed}

    monkeypatch.setattr("sluice.experiments.tables.accuracy_run._run", run)
    monkeypatch.setattr(jobs, "_opened", lambda options: nullcontext(Threads(None)))
    cells = small_plan("non-private", (0, 1, 2)).cells
    outcomes = list(run_cells(cells, conditions(tmp_path), options=JobOptions(jobs=3)))
    assert sorted(outcome.result["seed"] for outcome in outcomes if outcome.result) == [0, 1, 2]
    assert most == 1


def test_results_of_a_worker_with_a_disk_of_its_own_are_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(jobs, "_opened", lambda options: nullcontext(Threads(1)))
    monkeypatch.setattr("sluice.experiments.tables.accuracy_run.store_result", lambda *arguments: None)
    plan, where = small_plan("non-private"), conditions(tmp_path)
    list(run_cells(plan.cells, where, options=JobOptions(backend="dask")))
    assert take_stock(plan, where.results).open == ()


def test_a_result_that_was_stored_but_not_handed_over_is_not_made_again(tmp_path, monkeypatch):
    plan, where = small_plan("non-private"), conditions(tmp_path)
    stored = run_cell(plan.cells[0], where)
    monkeypatch.setattr(jobs, "_opened", lambda options: nullcontext(Threads(1)))
    monkeypatch.setattr("sluice.experiments.tables.accuracy_run._run", lambda *arguments: pytest.fail("run again"))
    assert list(run_cells(plan.cells, where, options=JobOptions(jobs=2))) == [stored]


def test_a_cell_whose_workers_all_died_is_a_failed_cell(tmp_path, monkeypatch):
    class Dying(Threads):
        def result(self, handle: Future[Any]) -> Any:
            raise WorkerDied("out of memory")

    monkeypatch.setattr(jobs, "_opened", lambda options: nullcontext(Dying(1)))
    monkeypatch.setattr("sluice.experiments.tables.accuracy_run._run", lambda *arguments: {})
    (planned,) = small_plan("non-private").cells
    (outcome,) = run_cells([planned], conditions(tmp_path), options=JobOptions(jobs=2, retries=1))
    assert outcome == Outcome(cell=planned.cell, failure="its worker died 2 times: out of memory")


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # a cluster's own threads and sockets end when they like
def test_a_dask_worker_killed_in_the_middle_of_a_cell_costs_a_part_of_that_cell(tmp_path):
    """The others are not disturbed, and the cell is resumed where its last checkpoint is, by another process."""
    pytest.importorskip("distributed")
    plan = small_plan("dpsgd", (0, 1, 2), releases=150)
    alone = list(run_cells(plan.cells, conditions(tmp_path / "a", threads=1)))
    where = conditions(tmp_path / "b", threads=1)
    victim = run_folder(where.work, plan.cells[1]) / "run" / "private"
    killed: list[int] = []

    def kill() -> None:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and not killed:
            if list(victim.glob("checkpoints/*")):
                holder = int((victim / "lock").read_text())
                os.kill(holder, signal.SIGKILL)
                killed.append(holder)
            time.sleep(0.005)

    hunter = threading.Thread(target=kill)
    hunter.start()
    together = list(run_cells(plan.cells, where, options=JobOptions(backend="dask", jobs=2)))
    hunter.join()
    assert killed
    assert killed[0] != os.getpid()
    assert summary(together) == summary(alone)
    sittings = {outcome.cell.seed: outcome.result["sittings"] for outcome in together if outcome.result is not None}
    assert sittings == {0: 1, 1: 2, 2: 1}


@pytest.mark.slow
def test_processes_give_the_same_results(tmp_path):
    same_as_alone(small_plan("non-private", (0, 1)), tmp_path, backend="joblib")


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # a cluster's own threads and sockets end when they like
def test_a_dask_cluster_gives_the_same_results(tmp_path):
    pytest.importorskip("distributed")
    same_as_alone(small_plan("non-private", (0, 1)), tmp_path, backend="dask")


def test_the_source_is_that_of_the_package():
    state = source_state()
    if state.commit is None:
        pytest.skip("the package is not in a repository here")
    assert len(state.commit) == 40
    assert isinstance(state.dirty, bool)


@pytest.mark.parametrize("dataset", ["mnist", "fashion-mnist", "imdb"])
def test_the_data_of_a_cell_depends_on_its_own_settings_alone(dataset, monkeypatch, tmp_path):
    """Not on the recipe of the data set, which may be about other features altogether."""
    seen = []
    monkeypatch.setattr(accuracy_run, "prepare", lambda settings, **_: seen.append(settings))
    accuracy_run._splits(dataset, "plain", "linear", tmp_path)
    (settings,) = seen
    assert (settings.dataset, settings.features, settings.model) == (dataset, "plain", "linear")
    assert settings.mean_noise is None
