"""``sluice bench``: how fast this package is on this machine, beside ordinary training and Opacus."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sluice.cli.output import JsonFlag, print_json, print_table

app = typer.Typer(help="Measure speed and memory on this machine.", no_args_is_help=True)


@app.callback()
def _bench() -> None:
    pass


@app.command()
def gradients(
    suite: Annotated[
        str, typer.Option(help="'paper': the paper's nets; 'wide': models that no kernel was written for; or 'all'.")
    ] = "paper",
    models: Annotated[str, typer.Option(help="Models, separated by commas; 'all' for the whole suite.")] = "all",
    batches: Annotated[str, typer.Option(help="Logical batch sizes, separated by commas.")] = "64,256,1024",
    threads: Annotated[str, typer.Option(help="Thread counts, separated by commas.")] = "1,2",
    repeats: Annotated[int, typer.Option(help="How often each method is timed.")] = 5,
    memory: Annotated[bool, typer.Option(help="Also measure peak memory, each method in its own process.")] = True,
    json_out: Annotated[Path | None, typer.Option(help="Write all measurements to this JSON file.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Write a bar chart to this file.")] = None,
    json: JsonFlag = False,
) -> None:
    """Whole releases, default noise included, beside the fastest ordinary PyTorch step and other libraries, interleaved.

    Times are medians; only their ratios mean something on a shared machine. Opacus (the extra "bench") and fastDP (from
    its repository, with transformers) are measured where they are installed.

    Example: sluice bench gradients --suite wide --models mlp,vit --batches 256 --threads 1 --plot bench.png
    """
    from sluice._base import validate
    from sluice._base.errors import InputError
    from sluice.experiments.bench.measure import measure, ratios
    from sluice.experiments.bench.report import payload, write_json, write_plot
    from sluice.experiments.bench.suites import SCENARIOS, SUITES

    def numbers(text: str, name: str) -> list[int]:
        try:
            values = [int(part) for part in text.split(",")]
        except ValueError as error:
            raise InputError(f"{name}={text!r} is not allowed: give integers separated by commas.") from error
        for value in values:
            validate.positive_integer(**{name: value})
        return values

    validate.one_of((*SUITES, "all"), suite=suite)
    names = list(SUITES.get(suite, SCENARIOS)) if models == "all" else models.split(",")
    for name in names:
        validate.one_of(SCENARIOS, models=name)
    validate.positive_integer(repeats=repeats)
    results = measure(
        names,
        numbers(batches, "batches"),
        numbers(threads, "threads"),
        repeats=repeats,
        memory=memory,
        report=lambda line: typer.echo(line, err=True),
    )
    if json_out is not None:
        write_json(results, json_out)
    if plot is not None:
        write_plot(results, plot)
    if json:
        print_json(payload(results))
        return
    print_table(
        ("model", "batch", "threads", "method", "ms", "peak MB", ""),
        (
            (
                r.model,
                r.batch,
                r.threads,
                r.method,
                "-" if r.seconds is None else f"{1000 * r.seconds:.0f}",
                "-" if r.megabytes is None else f"{r.megabytes:.0f}",
                r.skipped or "",
            )
            for r in results
        ),
    )
    columns = {
        "release / ordinary": "release_over_ordinary",
        "gradients / ordinary": "gradients_over_ordinary",
        "norms / gradients": "norms_over_gradients",
        "vmap / release": "vmap_over_release",
        "Opacus / release": "opacus_over_release",
        "fastDP / release": "fastdp_over_release",
        "memory / Opacus": "memory_over_opacus",
    }
    print_table(
        ("model", "batch", "threads", *columns),
        (
            (
                row["model"],
                row["batch"],
                row["threads"],
                *("-" if row[key] is None else f"{row[key]:.2f}" for key in columns.values()),
            )
            for row in ratios(results)
        ),
        title="Ratios (other libraries: their best mode)",
    )
