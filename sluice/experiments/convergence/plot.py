"""The convergence table as a plot: for each setting both bounds and what they are about."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from matplotlib.lines import Line2D

from sluice._base.figures import as_png, blank_figure
from sluice._base.line_plot import BLUE, GREY, RED
from sluice.experiments.convergence.study import Line


def convergence_png(lines: Sequence[Line]) -> bytes:
    """A panel for each problem: measured marks, bounds as bars to their left or right; each run is a mark."""
    problems = list(dict.fromkeys(line.setting.problem for line in lines))
    most = max((sum(line.setting.problem == name for line in lines) for name in problems), default=1)
    with blank_figure() as figure:
        figure.set_size_inches(6.2 * max(1, len(problems)), 1.4 + 0.3 * most)
        panels = figure.subplots(1, max(1, len(problems)), squeeze=False)[0]
        for axes, name in zip(panels, problems, strict=False):
            members = [line for line in lines if line.setting.problem == name]
            for height, line in enumerate(members):
                axes.plot([run.mean for run in line.runs], [height] * len(line.runs), "D", color=BLUE, markersize=4)
                bounds = [terms.total for terms in line.terms]
                axes.plot(bounds, [height] * len(bounds), "|", color=BLUE, markersize=14, markeredgewidth=2)
                if line.paper:
                    below = (line.paper_share or 0) > 1
                    smallest = fmean(run.smallest for run in line.runs)
                    axes.plot(smallest, height + 0.3, "o", color=GREY, markersize=4)
                    paper = fmean(terms.total for terms in line.paper)
                    color = RED if below else GREY
                    axes.plot(paper, height + 0.3, "|", color=color, markersize=12, markeredgewidth=2)
            axes.set_yticks(range(len(members)), [_label(line) for line in members], fontsize=8)
            axes.set_ylim(len(members) - 0.2, -0.8)
            axes.set_xscale("log")
            axes.set_xlabel("squared gradient norm")
            axes.set_title(name, fontsize=10)
            axes.grid(axis="y", color="#eeeeee", linewidth=0.8)
            axes.set_axisbelow(True)
        figure.legend(
            handles=_legend(),
            loc="outside lower center",
            ncols=3 if len(problems) > 1 else 1,
            frameon=False,
            fontsize=9,
        )
        return as_png(figure)


def _label(line: Line) -> str:
    setting = line.setting
    gate = "no gate" if setting.beta is None else f"beta {setting.beta:g}"
    return f"S {setting.bound:g}, eps {setting.epsilon:g}, lr {setting.lr:g}, {gate}"


def _legend() -> list[Line2D]:
    def mark(shape: str, color: str, label: str) -> Line2D:
        return Line2D([], [], marker=shape, linestyle="none", color=color, label=label, markeredgewidth=2)

    return [
        mark("D", BLUE, "mean over a run (each seed)"),
        mark("|", BLUE, "the proved bound on it"),
        mark("o", GREY, "smallest of a run (mean over seeds)"),
        mark("|", GREY, "the paper's bound on it: holds"),
        mark("|", RED, "the paper's bound on it: fails"),
    ]
