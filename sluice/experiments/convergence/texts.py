"""The convergence table as text: for the terminal, Markdown and CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable, Sequence
from statistics import fmean

from sluice.experiments.convergence.bound import Terms
from sluice.experiments.convergence.study import Line

COLUMNS = (
    "problem",
    "S",
    "epsilon",
    "lr",
    "beta",
    "clipped",
    "first",
    "mean",
    "start + bias + sampling + noise",
    "bound",
    "largest share",
    "smallest",
    "paper: start + selection + perturbation",
    "paper's bound",
    "paper holds",
    "bias / paper's",
)

_WHAT_COLUMNS_MEAN = """\
- **S**: the scaling bound, with C = 1. **epsilon** is proved, at delta 1e-5. **beta** "-": no gate.
- **clipped**: the share of records whose gradients are longer than S, over the run.
- **first**, **mean**, **smallest**: the squared norm of the exact gradient before the first release, and its mean and minimum over the
  releases of a run; averages over seeds.
- **bound**: that of docs/convergence.md on the mean, with its four terms. **largest share**: the largest mean of a single run over
  that run's bound; the bound is above the measurement in every run where it is below 1.
- **paper's bound**: that of the DPSR-CG paper on the smallest, its sum of acceptance probabilities read as the number of accepted
  updates, which is the reading of its proof. **paper holds**: whether it is above the smallest, on average over seeds.
- **bias / paper's**: the mean squared distance between the gradient and the mean of the scaled gradients, over 16 sigma_e^2 C^2 / beta^2,
  which the paper's proof says is a bound on it.

Noise is seeded: for experiments only. These values are sensitive in real runs; the records here are public.
"""


def cells_of(line: Line) -> tuple[str, ...]:
    """A line as the texts of its columns."""
    setting, runs = line.setting, line.runs
    share, bias = line.paper_share, line.paper_bias_share
    paper = line.paper
    return (
        setting.problem,
        f"{setting.bound:g}",
        f"{setting.epsilon:g}",
        f"{setting.lr:g}",
        "-" if setting.beta is None else f"{setting.beta:g}",
        f"{100 * fmean(run.clipped for run in runs):.0f} %",
        f"{runs[0].first:.3g}",
        f"{fmean(run.mean for run in runs):.3g}",
        " + ".join(
            f"{_mean(line.terms, part):.2g}"
            for part in (_start, _bias, lambda terms: terms.sampling, lambda terms: terms.noise)
        ),
        f"{_mean(line.terms, lambda terms: terms.total):.3g}",
        f"{line.largest_share:.2f}",
        f"{fmean(run.smallest for run in runs):.3g}",
        " + ".join(f"{_mean(paper, part):.2g}" for part in (_start, _bias, _perturbation)) if paper else "-",
        f"{_mean(paper, lambda terms: terms.total):.3g}" if paper else "-",
        "-" if share is None else "yes" if share <= 1 else "**no**",
        "-" if bias is None else f"{bias:.2g}",
    )


def markdown(lines: Sequence[Line], *, plot: str, missing: int) -> str:
    rows = "".join("| " + " | ".join(row) + " |\n" for row in map(cells_of, lines))
    heading = "| " + " | ".join(COLUMNS) + " |\n" + "|---" * len(COLUMNS) + "|\n"
    return "\n".join(
        [
            "# Convergence: two bounds and what was measured\n",
            heading + rows,
            *(["" if not missing else f"{missing} settings were not run.\n"]),
            verdict(lines) + "\n",
            f"![Bounds and measurements]({plot})\n",
            "## What the columns mean\n",
            _WHAT_COLUMNS_MEAN,
        ]
    )


def verdict(lines: Sequence[Line]) -> str:
    """The result in two sentences."""
    runs = sum(len(line.runs) for line in lines)
    held = sum(run.mean <= terms.total for line in lines for run, terms in zip(line.runs, line.terms, strict=True))
    gated = [line for line in lines if line.paper_share is not None]
    failing = sum((line.paper_share or 0) > 1 for line in gated)
    biased = sum((line.paper_bias_share or 0) > 1 for line in gated)
    return (
        f"The bound of docs/convergence.md is above the measurement in {held} of {runs} runs. The paper's is below it in {failing} of "
        f"{len(gated)} settings with a gate, and the bias exceeds the paper's term for it in {biased}."
    )


def as_csv(lines: Iterable[Line]) -> str:
    """One row for each run."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(
        [
            "problem", "scaling_bound", "epsilon", "lr", "beta", "releases", "batch_size", "noise_multiplier", "seed",
            "first", "mean", "smallest", "clipped", "acceptance", "start", "bias", "sampling", "noise", "bound",
            "bias_by_norms", "paper_start", "paper_selection", "paper_perturbation", "paper_bound",
            "measured_paper_bias",
        ]
    )  # fmt: skip
    for line in lines:
        setting = line.setting
        for position, (run, terms) in enumerate(zip(line.runs, line.terms, strict=True)):
            paper = line.paper[position] if line.paper else None
            others = ["", "", "", ""]
            if paper is not None:
                others = [f"{part:.6g}" for part in (paper.start, paper.bias, _perturbation(paper), paper.total)]
            figures = (
                run.first, run.mean, run.smallest, run.clipped, run.acceptance,
                terms.start, terms.bias, terms.sampling, terms.noise, terms.total, run.squared_bias_by_norms,
            )  # fmt: skip
            writer.writerow(
                [
                    setting.problem,
                    f"{setting.bound:g}",
                    f"{setting.epsilon:g}",
                    f"{setting.lr:g}",
                    "" if setting.beta is None else f"{setting.beta:g}",
                    setting.releases,
                    setting.batch_size,
                    f"{line.noise_multiplier:.6g}",
                    run.seed,
                    *(f"{figure:.6g}" for figure in figures),
                    *others,
                    f"{run.paper_bias:.6g}",
                ]
            )
    return buffer.getvalue()


def _start(terms: Terms) -> float:
    return terms.start


def _bias(terms: Terms) -> float:
    return terms.bias


def _perturbation(terms: Terms) -> float:
    return terms.sampling + terms.noise


def _mean(terms: Sequence[Terms], part: Callable[[Terms], float]) -> float:
    return fmean(map(part, terms))


__all__ = ["COLUMNS", "as_csv", "cells_of", "markdown", "verdict"]
