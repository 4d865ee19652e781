"""Running one cell of the accuracy table: `sluice train`'s own code, in a folder that an interruption leaves behind."""

from __future__ import annotations

import json
import platform
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

import torch

from sluice import __version__
from sluice._base import codec
from sluice._base.errors import SluiceError
from sluice._base.files import parse_json, read_bytes, write_atomically
from sluice.data import DataSplits
from sluice.experiments.preparing import prepare
from sluice.experiments.run import Progress, Training, TrainResult, recorded_run
from sluice.experiments.settings import TrainSettings
from sluice.experiments.tables.accuracy_cells import Cell, PlannedCell
from sluice.experiments.tables.accuracy_results import SourceState, store_result
from sluice.experiments.tables.spoiling import spoiled
from sluice.methods import method_of
from sluice.runs.folder import configuration_hash, may_begin

_LIBRARIES = ("torch", "numpy", "scipy", "dp-accounting")
_SECONDS_BETWEEN_NOTES = 5.0
_CHECKPOINTS = 20  # an interrupted cell repeats a twentieth at most; more of them took up to a tenth of its time

#: What ends a cell without ending the others. Anything else is a mistake in the program and stops the command.
_FAILURES = (SluiceError, RuntimeError, ValueError, ArithmeticError, OSError)

# Seeding and the number of threads belong to the process, so one process, whose workers may be threads, runs one cell.
_one_at_a_time = threading.Lock()


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """How cells are run: none of it is part of a cell.

    Attributes:
        results: where results are stored.
        work: where run folders of unfinished cells are kept.
        threads: of PyTorch in each job; None leaves its own choice.
        source: the code that runs.
    """

    results: Path
    work: Path
    data_dir: Path | None = None
    threads: int | None = None
    source: SourceState


class Watcher(Protocol):
    """A study of one cell's run, which it must leave as it is."""

    def observe_attempt(self, attempt: Any, /) -> None: ...

    def result(self, run: Path, /) -> dict[str, Any]:
        """What it found, for the cell's result, from the folder of the finished run."""


Watch = Callable[[PlannedCell, Path], Watcher]
"""From a cell and the folder that it is run in to what watches it."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of a cell: a result, or why there is none."""

    cell: Cell
    result: dict[str, Any] | None = None
    failure: str = ""


def run_cell(
    planned: PlannedCell,
    conditions: Conditions,
    report: Callable[[Progress], None] | None = None,
    watch: Watch | None = None,
) -> Outcome:
    """Run a cell, or resume it where an earlier command left off, and store its result.

    Guarantee:
        None: runs are seeded and results hold wall times. For experiments on public data.
    """
    try:
        with _one_at_a_time, _threads(conditions.threads):
            result = _run(planned, conditions, report or (lambda progress: None), watch)
    except _FAILURES as error:
        kind = "" if isinstance(error, SluiceError) else f"{type(error).__name__}: "
        return Outcome(cell=planned.cell, failure=f"{kind}{error}")
    return Outcome(cell=planned.cell, result=result)


def run_folder(work: Path, planned: PlannedCell) -> Path:
    """Where a cell is run: other settings, another folder."""
    return work / f"{planned.cell.name}-{configuration_hash(planned.settings.to_dict())[:12]}"


def forget_cell(conditions: Conditions, planned: PlannedCell) -> None:
    """Remove the result of a cell, and what is there of an unfinished run."""
    (conditions.results / f"{planned.cell.name}.json").unlink(missing_ok=True)
    folder = run_folder(conditions.work, planned)
    if folder.exists():
        shutil.rmtree(folder)


def _run(
    planned: PlannedCell, conditions: Conditions, report: Callable[[Progress], None], watch: Watch | None
) -> dict[str, Any]:
    folder = run_folder(conditions.work, planned)
    folder.mkdir(parents=True, exist_ok=True)
    clock = _Clock(folder / "clock.json", conditions.source)

    def note(progress: Progress) -> None:
        clock.note()
        report(progress)

    watcher = None if watch is None else watch(planned, folder)
    trained = _train(planned, folder / "run", conditions.data_dir, note, watcher)
    found = {} if watcher is None else watcher.result(folder / "run")
    result = {**_description(planned, trained), **found, **clock.read(), **_surroundings()}
    store_result(conditions.results, planned.cell, result)
    shutil.rmtree(folder)
    return result


def _train(
    planned: PlannedCell,
    path: Path,
    data_dir: Path | None,
    report: Callable[[Progress], None],
    watcher: Watcher | None,
) -> TrainResult:
    settings = planned.settings
    splits = spoiled(_splits(settings.dataset, settings.features, settings.model, data_dir), planned.spoiling)
    training = partial(
        Training,
        settings=settings,
        splits=splits,
        checkpoint_every=max(1, settings.releases // _CHECKPOINTS),
        report=report,
        observe_attempt=None if watcher is None else watcher.observe_attempt,
    )
    if may_begin(path):
        return training().start(path)
    recorded = recorded_run(path)
    if recorded.result is not None:
        return recorded.result
    return training(mechanism=recorded.mechanism).resume(path)


@lru_cache(maxsize=1)
def _splits(dataset: str, features: str, model: str, data_dir: Path | None) -> DataSplits:
    """Cells that follow one another mostly share their data, which takes longer to prepare than a small cell to run."""
    seen = TrainSettings(dataset=dataset, features=features, model=model)
    return prepare(seen, data_dir=data_dir, show_progress=False)


def _description(planned: PlannedCell, trained: TrainResult) -> dict[str, Any]:
    settings, cell = planned.settings, planned.cell
    figures = trained.mechanism.report(delta=trained.delta)
    return {
        "dataset": cell.dataset,
        "method": cell.method,
        "variant": cell.variant,
        "seed": cell.seed,
        "test_accuracy": trained.test_accuracy,
        "epsilon": None if trained.epsilon is None else codec.encode_float(trained.epsilon),
        "accountant": trained.accountant,
        "delta": trained.delta,
        "target_epsilon": method_of(settings.method).target(settings),
        "unproved_because": trained.mechanism.unproved_because,
        "figures": [
            {
                "label": figure.accountant,
                "value": codec.encode_float(figure.value),
                "proved": figure.guaranteed,
                "meaning": figure.meaning,
            }
            for figure in figures
        ],
        "releases": trained.releases,
        "notes": list(trained.notes),
        "settings": settings.to_dict(),
        "mechanism": trained.mechanism.to_dict(),
    }


def _surroundings() -> dict[str, Any]:
    return {
        "threads": torch.get_num_threads(),
        "version": __version__,
        "python": platform.python_version(),
        "libraries": {name: version(name) for name in _LIBRARIES},
    }


class _Clock:
    """Wall time and commits of a cell, over all the sittings that it took."""

    def __init__(self, path: Path, source: SourceState) -> None:
        self._path = path
        self._began = self._noted = time.monotonic()
        self._earlier = 0.0
        self._sittings = 1
        self._sources: list[dict[str, Any]] = []
        if path.exists():
            found = parse_json(read_bytes(path), what=str(path))
            self._earlier, self._sittings = found["wall_seconds"], found["sittings"] + 1
            self._sources = [*found["earlier_sources"], {"commit": found["commit"], "dirty": found["dirty"]}]
        self._source = {"commit": source.commit, "dirty": source.dirty}
        self._sources = [earlier for earlier in self._sources if earlier != self._source]
        self._write()

    def note(self) -> None:
        """Write the time down now and then, so that a kill loses seconds of it."""
        if time.monotonic() - self._noted > _SECONDS_BETWEEN_NOTES:
            self._noted = time.monotonic()
            self._write()

    def read(self) -> dict[str, Any]:
        seconds = self._earlier + time.monotonic() - self._began
        return {
            **self._source,
            "earlier_sources": self._sources,
            "wall_seconds": round(seconds, 3),
            "sittings": self._sittings,
        }

    def _write(self) -> None:
        write_atomically(self._path, (json.dumps(self.read()) + "\n").encode("ascii"), public=True)


@contextmanager
def _threads(wanted: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    if wanted is not None:
        torch.set_num_threads(wanted)
    try:
        yield
    finally:
        torch.set_num_threads(before)
