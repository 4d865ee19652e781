"""What each command of ``sluice reproduce`` can be told."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer

from sluice.cli.job_options import (
    Again,
    CellFlags,
    Change,
    DataDir,
    Datasets,
    Epsilons,
    JobFlags,
    Methods,
    NoRun,
    Output,
    Results,
    Seeds,
    Tag,
    Words,
)
from sluice.cli.output import JsonFlag

PaperDatasets = Annotated[
    Words, typer.Option("--datasets", help="Names, separated by commas.", show_default="the paper's")
]


@dataclass(frozen=True, kw_only=True)
class AccuracyOptions:
    """Of ``reproduce accuracy``; what is empty is the table's."""

    table: Annotated[
        str,
        typer.Option(
            "--table",
            help="same-nets: the paper's methods with its nets and settings; best: the best recipe that is known for each "
            "data set, with and without the gate.",
        ),
    ] = "same-nets"
    datasets: Annotated[
        Words,
        typer.Option("--datasets", help="Names, separated by commas; all: the paper's four.", show_default="all"),
    ] = ()
    methods: Annotated[
        Words,
        typer.Option(
            "--methods",
            help="Names, or METHOD:VARIANT, separated by commas; all: every method.",
            show_default="the table's",
        ),
    ] = ()
    epsilons: Annotated[
        Words, typer.Option("--epsilons", help="Headings of the table, separated by commas.", show_default="1,2,3")
    ] = ()
    seeds: Annotated[
        Words, typer.Option("--seeds", help="One run for each, separated by commas.", show_default="the table's")
    ] = ()
    change: Change = ()
    tag: Tag = ""
    results: Annotated[
        Path | None, typer.Option("--results", help="Folder of the stored results.", show_default="the table's")
    ] = None
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", help="Path of the table without extension (.md, .csv, .png); RESULTS/table if not given."
        ),
    ] = None
    cells: CellFlags = field(default_factory=CellFlags)


@dataclass(frozen=True, kw_only=True)
class AblationOptions(AccuracyOptions):
    """Of ``reproduce ablation``: a table of accuracies whose methods are set."""

    table: str = field(default="ablation", init=False)
    datasets: PaperDatasets = ()
    methods: Words = field(default=(), init=False)
    epsilons: Annotated[Words, typer.Option("--epsilons", help="Separated by commas.", show_default="the paper's")] = ()
    seeds: Seeds = ("0", "1", "2")
    results: Results = Path("results/ablation")
    output: Output = None


@dataclass(frozen=True, kw_only=True)
class BetaOptions:
    """Of ``reproduce beta``; data sets that are not given are the paper's."""

    datasets: PaperDatasets = ()
    betas: Annotated[Words, typer.Option("--betas", help="Thresholds, separated by commas.")] = (
        "0",
        "1",
        "2",
        "3",
        "4",
        "5",
    )
    epsilon: Annotated[float, typer.Option("--epsilon", help="Proved for every run.")] = 3.0
    seeds: Seeds = ("0", "1", "2")
    looks: Annotated[
        int, typer.Option("--looks", help="Accepted attempts to look at in each run, about, and as many rejected ones.")
    ] = 60
    records: Annotated[
        int | None,
        typer.Option("--records", help="Training records on which loss is compared, drawn once; all if not given."),
    ] = None
    change: Change = ()
    tag: Tag = ""
    results: Results = Path("results/beta")
    output: Output = None
    cells: CellFlags = field(default_factory=CellFlags)


@dataclass(frozen=True, kw_only=True)
class SelectionOptions:
    """Of ``reproduce selection``; without arms, all of them."""

    datasets: Datasets = ("digits", "mnist", "fashion-mnist", "imdb")
    epsilons: Epsilons = ("3", "1")
    arms: Annotated[
        Words,
        typer.Option("--arms", help="Ways to select, separated by commas: see docs/reproduce.md.", show_default="all"),
    ] = ()
    regimes: Annotated[
        Words,
        typer.Option(
            "--regimes", help="plain, wrong20, wrong40, poisoned5, batch16, batch64, noiseless, separated by commas."
        ),
    ] = ("plain",)
    seeds: Seeds = ("0", "1", "2", "3", "4")
    inclusion: Annotated[
        bool, typer.Option("--inclusion", help="Also measure how often the gate accepts records with large gradients.")
    ] = False
    results: Results = Path("results/selection")
    cells: CellFlags = field(default_factory=CellFlags)


@dataclass(frozen=True, kw_only=True)
class AttacksOptions:
    """Of ``reproduce attacks``."""

    datasets: Datasets = ("fashion-mnist", "cifar-10")
    methods: Methods = ("dpsr-cg", "dpsgd", "non-private")
    epsilons: Epsilons = ("1", "2", "3")
    attacks: Annotated[
        Words,
        typer.Option(
            "--attacks",
            help="shadow-ordinary and shadow-same (Black-Box/Shadow), white-box, lira, rmia, separated by commas.",
        ),
    ] = ("shadow-ordinary", "shadow-same", "white-box", "lira")
    seeds: Annotated[Words, typer.Option("--seeds", help="Separated by commas.")] = ("0",)
    shadows: Annotated[int, typer.Option("--shadows", help="Shadow models of lira and rmia.")] = 16
    records: Annotated[
        int | None, typer.Option("--records", help="Use so many records, drawn by the seed; all if not given.")
    ] = None
    change: Annotated[Words, typer.Option("--set", metavar="NAME=VALUE", help="Change a setting of every target.")] = ()
    results: Results = Path("results/attacks")
    work: Annotated[Path | None, typer.Option("--work", help="Folder where models are kept.")] = None
    data_dir: DataDir = None
    no_run: NoRun = False
    jobs: JobFlags = field(default_factory=JobFlags)
    as_json: JsonFlag = False


@dataclass(frozen=True, kw_only=True)
class ConvergenceOptions:
    """Of ``reproduce convergence``."""

    problems: Annotated[
        Words, typer.Option("--problems", help="quadratic, digits, separated by commas.", show_default="both")
    ] = ("quadratic", "digits")
    seeds: Seeds = ("0", "1", "2", "3", "4")
    results: Results = Path("results/convergence")
    output: Output = None
    again: Again = False
    no_run: NoRun = False
    jobs: JobFlags = field(default_factory=JobFlags)
    as_json: JsonFlag = False
