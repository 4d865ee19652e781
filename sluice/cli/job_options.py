"""Options of every command that runs many jobs: how many at once, and where."""

from __future__ import annotations

from typing import Annotated

import typer

Jobs = Annotated[
    int | None, typer.Option("--jobs", help="Cells at once; -1: as many as there are processors.", show_default="1")
]
Backend = Annotated[str, typer.Option("--backend", help="joblib (processes of this machine), dask or ray.")]
Address = Annotated[
    str | None,
    typer.Option(
        "--address",
        "--scheduler",
        help="Of a running Dask or Ray cluster; without it, one is started on this machine.",
    ),
]
Retries = Annotated[
    int, typer.Option("--retries", help="How often a cell is given to another worker because its worker died.")
]
