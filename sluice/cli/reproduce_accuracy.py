"""``sluice reproduce accuracy``: plan the cells, run those that have no result, show and write the table."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import typer
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from sluice._base.errors import InputError
from sluice._base.files import cache_dir
from sluice._base.interrupts import sigterm_as_interrupt
from sluice._base.progress import terminal_bar
from sluice.cli.output import print_json, print_table
from sluice.experiments.jobs import JobOptions
from sluice.experiments.run import Progress
from sluice.experiments.tables.accuracy import Stock, take_stock, write_table
from sluice.experiments.tables.accuracy_cells import Cell, Plan, PlannedCell, parse_overrides, plan_cells
from sluice.experiments.tables.accuracy_jobs import run_cells
from sluice.experiments.tables.accuracy_results import source_state
from sluice.experiments.tables.accuracy_run import Conditions, Outcome, Watch, forget_cell
from sluice.experiments.tables.accuracy_table import Line, table_lines
from sluice.experiments.tables.accuracy_tables import AccuracyTable
from sluice.experiments.tables.accuracy_texts import COLUMNS, below_the_printed, block_title, blocks, cells_of

Number = TypeVar("Number", int, float)


@dataclass(frozen=True, kw_only=True)
class Request:
    """The command line as it was typed."""

    table: AccuracyTable
    datasets: tuple[str, ...]
    methods: tuple[str, ...]
    epsilons: tuple[str, ...]
    seeds: tuple[str, ...]
    changes: tuple[str, ...]
    tag: str
    results: Path
    work: Path | None
    data_dir: Path | None
    output: Path | None
    again: bool
    no_run: bool
    threads: int | None
    options: JobOptions
    as_json: bool


def reproduce_accuracy(request: Request) -> None:
    """Run the command."""
    epsilons = numbers_of("epsilons", request.epsilons, float)
    plan = plan_cells(
        datasets=words_of(request.datasets),
        methods=words_of(request.methods),
        epsilons=epsilons,
        seeds=numbers_of("seeds", request.seeds, int),
        recipe=request.table.recipe,
        overrides=parse_overrides(request.changes),
        tag=request.tag,
    )
    finished = finish_cells(request, plan)
    lines = table_lines(
        plan, finished.found, epsilons=epsilons, failures=finished.failures, printed=request.table.printed
    )
    files = write_table(lines, request.output or request.results / "table", request.table)
    if request.as_json:
        print_json(_as_json(plan, lines, files, finished))
    else:
        _print(lines, files)
    if finished.failures:
        raise typer.Exit(1)


@dataclass(frozen=True, kw_only=True)
class Finished:
    """What is there of a plan's cells after a command has run: results, of which some were stored before, and failures."""

    found: Mapping[Cell, Mapping[str, Any]]
    failures: Mapping[Cell, str]
    reused: int


def finish_cells(
    request: Request,
    plan: Plan,
    *,
    watch: Watch | None = None,
    lacks: Callable[[Mapping[str, Any]], str] = lambda result: "",
) -> Finished:
    """Run the cells that have no result, and give all results.

    Args:
        watch: makes what watches a cell's run, and adds to its result.
        lacks: says what a stored result lacks, so that its cell is run again; "" for nothing.
    """
    _check(request)
    conditions = Conditions(
        results=request.results.absolute(),
        work=(request.work or cache_dir() / "accuracy").absolute(),
        data_dir=None if request.data_dir is None else request.data_dir.absolute(),
        threads=request.threads,
        source=source_state(),
    )
    if request.again:
        for planned in plan.cells:
            forget_cell(conditions, planned)
    stock = take_stock(plan, request.results, lacks=lacks)
    failures: dict[Cell, str] = {}
    found = dict(stock.results)
    if not request.no_run:
        for outcome in run_open(request, plan, stock, conditions, watch):
            if outcome.result is None:
                failures[outcome.cell] = outcome.failure
            else:
                found[outcome.cell] = outcome.result
    return Finished(found=found, failures=failures, reused=len(stock.results))


def _check(request: Request) -> None:
    processors = os.cpu_count() or 1
    if request.threads is not None and request.options.address is None and not 1 <= request.threads <= processors:
        raise InputError(
            f"threads={request.threads} is not allowed: it must be from 1 to {processors}, the processors here."
        )
    if request.again and request.no_run:
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


class HowToRun(Protocol):
    """What running cells needs of a command line."""

    @property
    def again(self) -> bool: ...

    @property
    def options(self) -> JobOptions: ...

    @property
    def as_json(self) -> bool: ...


def run_open(
    request: HowToRun, plan: Plan, stock: Stock, conditions: Conditions, watch: Watch | None = None
) -> Iterator[Outcome]:
    """Run the cells that have no result, and say on standard error how far that is."""
    screen = _Screen(total=len(stock.open), quiet=request.as_json)
    for remark in stock.remarks:
        screen.say(f"{remark}: it is run again.")
    for (dataset, row), reason in plan.left_out.items():
        screen.say(f"{dataset}, {row} is left out: {reason}")
    screen.say(f"{len(stock.results)} of {len(plan.cells)} cells are stored, {len(stock.open)} to run.")
    ended = 0
    try:
        with sigterm_as_interrupt(), screen.shown():
            for outcome in run_cells(
                stock.open, conditions, options=request.options, report=screen.report, watch=watch
            ):
                ended += 1
                screen.ended(outcome, ended)
                yield outcome
    except KeyboardInterrupt:
        screen.say(
            f"interrupted: {ended} of {len(stock.open)} cells ended and stored. To resume, run the same command"
            f"{' without --again' if request.again else ''}."
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


def _print(lines: list[Line], files: Mapping[str, Path]) -> None:
    for dataset, heading, members in blocks(lines):
        print_table(COLUMNS, map(cells_of, members), title=block_title(dataset, heading, members))
        typer.echo()
    for text in below_the_printed(lines):
        typer.echo(f"Below the printed number: {text}")
    typer.echo(
        "Every epsilon here is proved; what is claimed is not a guarantee. Noise was seeded: for experiments only."
    )
    typer.echo(f"Written: {', '.join(map(str, files.values()))}")


def _as_json(plan: Plan, lines: list[Line], files: Mapping[str, Path], finished: Finished) -> dict[str, Any]:
    return {
        "lines": [
            {
                **asdict(line),
                "mean": line.mean,
                "deviation": line.deviation,
                "difference": line.difference,
                "why_below": line.reason,
            }
            for line in lines
        ],
        "cells": len(plan.cells),
        "stored": len(finished.found),
        "reused": finished.reused,
        "failed": {cell.title: failure for cell, failure in finished.failures.items()},
        "left_out": {f"{dataset}, {row}": reason for (dataset, row), reason in plan.left_out.items()},
        "files": {kind: str(path) for kind, path in files.items()},
    }
