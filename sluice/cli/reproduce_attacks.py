"""``sluice reproduce attacks``: carry out the cells that have no result, and write the table."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import typer

from sluice._base.interrupts import sigterm_as_interrupt
from sluice.cli.output import print_json
from sluice.cli.reproduce_accuracy import numbers_of, words_of
from sluice.experiments.attacks.request import AttackRequest
from sluice.experiments.attacks.table import plan_attacks, run_cells, stored_cell, write_table
from sluice.experiments.jobs import JobOptions


def reproduce_attacks(
    base: AttackRequest,
    *,
    datasets: Sequence[str],
    methods: Sequence[str],
    epsilons: Sequence[str],
    attacks: Sequence[str],
    seeds: Sequence[str],
    results: Path,
    options: JobOptions,
    no_run: bool,
    as_json: bool,
) -> None:
    """Run the command."""
    cells = plan_attacks(
        base,
        datasets=words_of(tuple(datasets)),
        methods=words_of(tuple(methods)),
        epsilons=numbers_of("epsilons", tuple(epsilons), float),
        attacks=words_of(tuple(attacks)),
        seeds=numbers_of("seeds", tuple(seeds), int),
    )
    found = {cell.name: result for cell in cells if (result := stored_cell(results, cell)) is not None}
    open_cells = [] if no_run else [cell for cell in cells if cell.name not in found]
    failures: dict[str, str] = {}
    _say(f"{len(found)} of {len(cells)} cells are stored, {len(open_cells)} to run.", quiet=as_json)
    try:
        with sigterm_as_interrupt():
            for number, (cell, result, failure) in enumerate(run_cells(open_cells, results, options), start=1):
                if result is None:
                    failures[cell.name] = failure
                else:
                    found[cell.name] = result
                _say(f"cell {number} of {len(open_cells)}: {cell.name}: {failure or 'done'}", quiet=as_json)
    except KeyboardInterrupt:
        _say("interrupted: to resume, run the same command.", quiet=as_json)
        raise typer.Exit(130) from None
    path = results / "table.md"
    write_table(path, cells, found)
    if as_json:
        print_json(
            {"cells": found, "not_run": [cell.name for cell in cells if cell.name not in found], "failed": failures}
        )
    else:
        typer.echo(path.read_text("utf-8"))
        typer.echo(f"Written: {path}")
    if failures:
        raise typer.Exit(1)


def _say(text: str, *, quiet: bool) -> None:
    if not quiet:
        typer.echo(f"sluice: {text}", err=True)
