"""How good a model is, in words and over epsilon: the one home of the names of scores and of how they are written."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from sluice._base.line_plot import BLUE, Line, LinePlot, Point

ACCURACY, SQUARED_ERROR, R_SQUARED, DEVIANCE = "accuracy", "mean_squared_error", "r_squared", "poisson_deviance"

_TITLES = {R_SQUARED: "R squared", DEVIANCE: "Poisson deviance"}


def by_name(accuracy: float | None, scores: Mapping[str, float] | None) -> Mapping[str, float]:
    """Accuracy of classes, or the scores of numbers, under their names, the main one first; nothing where both are None."""
    if scores is not None:
        return scores
    return {} if accuracy is None else {ACCURACY: accuracy}


def score_title(name: str) -> str:
    """A score's name within a sentence."""
    return _TITLES.get(name, name.replace("_", " "))


def score_titles(names: Iterable[str]) -> str:
    """Several names within a sentence.

    >>> score_titles(["mean_squared_error", "r_squared"])
    'mean squared error and R squared'
    """
    return " and ".join(map(score_title, names))


def score_text(name: str, value: float) -> str:
    """A score's value: accuracy in percent, others as they are."""
    return f"{100 * value:.2f} %" if name == ACCURACY else f"{value:.4g}"


def scores_text(scores: Mapping[str, float]) -> str:
    """Scores by name.

    >>> scores_text({"mean_squared_error": 0.25, "r_squared": 0.5})
    'mean squared error 0.25, R squared 0.5'
    """
    return ", ".join(f"{score_title(name)} {score_text(name, value)}" for name, value in scores.items())


def score_svg(points: Sequence[Point], *, score: str, delta: float) -> str:
    """A score on the test records over epsilon as SVG, byte for byte the same for the same points.

    Args:
        points: epsilon of a run that was planned to stop there, and the score that was reached.
        score: its name.
    """
    line = Line(points=drawn(points, score), color=BLUE, width=2.0, radius=3.0, note=score_text(score, points[-1][1]))
    return score_plot([line], score=score, x_label=f"epsilon at delta = {delta:g} of a run planned to stop there")


def score_plot(lines: Sequence[Line], *, score: str, x_label: str) -> str:
    """Lines of `drawn` points as SVG, with room above and below."""
    values = [y for line in lines for _, y in line.points]
    margin = 0.15 * (max(values) - min(values)) or 0.15 * abs(values[0]) or 1.0
    return LinePlot(
        x_label=x_label,
        y_label=f"test {score_title(score)}{' [%]' if score == ACCURACY else ''}",
        bottom=min(values) - margin,
        top=max(values) + margin,
        lines=lines,
    ).as_svg()


def drawn(points: Sequence[Point], score: str) -> list[Point]:
    """Points in the unit of the axis."""
    return [(epsilon, 100 * value) for epsilon, value in points] if score == ACCURACY else list(points)
