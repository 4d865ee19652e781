"""The public plot of a run: epsilon over releases."""

from __future__ import annotations

import math
from collections.abc import Iterator

from sluice._base.line_plot import BLUE, GREY, RED, Line, LinePlot
from sluice._base.rounding import rounded_up
from sluice.runs.ledger import LedgerContents
from sluice.runs.privacy_spent import epsilon_over_releases, mechanism_of

_POINTS = 12


def epsilon_plot(contents: LedgerContents) -> str:
    """Epsilon over releases as SVG: of runs planned to stop there, of this run's whole plan, and the budget.

    Guarantee:
        A function of the ledger alone. The only figure in it is that of the whole plan.
    """
    spent = contents.spent
    mechanism = mechanism_of(contents.header)
    planned = mechanism.covered_releases(spent)
    # Epsilon rises like a square root: points at squares are about as far apart along the curve.
    counts = sorted({math.ceil(planned * (step / _POINTS) ** 2) for step in range(1, _POINTS + 1)} | {1, max(spent, 1)})
    pairs = zip(counts, epsilon_over_releases(contents, counts=counts), strict=True)
    known = [(count, epsilon) for count, epsilon in pairs if epsilon is not None and math.isfinite(epsilon)]
    budget = contents.header.target_epsilon
    level = None
    if budget is not None:
        level = Line(points=[(0.0, budget)], color=RED, dash="dashed", label=f"budget {budget:g}")
    highest = max([*(epsilon for _, epsilon in known), budget or 0.0]) or 1.0
    return LinePlot(
        x_label="released updates",
        y_label=f"epsilon at delta = {contents.header.delta:g}\nof a run planned to stop there",
        bottom=0.0,
        top=1.12 * highest,
        lines=list(_lines(known, spent=spent, planned=planned if mechanism.stages is None else None)),
        level=level,
        empty="no finite epsilon is proved for this run",
    ).as_svg()


def _lines(known: list[tuple[int, float]], *, spent: int, planned: int | None) -> Iterator[Line]:
    past = [point for point in known if point[0] <= spent]
    future = [point for point in known if point[0] >= max(spent, 1)]
    if len(future) > 1:
        yield Line(points=future, color=GREY, dash="dotted", label="releases not made")
    if past:
        yield Line(points=past, color=BLUE, width=2.0, label="releases made")
    for whole in [point for point in known if point[0] == planned]:
        yield Line(
            points=[whole],
            color=BLUE,
            width=0.0,
            radius=4.0,
            label="this run: the whole plan",
            note=rounded_up(whole[1]),
        )
