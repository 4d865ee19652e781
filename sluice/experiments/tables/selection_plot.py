"""The study of selection as a plot: one panel for each block, differences to "no gate" with confidence intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence

from matplotlib.axes import Axes

from sluice._base.figures import as_png, blank_figure
from sluice._base.line_plot import BLUE, GREY, RED
from sluice.experiments.tables.selection import SelectionLine
from sluice.experiments.tables.selection_texts import arm_text, block_title, blocks

_ACROSS = 2
_WIDE = 10.0
_COLORS = {"better": BLUE, "worse": RED}


def selection_png(lines: Sequence[SelectionLine]) -> bytes:
    """Grey where the interval holds 0, blue where it is above, red where it is below."""
    panels = [(key, [line for line in members if line.difference is not None]) for key, members in blocks(lines)]
    panels = [(key, members) for key, members in panels if members]
    across = min(_ACROSS, len(panels)) or 1
    down = max(1, math.ceil(len(panels) / across))
    heights = [
        max((len(members) for _, members in panels[row * across : (row + 1) * across]), default=1) + 4
        for row in range(down)
    ]
    with blank_figure() as figure:
        figure.set_size_inches(6.2 * across, 0.27 * sum(heights) + 0.3)
        grid = figure.subplots(down, across, squeeze=False, height_ratios=heights)
        for axes in grid.flat[len(panels) :]:
            axes.set_axis_off()
        for axes, (key, members) in zip(grid.flat, panels, strict=False):
            axes.set_title(block_title(*key), fontsize=10)
            _draw(axes, members)
        return as_png(figure)


def _draw(axes: Axes, lines: Sequence[SelectionLine]) -> None:
    axes.axvline(0, color="#888888", linewidth=0.8)
    for height, line in enumerate(lines):
        difference = line.difference
        assert difference is not None
        color = _COLORS.get(difference.verdict, GREY)
        axes.errorbar(
            difference.mean, height, xerr=difference.half_width, marker="D", markersize=4, capsize=3, color=color
        )
    widest = max((abs(line.difference.mean) for line in lines if line.difference is not None), default=0.0)
    if widest > _WIDE:  # the small differences are the interesting ones
        axes.set_xscale("symlog", linthresh=1.0, linscale=1.0)
        axes.xaxis.set_major_formatter(lambda value, place: f"{value:g}")
    axes.set_yticks(range(len(lines)), [arm_text(line) for line in lines], fontsize=8)
    axes.set_ylim(len(lines) - 0.4, -0.6)
    axes.set_xlabel("points of test accuracy, less no gate", fontsize=8)
    axes.tick_params(axis="x", labelsize=8)
    axes.grid(axis="y", color="#eeeeee", linewidth=0.8)
    axes.set_axisbelow(True)
