"""``sluice reproduce convergence``: run what has no result, show and write the table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from sluice._base import validate
from sluice._base.errors import InputError
from sluice._base.files import write_atomically
from sluice.cli.output import print_json, print_table
from sluice.cli.reproduce_cells import numbers_of, words_of
from sluice.cli.reproduce_options import ConvergenceOptions
from sluice.experiments.convergence.plot import convergence_png
from sluice.experiments.convergence.problems import PROBLEMS
from sluice.experiments.convergence.study import Line, lines_of, settings
from sluice.experiments.convergence.texts import COLUMNS, as_csv, cells_of, markdown, verdict


def reproduce_convergence(options: ConvergenceOptions) -> None:
    """Run the command."""
    if options.again and options.no_run:
        raise InputError("again and no-run cannot be given together: one runs every setting, the other none.")
    names = words_of(options.problems)
    for name in names:
        validate.one_of(PROBLEMS, problems=name)
    numbers = numbers_of("seeds", options.seeds, int)
    if not names or not numbers:
        raise InputError("problems and seeds must not be empty: give at least one of each.")
    wanted = [setting for setting in settings() if setting.problem in names]
    lines: list[Line] = []
    ended = lines_of(
        options.results,
        wanted,
        numbers,
        again=options.again,
        run=not options.no_run,
        options=options.jobs.options(),
    )
    for line in ended:
        lines.append(line)
        if not options.as_json:
            typer.echo(
                f"sluice: {line.setting.name}: largest share of the bound {line.largest_share:.2f}",
                err=True,
            )
    lines.sort(key=lambda line: wanted.index(line.setting))
    output = options.output or options.results / "table"
    files = {kind: output.with_name(f"{output.name}.{kind}") for kind in ("md", "csv", "png")}
    page = markdown(lines, plot=files["png"].name, missing=len(wanted) - len(lines))
    write_atomically(files["md"], page.encode("utf-8"), public=True)
    write_atomically(files["csv"], as_csv(lines).encode("utf-8"), public=True)
    write_atomically(files["png"], convergence_png(lines), public=True)
    if options.as_json:
        print_json(_as_json(lines, files, missing=len(wanted) - len(lines)))
        return
    print_table(COLUMNS, map(cells_of, lines))
    typer.echo(f"\n{verdict(lines)}\nWritten: {', '.join(map(str, files.values()))}")


def _as_json(lines: list[Line], files: dict[str, Path], *, missing: int) -> dict[str, Any]:
    return {
        "lines": [
            {
                "setting": line.setting.name,
                "largest_share": line.largest_share,
                "paper_share": line.paper_share,
                "paper_bias_share": line.paper_bias_share,
            }
            for line in lines
        ],
        "not_run": missing,
        "verdict": verdict(lines),
        "files": {kind: str(path) for kind, path in files.items()},
    }
