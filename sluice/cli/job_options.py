"""Options of every command that runs many jobs: which cells, what is stored, how many at once, and where."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer

from sluice.cli.output import JsonFlag
from sluice.experiments.jobs import RETRIES, JobOptions

Words = tuple[str, ...]

Datasets = Annotated[Words, typer.Option("--datasets", help="Names, separated by commas.")]
Methods = Annotated[Words, typer.Option("--methods", help="Names, separated by commas.")]
Epsilons = Annotated[Words, typer.Option("--epsilons", help="Separated by commas.")]
Seeds = Annotated[Words, typer.Option("--seeds", help="One run for each, separated by commas.")]
Change = Annotated[
    Words, typer.Option("--set", metavar="NAME=VALUE", help="Change a setting in every cell; needs --tag; repeatable.")
]
Tag = Annotated[str, typer.Option("--tag", help="A name for what --set changes, to keep results apart.")]
Results = Annotated[Path, typer.Option("--results", help="Folder of the stored results.")]
Output = Annotated[
    Path | None, typer.Option("--output", help="Path of the table without extension; RESULTS/table if not given.")
]
DataDir = Annotated[Path | None, typer.Option("--data-dir", help="Folder with data sets, looked at first.")]
Again = Annotated[
    bool, typer.Option("--again", help="Discard stored results of these cells and run them from the start.")
]
NoRun = Annotated[bool, typer.Option("--no-run", help="Run nothing; make the table from what is stored.")]


@dataclass(frozen=True, kw_only=True)
class JobFlags:
    """How many jobs at once, and where."""

    jobs: Annotated[
        int | None, typer.Option("--jobs", help="Cells at once; -1: as many as there are processors.", show_default="1")
    ] = None
    backend: Annotated[str, typer.Option("--backend", help="joblib (processes of this machine), dask or ray.")] = (
        "joblib"
    )
    address: Annotated[
        str | None,
        typer.Option(
            "--address",
            "--scheduler",
            help="Of a running Dask or Ray cluster; without it, one is started on this machine.",
        ),
    ] = None
    retries: Annotated[
        int, typer.Option("--retries", help="How often a cell is given to another worker because its worker died.")
    ] = RETRIES

    def __post_init__(self) -> None:
        self.options()  # refuses what cannot be before anything is planned

    def options(self) -> JobOptions:
        return JobOptions(backend=self.backend, address=self.address, jobs=self.jobs, retries=self.retries)


@dataclass(frozen=True, kw_only=True)
class CellFlags:
    """How the cells of a table are run and shown."""

    work: Annotated[
        Path | None, typer.Option("--work", help="Folder for unfinished cells; in the user's cache if not given.")
    ] = None
    data_dir: DataDir = None
    again: Again = False
    no_run: NoRun = False
    jobs: JobFlags = field(default_factory=JobFlags)
    threads: Annotated[
        int | None, typer.Option("--threads", help="Threads of PyTorch in each job; its own choice if not given.")
    ] = None
    as_json: JsonFlag = False
