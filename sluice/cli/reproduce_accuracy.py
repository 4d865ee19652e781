"""``sluice reproduce accuracy``: plan the cells, run those that have no result, show and write the table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import typer

from sluice._base import validate
from sluice.cli.output import print_json, print_table
from sluice.cli.reproduce_cells import Finished, check_flags, finish_cells, numbers_of, print_files, words_of
from sluice.cli.reproduce_options import AccuracyOptions
from sluice.experiments.tables.accuracy import write_table
from sluice.experiments.tables.accuracy_cells import Plan, parse_overrides, plan_cells
from sluice.experiments.tables.accuracy_table import Line, table_lines
from sluice.experiments.tables.accuracy_tables import TABLES
from sluice.experiments.tables.accuracy_texts import COLUMNS, below_the_printed, block_title, blocks, cells_of


def reproduce_accuracy(options: AccuracyOptions) -> None:
    """Run the command."""
    validate.one_of(TABLES, table=options.table)
    table = TABLES[options.table]
    results = options.results or table.results
    epsilons = numbers_of("epsilons", options.epsilons or table.epsilons, float)
    plan = plan_cells(
        datasets=words_of(options.datasets or table.datasets),
        methods=words_of(options.methods or table.methods),
        epsilons=epsilons,
        seeds=numbers_of("seeds", options.seeds or table.seeds, int),
        recipe=table.recipe,
        overrides=parse_overrides(options.change),
        tag=options.tag,
    )
    check_flags(options.cells)
    finished = finish_cells(plan, options.cells, results=results)
    lines = table_lines(plan, finished.found, epsilons=epsilons, failures=finished.failures, printed=table.printed)
    files = write_table(lines, options.output or results / "table", table)
    if options.cells.as_json:
        print_json(_as_json(plan, lines, files, finished))
    else:
        _print(lines, files)
    if finished.failures:
        raise typer.Exit(1)


def _print(lines: list[Line], files: Mapping[str, Path]) -> None:
    for dataset, heading, members in blocks(lines):
        print_table(COLUMNS, map(cells_of, members), title=block_title(dataset, heading, members))
        typer.echo()
    for text in below_the_printed(lines):
        typer.echo(f"Below the printed number: {text}")
    typer.echo(
        "Every epsilon here is proved; what is claimed is not a guarantee. Noise was seeded: for experiments only."
    )
    print_files(files)


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
        "failed": finished.failed,
        "left_out": {f"{dataset}, {row}": reason for (dataset, row), reason in plan.left_out.items()},
        "files": {kind: str(path) for kind, path in files.items()},
    }
