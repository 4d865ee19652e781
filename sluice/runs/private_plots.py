"""Private plots of a run, drawn without a display: for the developer's own eyes."""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes

from sluice._base.figures import as_png, blank_figure
from sluice._base.line_plot import BLUE, RED
from sluice.runs.trace import TraceRow


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
