"""The paper's figures on beta: shares of good and bad updates, and the accuracy that comes of them."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.patches import Patch

from sluice._base.figures import as_png, blank_figure
from sluice._base.line_plot import BLUE, GREY, RED
from sluice.experiments.beta.study import GATE, Line, Share

_WIDTH = 0.38


def shares_png(lines: Sequence[Line], dataset: str) -> bytes:
    """For each beta a bar of the accepted and one of the rejected updates, each split into good and bad, with its interval."""
    members = [line for line in lines if line.dataset == dataset and line.gate == GATE]
    with blank_figure() as figure:
        axes = figure.subplots()
        for place, line in enumerate(members):
            for side, share, hatch in ((-1, line.accepted, ""), (1, line.rejected, "///")):
                _bar(axes, place + side * (_WIDTH / 2 + 0.02), share, hatch)
        axes.set_xticks(range(len(members)), [f"{line.beta:g}" for line in members])
        axes.set_xlabel("beta")
        axes.set_ylabel("share of the set [%]")
        axes.set_ylim(0, 100)
        axes.set_title(f"{dataset}: good and bad updates in the accepted and the rejected set", fontsize=10)
        figure.legend(
            handles=[
                Patch(facecolor=BLUE, label="good accepted"),
                Patch(facecolor=RED, label="bad accepted"),
                Patch(facecolor=BLUE, hatch="///", alpha=0.6, label="good rejected"),
                Patch(facecolor=RED, hatch="///", alpha=0.6, label="bad rejected"),
            ],
            loc="outside lower center",
            ncols=4,
            frameon=False,
        )
        return as_png(figure)


def _bar(axes: Axes, place: float, share: Share, hatch: str) -> None:
    if share.value is None:
        return
    good, alpha = 100 * share.value, 0.6 if hatch else 1.0
    low, high = share.interval
    axes.bar(place, good, _WIDTH, color=BLUE, hatch=hatch, alpha=alpha)
    axes.bar(place, 100 - good, _WIDTH, bottom=good, color=RED, hatch=hatch, alpha=alpha)
    axes.errorbar(
        place, good, yerr=[[max(0.0, good - 100 * low)], [max(0.0, 100 * high - good)]], color="black", capsize=3
    )


def accuracy_png(lines: Sequence[Line]) -> bytes:
    """A panel for each data set: accuracy over beta, of the gate and of a coin in its place."""
    datasets = list(dict.fromkeys(line.dataset for line in lines))
    with blank_figure() as figure:
        figure.set_size_inches(4.2 * max(1, len(datasets)), 3.4)
        panels = figure.subplots(1, max(1, len(datasets)), squeeze=False)[0]
        for axes, dataset in zip(panels, datasets, strict=False):
            for gate, color, shift in ((GATE, BLUE, -0.05), ("coin", GREY, 0.05)):
                found = [
                    line for line in lines if (line.dataset, line.gate) == (dataset, gate) and line.accuracy is not None
                ]
                axes.errorbar(
                    [line.beta + shift for line in found],
                    [line.accuracy or 0.0 for line in found],
                    yerr=[line.deviation or 0.0 for line in found],
                    marker="D",
                    capsize=3,
                    color=color,
                    label=gate,
                )
            axes.set_title(dataset, fontsize=10)
            axes.set_xlabel("beta")
            axes.margins(x=0.1, y=0.15)
        panels[0].set_ylabel("test accuracy [%]")
        panels[0].legend(frameon=False)
        return as_png(figure)


__all__ = ["accuracy_png", "shares_png"]
