"""Plots of a run, drawn without a display. The public ones come out byte for byte the same each time."""

from __future__ import annotations

import math

import numpy as np
from matplotlib.axes import Axes

from sluice._base.figures import BLUE, GREY, RED, as_png, as_svg, blank_figure
from sluice._base.rounding import rounded_up
from sluice.runs.ledger import LedgerContents
from sluice.runs.privacy_spent import epsilon_over_releases
from sluice.runs.trace import TraceRow

_POINTS = 16


def epsilon_plot(contents: LedgerContents) -> str:
    """Epsilon over releases as SVG: of runs planned to stop there, of this run's whole plan, and the budget.

    Guarantee:
        A function of the ledger alone. The only figure in it is that of the whole plan.
    """
    planned, spent = contents.header.planned_releases, contents.spent
    # Epsilon rises like a square root: evenly spaced points alone would draw a corner where it begins.
    even, dense = np.linspace(1, planned, _POINTS), np.geomspace(1, planned, _POINTS)
    counts = sorted({round(count) for count in (*even, *dense)} | {max(spent, 1)})
    epsilons = epsilon_over_releases(contents, counts=counts)
    with blank_figure() as figure:
        axes: Axes = figure.add_subplot()
        axes.set_xlabel("released updates")
        axes.set_ylabel(f"epsilon at delta = {contents.header.delta:g}\nof a run planned to stop there")
        pairs = zip(counts, epsilons, strict=True)
        known = [(count, epsilon) for count, epsilon in pairs if epsilon is not None and math.isfinite(epsilon)]
        if known:
            _draw_epsilon(axes, known, spent=spent, planned=planned, budget=contents.header.target_epsilon)
        else:
            axes.text(0.5, 0.5, "no finite epsilon is proved for this run", ha="center", va="center", color=RED)
            axes.set_xticks([])
            axes.set_yticks([])
        return as_svg(figure)


def _draw_epsilon(
    axes: Axes, known: list[tuple[int, float]], *, spent: int, planned: int, budget: float | None
) -> None:
    past = [point for point in known if point[0] <= spent]
    future = [point for point in known if point[0] >= max(spent, 1)]
    if len(future) > 1:
        axes.plot(*zip(*future, strict=True), color=GREY, linestyle=":", label="releases not made")
    if past:
        axes.plot(*zip(*past, strict=True), color=BLUE, linewidth=2, label="releases made")
    for whole in [point for point in known if point[0] == planned]:
        axes.plot(*whole, marker="o", color=BLUE, linestyle="none", label="this run: the whole plan")
        axes.annotate(rounded_up(whole[1]), whole, textcoords="offset points", xytext=(6, -16), ha="center", color=BLUE)
    if budget is not None:
        axes.axhline(budget, color=RED, linestyle="--", label=f"budget {budget:g}")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0, top=1.12 * max(max(epsilon for _, epsilon in known), budget or 0.0))
    axes.legend(loc="lower right", frameon=False)


def acceptance_plot(rows: list[TraceRow]) -> bytes:
    """Attempts for each release and their share that was accepted, as PNG. It is private."""
    with blank_figure() as figure:
        above, below = figure.subplots(2, 1, sharex=True)
        releases = [row.release for row in rows]
        attempts = np.array([row.attempts for row in rows], dtype=float)
        above.plot(releases, attempts, color=BLUE, linewidth=1)
        above.set_ylabel("attempts")
        below.plot(releases, np.arange(1, len(rows) + 1) / np.cumsum(attempts), color=BLUE)
        below.set_ylabel("accepted so far")
        below.set_ylim(0, 1.05)
        below.set_xlabel("release")
        above.set_title("PRIVATE: do not publish", color=RED)
        return as_png(figure)


def metric_plot(rows: list[TraceRow]) -> bytes:
    """The un-noised metric of each accepted batch, as PNG. It is private."""
    with blank_figure() as figure:
        axes: Axes = figure.add_subplot()
        axes.plot([row.release for row in rows], [row.metric for row in rows], color=BLUE, linewidth=1)
        axes.set_xlabel("release")
        axes.set_ylabel("metric of the accepted batch")
        axes.set_title("PRIVATE: do not publish", color=RED)
        return as_png(figure)
