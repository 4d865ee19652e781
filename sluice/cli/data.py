"""``sluice data``: list the data sets, get their files, verify them."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from sluice.cli.output import JsonFlag, print_json, print_table

app = typer.Typer(help="List, get and verify data sets. Example: sluice data list", no_args_is_help=True)

DataDir = Annotated[
    Path | None,
    typer.Option("--data-dir", help="Folder with data sets, looked at before $SLUICE_DATA and the user's cache."),
]


@app.command("list")
def list_data_sets(data_dir: DataDir = None, as_json: JsonFlag = False) -> None:
    """List the data sets and where each one is.

    Example: sluice data list
    """
    from sluice.data.management import summaries

    found = summaries(data_dir)
    if as_json:
        print_json({"data_sets": [asdict(summary) for summary in found]})
        return
    rows = [
        (
            summary.name,
            summary.kind,
            f"{summary.train:,}",
            f"{summary.test:,}",
            summary.classes,
            summary.found or f"download {summary.download_bytes / 1e6:.0f} MB",
        )
        for summary in found
    ]
    print_table(("name", "kind", "train", "test", "classes", "found in"), rows)


@app.command("get")
def get_data_sets(
    names: Annotated[list[str], typer.Argument(metavar="NAME...", help="Data sets, as 'sluice data list' names them.")],
    data_dir: Annotated[
        Path | None, typer.Option("--data-dir", help="Folder to fill; the user's cache if not given.")
    ] = None,
    replace: Annotated[
        bool, typer.Option("--replace", help="Set damaged files aside as FILE.damaged and download them again.")
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Make sure that a data set is there and undamaged; download what is missing.

    Example: sluice data get mnist
    """
    from sluice.data.management import get

    obtained = {name: get(name, data_dir=data_dir, replace=replace) for name in names}
    if as_json:
        print_json({"data_sets": {name: [asdict(file) for file in files] for name, files in obtained.items()}})
        return
    for name, files in obtained.items():
        for file in files:
            typer.echo(f"{file.action:<10} {name:<13} {file.path}")


@app.command("verify")
def verify_data_sets(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME]...", help="Data sets to check; all of them if none is named.")
    ] = None,
    data_dir: Annotated[
        Path | None, typer.Option("--data-dir", help="Check only this folder, not $SLUICE_DATA and the user's cache.")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Check the sha256 of every data file, one line for each. The exit code is 1 if one is damaged or missing.

    Example: sluice data verify mnist
    """
    from sluice.data.management import verify

    checks = []
    for check in verify(names or (), data_dir=data_dir):
        checks.append(check)
        if not as_json:
            problem = (
                f": expected {check.expected}; found {check.found}; repair with: {check.mend}" if check.bad else ""
            )
            typer.echo(f"{check.state:<10} {check.name:<13} {check.path}{problem}")
    bad = sum(check.bad for check in checks)
    if as_json:
        print_json({"bad": bad, "files": [asdict(check) for check in checks]})
    if bad:
        raise typer.Exit(1)
