"""``sluice reproduce``: recompute a table of the DPSR-CG paper and say which cells hold."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sluice.cli.job_options import Address, Backend, Jobs, Retries
from sluice.cli.output import JsonFlag, print_json, print_table
from sluice.cli.reproduce_studies import COMMANDS
from sluice.experiments.jobs import RETRIES

app = typer.Typer(help="Recompute a table of the DPSR-CG paper.", no_args_is_help=True)
for _name, _command in COMMANDS.items():
    app.command(_name)(_command)


@app.callback()
def _reproduce() -> None:
    pass


@app.command("q-sup")
def q_sup(json: JsonFlag = False) -> None:
    """The paper's q_sup table: the claimed factor on the sampling rate, as printed and as its formulas give it.

    Each cell is shown with the epsilon whose setting it really holds, the factor under both readings of the
    formula, and the factor that belongs under that heading. None of these factors is part of a privacy guarantee.

    Example: sluice reproduce q-sup --json
    """
    from dataclasses import asdict

    from sluice.experiments.tables.q_sup import q_sup_table

    cells = q_sup_table()
    explained = sum(cell.explained for cell in cells)
    published = sum(cell.explained and cell.noise_is_published for cell in cells)
    by_algorithm = sum(cell.explained_by_printed_reading for cell in cells)
    if json:
        print_json(
            {
                "status": "claimed (paper): no factor here is part of a guarantee",
                "cells": [asdict(cell) | {"explained": cell.explained} for cell in cells],
                "explained": explained,
                "explained_with_published_noise": published,
                "explained_by_printed_reading": by_algorithm,
                "total": len(cells),
            }
        )
        return
    print_table(
        (
            "data",
            "method",
            "epsilon",
            "printed",
            "holds epsilon",
            "gate noise",
            "as in algorithm",
            "with threshold",
            "explained",
            "corrected",
        ),
        (
            (
                cell.data,
                cell.method,
                cell.epsilon,
                cell.printed,
                cell.held_epsilon,
                cell.gate_noise if cell.noise_is_published else f"{cell.gate_noise} *",
                f"{cell.claimed_printed_reading:.4f}",
                f"{cell.claimed_table_reading:.4f}",
                "yes" if cell.explained else "no",
                cell.corrected,
            )
            for cell in cells
        ),
        title="Claimed factor rho of q_sup = min(rho q, 1), as the DPSR-CG paper prints it and as its formulas give it",
    )
    typer.echo(
        f"\n{explained} of {len(cells)} cells explained: the formula with the threshold in it, cut to two decimals, "
        "columns in reverse order.\n"
        f"* noise read off the table itself; the authors' command names another ({len(cells) - published} cells).\n"
        f"The formula printed in the algorithm (DPSUR: that of the released code) gives {by_algorithm} of "
        f"{len(cells)}, cut or rounded.\n"
        "The cap is printed as 1/q in every cell; it should be 1. None of these factors is part of a guarantee."
    )


@app.command("accuracy")
def accuracy(
    table: Annotated[
        str,
        typer.Option(
            "--table",
            help="same-nets: the paper's methods with its nets and settings; best: the best recipe that is known for each "
            "data set, with and without the gate.",
        ),
    ] = "same-nets",
    datasets: Annotated[
        list[str] | None,
        typer.Option("--datasets", help="Names, separated by commas; all: the paper's four.", show_default="all"),
    ] = None,
    methods: Annotated[
        list[str] | None,
        typer.Option(
            "--methods",
            help="Names, or METHOD:VARIANT, separated by commas; all: every method.",
            show_default="the table's",
        ),
    ] = None,
    epsilons: Annotated[
        list[str] | None,
        typer.Option("--epsilons", help="Headings of the table, separated by commas.", show_default="1,2,3"),
    ] = None,
    seeds: Annotated[
        list[str] | None,
        typer.Option("--seeds", help="One run for each, separated by commas.", show_default="the table's"),
    ] = None,
    change: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="Change a setting in every cell; needs --tag; repeatable."),
    ] = None,
    tag: Annotated[str, typer.Option("--tag", help="A name for what --set changes, to keep results apart.")] = "",
    results: Annotated[
        Path | None, typer.Option("--results", help="Folder of the stored results.", show_default="the table's")
    ] = None,
    work: Annotated[
        Path | None, typer.Option("--work", help="Folder for unfinished cells; in the user's cache if not given.")
    ] = None,
    data_dir: Annotated[Path | None, typer.Option("--data-dir", help="Folder with data sets, looked at first.")] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", help="Path of the table without extension (.md, .csv, .png); RESULTS/table if not given."
        ),
    ] = None,
    again: Annotated[
        bool, typer.Option("--again", help="Discard stored results of these cells and run them from the start.")
    ] = False,
    no_run: Annotated[bool, typer.Option("--no-run", help="Run nothing; make the table from what is stored.")] = False,
    jobs: Jobs = None,
    threads: Annotated[
        int | None, typer.Option("--threads", help="Threads of PyTorch in each job; its own choice if not given.")
    ] = None,
    backend: Backend = "joblib",
    address: Address = None,
    retries: Retries = RETRIES,
    as_json: JsonFlag = False,
) -> None:
    """Tables of accuracies: ours beside the paper's printed numbers, with what is proved and what is claimed.

    Each cell is one seeded run of sluice train's own code. Its result is stored as a small JSON file and re-used; a cell
    that was interrupted resumes when the same command is given again. With --again, results of these cells
    are removed first.

    Example: sluice reproduce accuracy --datasets mnist --methods dpsgd,dpsr-cg --epsilons 3 --seeds 0,1,2
    """
    from sluice._base import validate
    from sluice.cli.reproduce_accuracy import Request, reproduce_accuracy
    from sluice.experiments.jobs import JobOptions
    from sluice.experiments.tables.accuracy_tables import TABLES

    validate.one_of(TABLES, table=table)
    preset = TABLES[table]
    reproduce_accuracy(
        Request(
            table=preset,
            datasets=tuple(datasets or preset.datasets),
            methods=tuple(methods or preset.methods),
            epsilons=tuple(epsilons or preset.epsilons),
            seeds=tuple(seeds or preset.seeds),
            changes=tuple(change or ()),
            tag=tag,
            results=results or preset.results,
            work=work,
            data_dir=data_dir,
            output=output,
            again=again,
            no_run=no_run,
            threads=threads,
            options=JobOptions(backend=backend, address=address, jobs=jobs, retries=retries),
            as_json=as_json,
        )
    )


@app.command("selection")
def selection(
    datasets: Annotated[
        list[str] | None,
        typer.Option("--datasets", help="Names, separated by commas.", show_default="digits,mnist,fashion-mnist,imdb"),
    ] = None,
    epsilons: Annotated[
        list[str] | None, typer.Option("--epsilons", help="Separated by commas.", show_default="3,1")
    ] = None,
    arms: Annotated[
        list[str] | None,
        typer.Option("--arms", help="Ways to select, separated by commas: see docs/reproduce.md.", show_default="all"),
    ] = None,
    regimes: Annotated[
        list[str] | None,
        typer.Option(
            "--regimes",
            help="plain, wrong20, wrong40, poisoned5, batch16, batch64, noiseless, separated by commas.",
            show_default="plain",
        ),
    ] = None,
    seeds: Annotated[
        list[str] | None, typer.Option("--seeds", help="One run for each.", show_default="0,1,2,3,4")
    ] = None,
    results: Annotated[Path, typer.Option("--results", help="Folder of the stored results.")] = Path(
        "results/selection"
    ),
    work: Annotated[
        Path | None, typer.Option("--work", help="Folder for unfinished cells; in the user's cache if not given.")
    ] = None,
    data_dir: Annotated[Path | None, typer.Option("--data-dir", help="Folder with data sets, looked at first.")] = None,
    again: Annotated[
        bool, typer.Option("--again", help="Discard stored results of these cells and run them from the start.")
    ] = False,
    no_run: Annotated[bool, typer.Option("--no-run", help="Run nothing; make the table from what is stored.")] = False,
    inclusion: Annotated[
        bool, typer.Option("--inclusion", help="Also measure how often the gate accepts records with large gradients.")
    ] = False,
    jobs: Jobs = None,
    backend: Backend = "joblib",
    address: Address = None,
    retries: Retries = RETRIES,
    threads: Annotated[int | None, typer.Option("--threads", help="Threads of PyTorch in each job.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """What selection does: the same training without a gate, with each kind of gate, and with a coin, paired over seeds.

    Cells are stored and resumed as by reproduce accuracy. The table shows every cell that is stored in the folder, and differences to
    "no gate" with confidence intervals.

    Example: sluice reproduce selection --datasets digits --epsilons 3
    """
    from sluice.cli.reproduce_selection import SelectionRequest, reproduce_selection
    from sluice.experiments.jobs import JobOptions

    reproduce_selection(
        SelectionRequest(
            datasets=tuple(datasets or ("digits", "mnist", "fashion-mnist", "imdb")),
            epsilons=tuple(epsilons or ("3", "1")),
            arms=tuple(arms or ()),
            regimes=tuple(regimes or ("plain",)),
            seeds=tuple(seeds or ("0", "1", "2", "3", "4")),
            results=results,
            work=work,
            data_dir=data_dir,
            again=again,
            no_run=no_run,
            inclusion=inclusion,
            options=JobOptions(backend=backend, address=address, jobs=jobs, retries=retries),
            threads=threads,
            as_json=as_json,
        )
    )


@app.command("attacks")
def attacks(
    datasets: Annotated[
        list[str] | None,
        typer.Option("--datasets", help="Names, separated by commas.", show_default="fashion-mnist,cifar-10"),
    ] = None,
    methods: Annotated[
        list[str] | None,
        typer.Option("--methods", help="Names, separated by commas.", show_default="dpsr-cg,dpsgd,non-private"),
    ] = None,
    epsilons: Annotated[
        list[str] | None, typer.Option("--epsilons", help="Separated by commas.", show_default="1,2,3")
    ] = None,
    attacks: Annotated[
        list[str] | None,
        typer.Option(
            "--attacks",
            help="shadow-ordinary and shadow-same (Black-Box/Shadow), white-box, lira, rmia, separated by commas.",
            show_default="shadow-ordinary,shadow-same,white-box,lira",
        ),
    ] = None,
    seeds: Annotated[list[str] | None, typer.Option("--seeds", help="Separated by commas.", show_default="0")] = None,
    shadows: Annotated[int, typer.Option("--shadows", help="Shadow models of lira and rmia.")] = 16,
    records: Annotated[
        int | None, typer.Option("--records", help="Use so many records, drawn by the seed; all if not given.")
    ] = None,
    change: Annotated[
        list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="Change a setting of every target.")
    ] = None,
    results: Annotated[Path, typer.Option("--results", help="Folder of the stored results.")] = Path("results/attacks"),
    work: Annotated[Path | None, typer.Option("--work", help="Folder where models are kept.")] = None,
    data_dir: Annotated[Path | None, typer.Option("--data-dir", help="Folder with data sets, looked at first.")] = None,
    no_run: Annotated[bool, typer.Option("--no-run", help="Run nothing; make the table from what is stored.")] = False,
    jobs: Jobs = None,
    backend: Backend = "joblib",
    address: Address = None,
    retries: Retries = RETRIES,
    as_json: JsonFlag = False,
) -> None:
    """The paper's tables of membership attacks, and the same methods under LiRA and RMIA.

    Results are small JSON files that are used again; models are kept and resumed. No accuracy here is evidence of privacy.

    Example: sluice reproduce attacks --datasets fashion-mnist --epsilons 1,3 --records 12000
    """
    from sluice.cli.reproduce_attacks import reproduce_attacks
    from sluice.experiments.attacks.printed import DATASETS, METHODS
    from sluice.experiments.attacks.request import AttackRequest
    from sluice.experiments.jobs import JobOptions
    from sluice.experiments.tables.accuracy_cells import parse_overrides

    names = tuple(datasets or DATASETS)
    reproduce_attacks(
        AttackRequest(
            attack="loss",
            dataset="digits",
            changes=parse_overrides(change or ()),
            records=records,
            shadows=shadows,
            work=None if work is None else work.absolute(),
            data_dir=None if data_dir is None else data_dir.absolute(),
        ),
        datasets=names,
        methods=tuple(methods or METHODS),
        epsilons=tuple(epsilons or ("1", "2", "3")),
        attacks=tuple(attacks or ("shadow-ordinary", "shadow-same", "white-box", "lira")),
        seeds=tuple(seeds or ("0",)),
        results=results,
        options=JobOptions(backend=backend, address=address, jobs=jobs, retries=retries),
        no_run=no_run,
        as_json=as_json,
    )
