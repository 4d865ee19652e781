"""``sluice reproduce ablation``, ``beta`` and ``convergence``: what the DPSR-CG paper says of its gate, put to the test."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from sluice.cli.job_options import Address, Backend, Jobs, Retries
from sluice.cli.output import JsonFlag
from sluice.experiments.jobs import RETRIES

Datasets = Annotated[
    list[str] | None, typer.Option("--datasets", help="Names, separated by commas.", show_default="the paper's")
]
Epsilons = Annotated[
    list[str] | None, typer.Option("--epsilons", help="Separated by commas.", show_default="the paper's")
]
Seeds = Annotated[
    list[str] | None, typer.Option("--seeds", help="One run for each, separated by commas.", show_default="0,1,2")
]
Change = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="NAME=VALUE", help="Change a setting in every cell; needs --tag; repeatable."),
]
Tag = Annotated[str, typer.Option("--tag", help="A name for what --set changes, to keep results apart.")]
Work = Annotated[
    Path | None, typer.Option("--work", help="Folder for unfinished cells; in the user's cache if not given.")
]
DataDir = Annotated[Path | None, typer.Option("--data-dir", help="Folder with data sets, looked at first.")]
Output = Annotated[
    Path | None, typer.Option("--output", help="Path of the table without extension; RESULTS/table if not given.")
]
Again = Annotated[bool, typer.Option("--again", help="Discard stored results of these cells and run them again.")]
NoRun = Annotated[bool, typer.Option("--no-run", help="Run nothing; make the table from what is stored.")]
Threads = Annotated[int | None, typer.Option("--threads", help="Threads of PyTorch in each job.")]


def ablation(
    datasets: Datasets = None,
    epsilons: Epsilons = None,
    seeds: Seeds = None,
    change: Change = None,
    tag: Tag = "",
    results: Annotated[Path, typer.Option("--results", help="Folder of the stored results.")] = Path(
        "results/ablation"
    ),
    work: Work = None,
    data_dir: DataDir = None,
    output: Output = None,
    again: Again = False,
    no_run: NoRun = False,
    jobs: Jobs = None,
    backend: Backend = "joblib",
    address: Address = None,
    retries: Retries = RETRIES,
    threads: Threads = None,
    as_json: JsonFlag = False,
) -> None:
    """The paper's ablation: DPSR-CG, the same without selection, and DPSUR with its scaling, at an equal proved epsilon.

    Cells are run, stored and resumed as those of sluice reproduce accuracy.

    Example: sluice reproduce ablation --datasets imdb --epsilons 3 --seeds 0
    """
    from sluice.cli.reproduce_accuracy import Request, reproduce_accuracy
    from sluice.experiments.jobs import JobOptions
    from sluice.experiments.tables.accuracy_tables import TABLES

    table = TABLES["ablation"]
    reproduce_accuracy(
        Request(
            table=table,
            datasets=tuple(datasets or table.datasets),
            methods=table.methods,
            epsilons=tuple(epsilons or table.epsilons),
            seeds=tuple(seeds or table.seeds),
            changes=tuple(change or ()),
            tag=tag,
            results=results,
            work=work,
            data_dir=data_dir,
            output=output,
            again=again,
            no_run=no_run,
            options=JobOptions(backend=backend, address=address, jobs=jobs, retries=retries),
            threads=threads,
            as_json=as_json,
        )
    )


def convergence(
    problems: Annotated[
        list[str] | None,
        typer.Option("--problems", help="quadratic, digits, separated by commas.", show_default="both"),
    ] = None,
    seeds: Annotated[
        list[str] | None,
        typer.Option("--seeds", help="One run for each, separated by commas.", show_default="0,1,2,3,4"),
    ] = None,
    results: Annotated[Path, typer.Option("--results", help="Folder of the stored results.")] = Path(
        "results/convergence"
    ),
    output: Output = None,
    again: Again = False,
    no_run: NoRun = False,
    jobs: Jobs = None,
    backend: Backend = "joblib",
    address: Address = None,
    retries: Retries = RETRIES,
    as_json: JsonFlag = False,
) -> None:
    """The paper's convergence bound where every constant is known, and one that is proved, beside what was measured.

    Example: sluice reproduce convergence --problems quadratic --seeds 0,1
    """
    from sluice.cli.reproduce_convergence import reproduce_convergence
    from sluice.experiments.jobs import JobOptions

    reproduce_convergence(
        problems=tuple(problems or ("quadratic,digits",)),
        seeds=tuple(seeds or ("0,1,2,3,4",)),
        results=results,
        output=output or results / "table",
        again=again,
        no_run=no_run,
        options=JobOptions(backend=backend, address=address, jobs=jobs, retries=retries),
        as_json=as_json,
    )


def beta(
    datasets: Datasets = None,
    betas: Annotated[
        list[str] | None,
        typer.Option("--betas", help="Thresholds, separated by commas.", show_default="0,1,2,3,4,5"),
    ] = None,
    epsilon: Annotated[float, typer.Option("--epsilon", help="Proved for every run.")] = 3.0,
    seeds: Seeds = None,
    looks: Annotated[
        int, typer.Option("--looks", help="Accepted attempts to look at in each run, about, and as many rejected ones.")
    ] = 60,
    records: Annotated[
        int | None,
        typer.Option("--records", help="Training records on which loss is compared, drawn once; all if not given."),
    ] = None,
    change: Change = None,
    tag: Tag = "",
    results: Annotated[Path, typer.Option("--results", help="Folder of the stored results.")] = Path("results/beta"),
    work: Work = None,
    data_dir: DataDir = None,
    output: Output = None,
    again: Again = False,
    no_run: NoRun = False,
    jobs: Jobs = None,
    backend: Backend = "joblib",
    address: Address = None,
    retries: Retries = RETRIES,
    threads: Threads = None,
    as_json: JsonFlag = False,
) -> None:
    """The paper's figures on beta: the share of good updates among the accepted and among the rejected ones.

    An update is good if applying it lowers the loss on the training records. Runs are those of sluice train, bit for bit;
    beside them, some attempts, rejected ones included, are completed with noise of the study's own and tried out. For
    public data: what is found is sensitive. A coin in place of the gate is the control of the accuracy.

    Example: sluice reproduce beta --datasets imdb --betas 0,3 --seeds 0 --looks 20
    """
    from sluice.cli.reproduce_accuracy import Request
    from sluice.cli.reproduce_beta import reproduce_beta
    from sluice.experiments.beta.study import DATASETS
    from sluice.experiments.jobs import JobOptions
    from sluice.experiments.tables.accuracy_tables import TABLES

    reproduce_beta(
        Request(
            table=TABLES["same-nets"],
            datasets=tuple(datasets or DATASETS),
            methods=(),
            epsilons=(str(epsilon),),
            seeds=tuple(seeds or ("0,1,2",)),
            changes=tuple(change or ()),
            tag=tag,
            results=results,
            work=work,
            data_dir=data_dir,
            output=output,
            again=again,
            no_run=no_run,
            options=JobOptions(backend=backend, address=address, jobs=jobs, retries=retries),
            threads=threads,
            as_json=as_json,
        ),
        betas=tuple(betas or ("0,1,2,3,4,5",)),
        looks=looks,
        records=records,
    )


COMMANDS: dict[str, Callable[..., None]] = {"ablation": ablation, "beta": beta, "convergence": convergence}
