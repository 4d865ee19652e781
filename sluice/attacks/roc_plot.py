"""ROC curves on logarithmic axes, where small false positive rates can be seen, beside what is claimed."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from matplotlib.axes import Axes

from sluice._base.figures import as_png, blank_figure
from sluice._base.line_plot import BLUE, GREEN, GREY, RED
from sluice.attacks.evaluation import RocCurve, largest_true_positive_rate

_COLOURS = (BLUE, GREEN, "#aa3377", "#b8860b", "#117a8b", "#444444")


def roc_plot(
    curves: Mapping[str, RocCurve], *, epsilon: float | None = None, delta: float = 1e-5, title: str = ""
) -> bytes:
    """The curves by name, as PNG. They are functions of who is a member: for private data, private.

    Args:
        epsilon: draws the limit that (epsilon, delta) puts on every attack.
    """
    floor = 1 / max(max(curve.non_members, curve.members) for curve in curves.values())
    with blank_figure() as figure:
        axes: Axes = figure.add_subplot()
        for number, (name, curve) in enumerate(curves.items()):
            rates = np.maximum(curve.false_positive_rates, floor), np.maximum(curve.true_positive_rates, floor)
            axes.plot(*rates, label=name, color=_COLOURS[number % len(_COLOURS)], linewidth=1.4)
        grid = np.geomspace(floor, 1, 200)
        axes.plot(grid, grid, color=GREY, linestyle=":", linewidth=1, label="guessing")
        if epsilon is not None:
            limit = largest_true_positive_rate(grid, epsilon=epsilon, delta=delta)
            axes.plot(grid, limit, color=RED, linestyle="--", linewidth=1, label=f"limit of epsilon {epsilon:.3g}")
        axes.set(xscale="log", yscale="log", xlim=(floor, 1), ylim=(floor, 1), title=title)
        axes.set(xlabel="false positive rate", ylabel="true positive rate")
        axes.legend(loc="lower right", fontsize=8, frameon=False)
        return as_png(figure)
