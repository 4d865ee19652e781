"""``sluice reproduce attacks``: carry out the cells that have no result, and write the table."""

from __future__ import annotations

import typer

from sluice._base.interrupts import sigterm_as_interrupt
from sluice.cli.output import print_json
from sluice.cli.reproduce_cells import numbers_of, words_of
from sluice.cli.reproduce_options import AttacksOptions
from sluice.experiments.attacks.request import AttackRequest
from sluice.experiments.attacks.table import plan_attacks, run_cells, stored_cell, write_table
from sluice.experiments.tables.accuracy_cells import parse_overrides


def reproduce_attacks(options: AttacksOptions) -> None:
    """Run the command."""
    results, as_json = options.results, options.as_json
    base = AttackRequest(
        attack="loss",
        dataset="digits",
        changes=parse_overrides(options.change),
        records=options.records,
        shadows=options.shadows,
        work=None if options.work is None else options.work.absolute(),
        data_dir=None if options.data_dir is None else options.data_dir.absolute(),
    )
    cells = plan_attacks(
        base,
        datasets=words_of(options.datasets),
        methods=words_of(options.methods),
        epsilons=numbers_of("epsilons", options.epsilons, float),
        attacks=words_of(options.attacks),
        seeds=numbers_of("seeds", options.seeds, int),
    )
    found = {cell.name: result for cell in cells if (result := stored_cell(results, cell)) is not None}
    open_cells = [] if options.no_run else [cell for cell in cells if cell.name not in found]
    failures: dict[str, str] = {}
    _say(f"{len(found)} of {len(cells)} cells are stored, {len(open_cells)} to run.", quiet=as_json)
    try:
        with sigterm_as_interrupt():
            ended = run_cells(open_cells, results, options.jobs.options())
            for number, (cell, result, failure) in enumerate(ended, start=1):
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
