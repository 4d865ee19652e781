"""Test accuracy over epsilon: what was learnt, and what a run that was planned to stop there would cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sluice._base.line_plot import BLUE, Line, LinePlot


@dataclass(frozen=True, kw_only=True)
class AccuracyPoint:
    """Test accuracy after the releases that cost ``epsilon`` in a run that was planned to stop there."""

    epsilon: float
    test_accuracy: float


def accuracy_svg(points: Sequence[AccuracyPoint], *, delta: float) -> str:
    """The plot as SVG, byte for byte the same for the same points."""
    percent = [(point.epsilon, 100 * point.test_accuracy) for point in points]
    lowest, highest = min(y for _, y in percent), max(y for _, y in percent)
    margin = 0.15 * (highest - lowest) or 1.0
    return LinePlot(
        x_label=f"epsilon at delta = {delta:g} of a run planned to stop there",
        y_label="test accuracy [%]",
        bottom=lowest - margin,
        top=highest + margin,
        lines=[Line(points=percent, color=BLUE, width=2.0, radius=3.0, note=f"{percent[-1][1]:.2f} %")],
    ).as_svg()
