"""``sluice reproduce``: recompute a table of the DPSR-CG paper and say which cells hold."""

from __future__ import annotations

import typer

from sluice.cli.output import JsonFlag, print_json, print_table

app = typer.Typer(help="Recompute a table of the DPSR-CG paper.", no_args_is_help=True)


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

    from sluice.tables.q_sup import q_sup_table

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
