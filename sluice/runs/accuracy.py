"""Test accuracy over epsilon: what was learnt, and what a run that was planned to stop there would cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from sluice._base.figures import BLUE, as_png, as_svg, blank_figure


@dataclass(frozen=True, kw_only=True)
class AccuracyPoint:
    """Test accuracy after the releases that cost ``epsilon`` in a run that was planned to stop there."""

    epsilon: float
    test_accuracy: float


def accuracy_svg(points: Sequence[AccuracyPoint], *, delta: float) -> str:
    """The plot as SVG, byte for byte the same for the same points."""
    with blank_figure() as drawing:
        _draw(drawing, points, delta)
        return as_svg(drawing)


def accuracy_png(points: Sequence[AccuracyPoint], *, delta: float) -> bytes:
    """The plot as PNG, byte for byte the same for the same points and the same matplotlib."""
    with blank_figure() as drawing:
        _draw(drawing, points, delta)
        return as_png(drawing)


def _draw(drawing: Figure, points: Sequence[AccuracyPoint], delta: float) -> None:
    axes: Axes = drawing.add_subplot()
    epsilons = [point.epsilon for point in points]
    accuracies = [100 * point.test_accuracy for point in points]
    axes.plot(epsilons, accuracies, color=BLUE, linewidth=2, marker="o", markersize=4)
    axes.annotate(
        f"{accuracies[-1]:.2f} %",
        (epsilons[-1], accuracies[-1]),
        textcoords="offset points",
        xytext=(0, 8),
        ha="right",
        color=BLUE,
    )
    axes.set_xlabel(f"epsilon at delta = {delta:g} of a run planned to stop there")
    axes.set_ylabel("test accuracy [%]")
    axes.set_xlim(left=0)
    axes.margins(y=0.15)
