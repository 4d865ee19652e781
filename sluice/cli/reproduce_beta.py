"""``sluice reproduce beta``: run the cells that have no result, show and write table and figures."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import typer

from sluice._base import validate
from sluice._base.files import write_atomically
from sluice.cli.output import print_json, print_table
from sluice.cli.reproduce_cells import check_flags, finish_cells, numbers_of, print_files, words_of
from sluice.cli.reproduce_options import BetaOptions
from sluice.experiments.beta.plot import accuracy_png, shares_png
from sluice.experiments.beta.study import DATASETS, AttemptWatch, Line, lines_of, plan_betas
from sluice.experiments.beta.texts import COLUMNS, as_csv, cells_of, markdown
from sluice.experiments.tables.accuracy_cells import parse_overrides


def reproduce_beta(options: BetaOptions) -> None:
    """Run the command."""
    looks, records = options.looks, options.records
    validate.positive_integer(looks=looks)
    if records is not None:
        validate.positive_integer(records=records)
    planned = plan_betas(
        datasets=words_of(options.datasets or DATASETS),
        betas=numbers_of("betas", options.betas, float),
        epsilon=options.epsilon,
        seeds=numbers_of("seeds", options.seeds, int),
        overrides=parse_overrides(options.change),
        tag=options.tag,
    )
    watch = AttemptWatch(looks=looks, records=records)
    check_flags(options.cells)
    finished = finish_cells(planned.plan, options.cells, results=options.results, watch=watch, lacks=watch.lacks)
    lines = lines_of(planned, finished.found)
    on = "all" if records is None else f"{records:,}"
    sampling = f"About {looks} accepted and as many rejected attempts of each run were looked at; loss on {on} training records."
    files = _write(lines, options.output or options.results / "table", sampling)
    if options.cells.as_json:
        print_json(
            {
                "lines": [asdict(line) for line in lines],
                "cells": len(planned.plan.cells),
                "stored": len(finished.found),
                "failed": finished.failed,
                "files": {kind: str(path) for kind, path in files.items()},
            }
        )
    else:
        print_table(COLUMNS, map(cells_of, lines))
        typer.echo(f"\n{sampling} Noise was seeded: for experiments on public data only.")
        print_files(files)
    if finished.failures:
        raise typer.Exit(1)


def _write(lines: list[Line], output: Path, sampling: str) -> dict[str, Path]:
    """The table, a figure of shares for each data set, and one of accuracies."""
    datasets = list(dict.fromkeys(line.dataset for line in lines))
    files = {kind: output.with_name(f"{output.name}.{kind}") for kind in ("md", "csv")}
    files |= {dataset: output.with_name(f"{output.name}-{dataset}.png") for dataset in datasets}
    files["accuracy"] = output.with_name(f"{output.name}-accuracy.png")
    plots = {f"Good and bad updates, {dataset}": files[dataset].name for dataset in datasets}
    plots["Accuracy over beta"] = files["accuracy"].name
    write_atomically(files["md"], markdown(lines, plots=plots, sampling=sampling).encode("utf-8"), public=True)
    write_atomically(files["csv"], as_csv(lines).encode("utf-8"), public=True)
    for dataset in datasets:
        write_atomically(files[dataset], shares_png(lines, dataset), public=True)
    write_atomically(files["accuracy"], accuracy_png(lines), public=True)
    return files
