"""``sluice reproduce selection``: run the cells of the study that have no result, show and write the table."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import typer

from sluice._base.files import cache_dir
from sluice.cli.output import print_json, print_table
from sluice.cli.reproduce_accuracy import numbers_of, run_open, words_of
from sluice.experiments.jobs import JobOptions
from sluice.experiments.tables.accuracy import take_stock
from sluice.experiments.tables.accuracy_results import source_state
from sluice.experiments.tables.accuracy_run import Conditions, forget_cell
from sluice.experiments.tables.inclusion import inclusion_markdown, run_inclusion, stored_inclusion
from sluice.experiments.tables.selection import selection_lines, stored_lines, write_selection
from sluice.experiments.tables.selection_cells import ARMS, plan_selection
from sluice.experiments.tables.selection_texts import COLUMNS, block_title, blocks, cells_of


@dataclass(frozen=True, kw_only=True)
class SelectionRequest:
    """The command line as it was typed."""

    datasets: tuple[str, ...]
    epsilons: tuple[str, ...]
    arms: tuple[str, ...]
    regimes: tuple[str, ...]
    seeds: tuple[str, ...]
    results: Path
    work: Path | None
    data_dir: Path | None
    again: bool
    no_run: bool
    inclusion: bool
    options: JobOptions
    threads: int | None
    as_json: bool


def reproduce_selection(request: SelectionRequest) -> None:
    """Run the command."""
    plan = plan_selection(
        datasets=words_of(request.datasets),
        epsilons=numbers_of("epsilons", request.epsilons, float),
        arms=words_of(request.arms) or list(ARMS),
        regimes=words_of(request.regimes),
        seeds=numbers_of("seeds", request.seeds, int),
    )
    conditions = Conditions(
        results=request.results.absolute(),
        work=(request.work or cache_dir() / "selection").absolute(),
        data_dir=None if request.data_dir is None else request.data_dir.absolute(),
        threads=request.threads,
        source=source_state(),
    )
    if request.again:
        for planned in plan.cells:
            forget_cell(conditions, planned)
    failures = {}
    if not request.no_run:
        for outcome in run_open(request, plan, take_stock(plan, request.results), conditions):
            if outcome.result is None:
                failures[outcome.cell.title] = outcome.failure
        if request.inclusion:
            for dataset in words_of(request.datasets):
                for epsilon in numbers_of("epsilons", request.epsilons, float):
                    run_inclusion(request.results, dataset, epsilon, data_dir=request.data_dir)
    lines = selection_lines(stored_lines(request.results))
    inclusion = inclusion_markdown(stored_inclusion(request.results))
    files = write_selection(lines, request.results, inclusion=inclusion)
    if request.as_json:
        print_json(
            {
                "lines": [line.as_dict() for line in lines],
                "failed": failures,
                "files": {kind: str(path) for kind, path in files.items()},
            }
        )
    else:
        for key, members in blocks(lines):
            print_table(COLUMNS, map(cells_of, members), title=block_title(*key))
            typer.echo()
        typer.echo(f"Written: {', '.join(map(str, files.values()))}")
    if failures:
        raise typer.Exit(1)
