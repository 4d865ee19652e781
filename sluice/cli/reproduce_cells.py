"""What every table of training runs does: run the cells that have no result, and say on standard error how far that is."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import typer
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from sluice._base.errors import InputError
from sluice._base.files import cache_dir
from sluice._base.interrupts import sigterm_as_interrupt
from sluice._base.progress import terminal_bar
from sluice.cli.job_options import CellFlags
from sluice.experiments.run import Progress
from sluice.experiments.tables.accuracy import Stock, take_stock
from sluice.experiments.tables.accuracy_cells import Cell, Plan, PlannedCell
from sluice.experiments.tables.accuracy_jobs import run_cells
from sluice.experiments.tables.accuracy_results import source_state
from sluice.experiments.tables.accuracy_run import Conditions, Outcome, Watch, forget_cell

Number = TypeVar("Number", int, float)


@dataclass(frozen=True, kw_only=True)
class Finished:
    """What is there of a plan's cells after a command has run: results, of which some were stored before, and failures."""

    found: Mapping[Cell, Mapping[str, Any]]
    failures: Mapping[Cell, str]
    reused: int

    @property
    def failed(self) -> dict[str, str]:
        """The failures by the titles of their cells."""
        return {cell.title: failure for cell, failure in self.failures.items()}


def finish_cells(
    plan: Plan,
    flags: CellFlags,
    *,
    results: Path,
    cache: str = "accuracy",
    watch: Watch | None = None,
    lacks: Callable[[Mapping[str, Any]], str] = lambda result: "",
) -> Finished:
    """Run the cells that have no result, and give all results.

    Args:
        results: the folder of the stored results.
        cache: the folder in the user's cache for unfinished cells, if none is given.
        watch: makes what watches a cell's run, and adds to its result.
        lacks: says what a stored result lacks, so that its cell is run again; "" for nothing.
    """
    conditions = Conditions(
        results=results.absolute(),
        work=(flags.work or cache_dir() / cache).absolute(),
        data_dir=None if flags.data_dir is None else flags.data_dir.absolute(),
        threads=flags.threads,
        source=source_state(),
    )
    if flags.again:
        for planned in plan.cells:
            forget_cell(conditions, planned)
    stock = take_stock(plan, results, lacks=lacks)
    failures: dict[Cell, str] = {}
    found = dict(stock.results)
    if not flags.no_run:
        for outcome in _run_open(plan, stock, conditions, flags, watch):
            if outcome.result is None:
                failures[outcome.cell] = outcome.failure
            else:
                found[outcome.cell] = outcome.result
    return Finished(found=found, failures=failures, reused=len(stock.results))


def check_flags(flags: CellFlags) -> None:
    """Refuse threads that this machine does not have, and to run every cell and none."""
    processors = os.cpu_count() or 1
    if flags.threads is not None and flags.jobs.address is None and not 1 <= flags.threads <= processors:
        raise InputError(
            f"threads={flags.threads} is not allowed: it must be from 1 to {processors}, the processors here."
        )
    if flags.again and flags.no_run:
        raise InputError("again and no-run cannot be given together: one runs every cell, the other none.")


def words_of(given: tuple[str, ...]) -> list[str]:
    """Words that were typed one by one or separated by commas."""
    return [word.strip() for text in given for word in text.split(",") if word.strip()]


def numbers_of(name: str, given: tuple[str, ...], kind: Callable[[str], Number]) -> list[Number]:
    """The same for numbers, each once."""
    numbers = []
    for word in words_of(given):
        try:
            numbers.append(kind(word))
        except ValueError:
            wanted = "integers" if kind is int else "numbers"
            raise InputError(f"{name}={word!r} is not allowed: it must be {wanted}, separated by commas.") from None
    return list(dict.fromkeys(numbers))


def print_files(files: Mapping[str, Path]) -> None:
    """Say what was written."""
    typer.echo(f"Written: {', '.join(map(str, files.values()))}")


def _run_open(
    plan: Plan, stock: Stock, conditions: Conditions, flags: CellFlags, watch: Watch | None
) -> Iterator[Outcome]:
    screen = _Screen(total=len(stock.open), quiet=flags.as_json)
    for remark in stock.remarks:
        screen.say(f"{remark}: it is run again.")
    for (dataset, row), reason in plan.left_out.items():
        screen.say(f"{dataset}, {row} is left out: {reason}")
    screen.say(f"{len(stock.results)} of {len(plan.cells)} cells are stored, {len(stock.open)} to run.")
    ended = 0
    options = flags.jobs.options()
    try:
        with sigterm_as_interrupt(), screen.shown():
            for outcome in run_cells(stock.open, conditions, options=options, report=screen.report, watch=watch):
                ended += 1
                screen.ended(outcome, ended)
                yield outcome
    except KeyboardInterrupt:
        screen.say(
            f"interrupted: {ended} of {len(stock.open)} cells ended and stored. To resume, run the same command"
            f"{' without --again' if flags.again else ''}."
        )
        raise typer.Exit(130) from None


class _Screen:
    """Progress on standard error: a bar on a terminal, a line for each cell elsewhere."""

    def __init__(self, *, total: int, quiet: bool) -> None:
        self._total = total
        self._quiet = quiet
        self._bar: Bar | None = None
        self._cells: TaskID | None = None
        self._releases: TaskID | None = None

    def say(self, text: str) -> None:
        if self._bar is not None:
            self._bar.console.print(f"sluice: {text}", highlight=False, markup=False)
        elif not self._quiet:
            typer.echo(f"sluice: {text}", err=True)

    @contextmanager
    def shown(self) -> Iterator[None]:
        if self._quiet or not self._total:
            yield
            return
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with terminal_bar(*columns) as self._bar:
            if self._bar is not None:
                self._cells = self._bar.add_task("cells", total=self._total)
            yield
        self._bar = None

    def report(self, planned: PlannedCell, progress: Progress) -> None:
        if self._bar is None:
            return
        if self._releases is None:
            self._releases = self._bar.add_task("")
        title = f"releases of {planned.cell.title}"
        self._bar.update(self._releases, description=title, completed=progress.release, total=progress.releases)

    def ended(self, outcome: Outcome, number: int) -> None:
        if outcome.result is None:
            text = f"failed: {outcome.failure}"
        else:
            text = f"{100 * outcome.result['test_accuracy']:.2f} % in {outcome.result['wall_seconds']:.0f} s"
        self.say(f"cell {number} of {self._total}: {outcome.cell.title}: {text}")
        if self._bar is not None and self._cells is not None:
            self._bar.update(self._cells, completed=number)
