"""The accuracy table as a plot: one panel for each data set and heading, ours beside the printed number."""

from __future__ import annotations

import math
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from sluice._base.figures import as_png, blank_figure
from sluice._base.line_plot import BLUE, GREY, RED
from sluice.experiments.tables.accuracy_table import Line
from sluice.experiments.tables.accuracy_texts import blocks

_ACROSS = 2


def accuracy_table_png(lines: Sequence[Line]) -> bytes:
    """Dots for ours, with the standard deviation over seeds where there are several, and rings for the printed ones."""
    panels = blocks(lines)
    across = min(_ACROSS, len(panels)) or 1
    down = math.ceil(len(panels) / across) or 1
    most = max((len(members) for _, _, members in panels), default=1)
    with blank_figure() as figure:
        figure.set_size_inches(5.2 * across, down * (1.1 + 0.3 * most) + 0.5)
        grid = figure.subplots(down, across, squeeze=False)
        for axes in grid.flat[len(panels) :]:
            axes.set_axis_off()
        for axes, (dataset, heading, members) in zip(grid.flat, panels, strict=False):
            axes.set_title(f"{dataset}, heading epsilon {heading:g}", fontsize=10)
            _draw(axes, members)
        figure.legend(handles=_legend(), loc="outside lower center", ncols=3, frameon=False)
        return as_png(figure)


def accuracy_over_epsilon_png(lines: Sequence[Line]) -> bytes:
    """A panel for each data set: accuracy over epsilon of each row, and of the paper's own method as it is printed."""
    datasets = list(dict.fromkeys(line.dataset for line in lines))
    with blank_figure() as figure:
        figure.set_size_inches(2.6 * max(1, len(datasets)), 2.7)
        panels = figure.subplots(1, max(1, len(datasets)), squeeze=False)[0]
        for axes, dataset in zip(panels, datasets, strict=False):
            members = [line for line in lines if line.dataset == dataset]
            rows = dict.fromkeys(line.row for line in members)
            for row, color in zip(rows, (BLUE, GREY), strict=False):
                found = [line for line in members if line.row == row and line.mean is not None]
                heights, spread = [line.mean for line in found], [line.deviation or 0.0 for line in found]
                axes.errorbar(
                    [line.heading for line in found], heights, yerr=spread, marker="D", color=color, capsize=3
                )
            printed = [line for line in members if line.method == "dpsr-cg" and line.printed is not None]
            percents = [float(line.printed.percent) for line in printed if line.printed is not None]
            axes.plot([line.heading for line in printed], percents, marker="o", markerfacecolor="none", color=RED)
            axes.set_title(dataset, fontsize=10)
            axes.set_xlabel("epsilon (delta 1e-5)")
            axes.set_xticks(sorted({line.heading for line in members}))
            axes.margins(x=0.12, y=0.12)
        panels[0].set_ylabel("test accuracy [%]")
        names = [*dict.fromkeys(line.row for line in lines), "the paper's DPSR-CG, as printed"]
        colors, markers = (BLUE, GREY, RED), ("D", "D", "o")
        handles = [
            Line2D([], [], marker=marker, color=color, label=name, markerfacecolor=color if marker == "D" else "none")
            for name, color, marker in zip(names, colors, markers, strict=False)
        ]
        figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False)
        return as_png(figure)


def _draw(axes: Axes, lines: Sequence[Line]) -> None:
    for height, line in enumerate(lines):
        if line.printed is not None:
            axes.plot(float(line.printed.percent), height, marker="o", markersize=8, markerfacecolor="none", color=RED)
        if line.mean is None:
            continue
        # What no proof holds to the heading is drawn hollow: its accuracy was bought with another privacy.
        filled = line.sound is not None
        axes.errorbar(
            line.mean,
            height,
            xerr=line.deviation,
            marker="D",
            markersize=5,
            capsize=3,
            color=BLUE if filled else GREY,
            markerfacecolor=BLUE if filled else "white",
        )
    axes.set_yticks(range(len(lines)), [line.row for line in lines])
    axes.set_ylim(len(lines) - 0.4, -0.6)
    axes.set_xlabel("test accuracy [%]")
    axes.grid(axis="y", color="#e4e4e4", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.margins(x=0.08)


def _legend() -> list[Line2D]:
    return [
        Line2D([], [], marker="D", linestyle="none", color=BLUE, label="ours, epsilon proved"),
        Line2D([], [], marker="D", linestyle="none", color=GREY, markerfacecolor="white", label="ours, not held to it"),
        Line2D([], [], marker="o", linestyle="none", color=RED, markerfacecolor="none", label="printed"),
    ]
