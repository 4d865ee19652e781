"""``sluice reproduce``: recompute a table of the DPSR-CG paper and say which cells hold."""

from __future__ import annotations

import typer

from sluice.cli.option_fields import from_fields
from sluice.cli.output import JsonFlag, print_json, print_table
from sluice.cli.reproduce_options import (
    AblationOptions,
    AccuracyOptions,
    AttacksOptions,
    BetaOptions,
    ConvergenceOptions,
    SelectionOptions,
)

app = typer.Typer(help="Recompute a table of the DPSR-CG paper.", no_args_is_help=True)


@app.callback()
def _reproduce() -> None:
    pass


@app.command("ablation")
@from_fields
def ablation(options: AblationOptions) -> None:
    """The paper's ablation: DPSR-CG, the same without selection, and DPSUR with its scaling, at an equal proved epsilon.

    Cells are run, stored and resumed as those of sluice reproduce accuracy.

    Example: sluice reproduce ablation --datasets imdb --epsilons 3 --seeds 0
    """
    from sluice.cli.reproduce_accuracy import reproduce_accuracy

    reproduce_accuracy(options)


@app.command("beta")
@from_fields
def beta(options: BetaOptions) -> None:
    """The paper's figures on beta: the share of good updates among the accepted and among the rejected ones.

    An update is good if applying it lowers the loss on the training records. Runs are those of sluice train, bit for bit;
    beside them, some attempts, rejected ones included, are completed with noise of the study's own and tried out. For
    public data: what is found is sensitive. A coin in place of the gate is the control of the accuracy.

    Example: sluice reproduce beta --datasets imdb --betas 0,3 --seeds 0 --looks 20
    """
    from sluice.cli.reproduce_beta import reproduce_beta

    reproduce_beta(options)


@app.command("convergence")
@from_fields
def convergence(options: ConvergenceOptions) -> None:
    """The paper's convergence bound where every constant is known, and one that is proved, beside what was measured.

    Example: sluice reproduce convergence --problems quadratic --seeds 0,1
    """
    from sluice.cli.reproduce_convergence import reproduce_convergence

    reproduce_convergence(options)


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
@from_fields
def accuracy(options: AccuracyOptions) -> None:
    """Tables of accuracies: ours beside the paper's printed numbers, with what is proved and what is claimed.

    Each cell is one seeded run of sluice train's own code. Its result is stored as a small JSON file and re-used; a cell
    that was interrupted resumes when the same command is given again. With --again, results of these cells
    are removed first.

    Example: sluice reproduce accuracy --datasets mnist --methods dpsgd,dpsr-cg --epsilons 3 --seeds 0,1,2
    """
    from sluice.cli.reproduce_accuracy import reproduce_accuracy

    reproduce_accuracy(options)


@app.command("selection")
@from_fields
def selection(options: SelectionOptions) -> None:
    """What selection does: the same training without a gate, with each kind of gate, and with a coin, paired over seeds.

    Cells are stored and resumed as by reproduce accuracy. The table shows every cell that is stored in the folder, and differences to
    "no gate" with confidence intervals.

    Example: sluice reproduce selection --datasets digits --epsilons 3
    """
    from sluice.cli.reproduce_selection import reproduce_selection

    reproduce_selection(options)


@app.command("attacks")
@from_fields
def attacks(options: AttacksOptions) -> None:
    """The paper's tables of membership attacks, and the same methods under LiRA and RMIA.

    Results are small JSON files that are used again; models are kept and resumed. No accuracy here is evidence of privacy.

    Example: sluice reproduce attacks --datasets fashion-mnist --epsilons 1,3 --records 12000
    """
    from sluice.cli.reproduce_attacks import reproduce_attacks

    reproduce_attacks(options)
