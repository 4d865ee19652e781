"""An audit as a page of its own: verdict, bounds beside claim and ceiling, and what the guesses were based on."""

from __future__ import annotations

import math
from collections.abc import Iterator
from html import escape

import numpy as np
import scipy

from sluice._base.html_page import document
from sluice._base.line_plot import BLUE, GREEN, GREY, RED, Line, LinePlot, Point
from sluice._base.rounding import rounded_up
from sluice.audit.evidence import Evidence
from sluice.audit.guesses import METHODS
from sluice.audit.result import AuditResult
from sluice.audit.scores import right_guesses
from sluice.audit.trials import Trials
from sluice.runs.pages import Section, html_section

Array = np.ndarray

TITLE = "Privacy audit"
COMMANDS = (
    "sluice audit rehearse --run RUN: the run's own mechanism on stand-in records, with canaries; spends nothing",
    "sluice audit rehearse --run RUN --two-runs 4000: one release, as tightly as can be",
    "sluice audit show RUN: this result again; the exit code is 1 where the claim is refuted",
)

_BINS = 40
_COUNTS = 60
_INTERVAL = 0.95


def audit_page(evidence: Evidence | Trials) -> str:
    """The page in HTML, plots inside. It loads nothing from anywhere and runs no script.

    Guarantee:
        A function of what was released on the canaries' own coordinates and of the auditor's coins: of no record.
    """
    result = evidence.result
    name = result.bounds[0].score
    scores = _drawable(evidence.scores[name] if isinstance(evidence, Evidence) else evidence.scores)
    members = np.asarray(evidence.members).astype(bool)
    body = [f"<h1>{TITLE}</h1>", f'<p class="headline">{escape(_headline(result))}</p>']
    if result.refuted:
        body.append('<p class="warning">The claim is refuted: do not publish anything that rests on it.</p>')
    body.append(
        html_section(
            Section(
                title="What was found",
                paragraphs=(
                    "An audit can refute a claim and never prove one: what is proved is on the certificate. Bounds are for "
                    "the epsilon that the run has at least.",
                ),
                rows=result.rows,
                items=result.notes,
            ),
            plots={"Lower bounds beside claim and ceiling": _bounds_plot(result)},
        )
    )
    body.append(
        html_section(
            Section(
                title="How well canaries are told apart",
                paragraphs=(
                    f"By the score '{name}': the share of canaries in the data that lie above a threshold, over the share of the "
                    f"others. Dotted: {_INTERVAL:.0%} intervals for each threshold alone.",
                ),
            ),
            plots={"ROC curve on logarithmic axes": _roc_plot(scores, members, result)},
        )
    )
    body.append(html_section(Section(title="Scores"), plots={"Histogram of scores": _histogram(scores, members, name)}))
    if isinstance(evidence, Evidence):
        body.append(
            html_section(
                Section(
                    title="Number of guesses",
                    paragraphs=(
                        "Exploratory, but for the points: a bound holds at the number of guesses that was fixed beforehand. The best "
                        "of the others is no bound.",
                    ),
                ),
                plots={"Bound over the number of guesses": _guesses_plot(evidence, result)},
            )
        )
    body.append(html_section(Section(title="Commands", items=COMMANDS), plots={}))
    return document(TITLE, "\n".join(body))


def _drawable(scores: Array) -> Array:
    """Infinite scores at the ends of the others, in the same order."""
    values = np.asarray(scores, dtype=float)
    finite = values[np.isfinite(values)]
    low, high = (finite.min() - 1.0, finite.max() + 1.0) if len(finite) else (-1.0, 1.0)
    drawable: Array = np.clip(values, low, high)
    return drawable


def _headline(result: AuditResult) -> str:
    bound = (
        f"epsilon is at least {math.floor(1000 * result.lower_bound) / 1000:.3f}, at {result.confidence:.0%} confidence"
    )
    if result.claimed is None:
        return f"Nothing is claimed; {bound}."
    return f"The claim of epsilon = {rounded_up(result.claimed)} is {result.verdict}; {bound}."


def _bounds_plot(result: AuditResult) -> str:
    """Each bound as a point on the line up to its ceiling, and the claim."""
    highest = max([result.claimed or 0.0, *(bound.ceiling for bound in result.bounds)]) or 1.0
    lines = []
    for number, (bound, color) in enumerate(zip(result.bounds, (BLUE, GREEN), strict=False)):
        height = len(result.bounds) - number
        known = "no assumption" if not bound.assumption else "if Gaussian"
        lines.append(Line(points=[(0.0, height), (bound.ceiling, height)], color=color, dash="dotted", width=1.2))
        lines.append(Line(points=[(0.0, height), (bound.lower_bound, height)], color=color, width=5.0, label=known))
    claim = []
    if result.claimed is not None:
        claim = [Line(points=[(result.claimed, 0.0)], color=RED, dash="dashed", label="claim")]
    return LinePlot(
        x_label=f"epsilon at delta = {result.delta:g} (dotted: up to the ceiling)",
        y_label="lower bound",
        bottom=0.0,
        top=len(result.bounds) + 1.0,
        right=1.04 * highest,
        lines=lines,
        upright=claim,
        y_ticks=False,
    ).as_svg()


def _roc_plot(scores: Array, members: Array, result: AuditResult) -> str:
    false, true = _rates(scores, members)
    inside, outside = int(members.sum()), int((~members).sum())
    floor = 0.5 / max(inside, outside)

    def line(x: Array, y: Array, color: str, **style: object) -> Line:
        points: list[Point] = [
            (max(float(a), floor), min(max(float(b), floor), 1.0)) for a, b in zip(x, y, strict=True)
        ]
        return Line(points=points, color=color, **style)  # type: ignore[arg-type]

    hits = np.round(true * inside)
    low, high = _intervals(hits, inside)
    grid = np.geomspace(floor, 1.0, 100)
    lines = [
        line(grid, grid, GREY, dash="dotted", width=1.0, label="guessing"),
        line(false, low, BLUE, dash="dotted", width=0.8),
        line(false, high, BLUE, dash="dotted", width=0.8),
        line(false, true, BLUE, width=2.0, label="canaries"),
    ]
    if result.claimed is not None:
        factor = math.exp(min(result.claimed, 700.0))
        upper = np.minimum(factor * grid + result.delta, 1 - (1 - result.delta - grid) / factor)
        lines.append(line(grid, upper, RED, dash="dashed", label="limit of the claim"))
    return LinePlot(
        x_label="canaries that are out, above the threshold",
        y_label="canaries that are in, above it",
        bottom=floor,
        top=1.0,
        left=floor,
        right=1.0,
        logarithmic=True,
        lines=lines,
    ).as_svg()


def _rates(scores: Array, members: Array) -> tuple[Array, Array]:
    """False and true positive rates at every threshold; equal scores pass it together."""
    order = np.argsort(-scores, kind="stable")
    ranked, inside = scores[order], members[order]
    ends = np.flatnonzero(np.append(ranked[1:] != ranked[:-1], True))
    true, false = np.cumsum(inside)[ends], np.cumsum(~inside)[ends]
    return (
        np.concatenate([[0.0], false / max(1, (~members).sum())]),
        np.concatenate([[0.0], true / max(1, members.sum())]),
    )


def _intervals(hits: Array, trials: int) -> tuple[Array, Array]:
    tail = (1 - _INTERVAL) / 2
    with np.errstate(invalid="ignore"):
        low = np.where(hits == 0, 0.0, scipy.special.betaincinv(hits, trials - hits + 1, tail))
        high = np.where(hits == trials, 1.0, scipy.special.betaincinv(hits + 1, trials - hits, 1 - tail))
    return low, high


def _histogram(scores: Array, members: Array, name: str) -> str:
    left, right = np.quantile(scores, [0.001, 0.999])
    if not right > left:
        left, right = float(scores.min()) - 0.5, float(scores.max()) + 0.5
    edges = np.linspace(left, right, _BINS + 1)

    def steps(part: Array) -> Iterator[Point]:
        counts, _ = np.histogram(np.clip(part, left, right), bins=edges)
        shares = counts / max(1, len(part))
        for start, end, share in zip(edges[:-1], edges[1:], shares, strict=True):
            yield from ((float(start), float(share)), (float(end), float(share)))

    inside, outside = list(steps(scores[members])), list(steps(scores[~members]))
    return LinePlot(
        x_label=f"score: {name}",
        y_label="share of canaries",
        bottom=0.0,
        top=1.25 * max(share for _, share in [*inside, *outside]),
        left=float(left),
        right=float(right),
        lines=[Line(points=outside, color=GREY, label="out"), Line(points=inside, color=BLUE, label="in")],
        legend_on_top=True,
    ).as_svg()


def _guesses_plot(evidence: Evidence, result: AuditResult) -> str:
    members = np.asarray(evidence.members).astype(bool)
    count = len(members)
    candidates = sorted({2 * round(each / 2) for each in np.linspace(2, count, _COUNTS)} - {0})
    lines = []
    for bound, color in zip(result.bounds, (BLUE, GREEN), strict=True):
        scores, share = evidence.scores[bound.score], evidence.plan.confidence_of(bound.score)

        def value(guesses: int, scores: Array = scores, share: float = share, method: str = bound.method) -> float:
            correct = right_guesses(scores, members, guesses=guesses)
            return METHODS[method](
                canaries=count, guesses=guesses, correct=correct, delta=evidence.delta, confidence=share
            )

        known = "no assumption" if not bound.assumption else "if Gaussian"
        lines.append(Line(points=[(each, value(each)) for each in candidates], color=color, width=1.0, label=known))
        lines.append(Line(points=[(bound.guesses, bound.lower_bound)], color=color, width=0.0, radius=4.0))
    level = None
    if result.claimed is not None:
        level = Line(points=[(0.0, result.claimed)], color=RED, dash="dashed", label="claim")
    highest = max([result.claimed or 0.0, *(y for line in lines for _, y in line.points)]) or 1.0
    return LinePlot(
        x_label="guesses",
        y_label=f"lower bound on epsilon at delta = {evidence.delta:g}",
        bottom=0.0,
        top=1.35 * highest,
        lines=lines,
        level=level,
        legend_on_top=True,
    ).as_svg()


__all__ = ["audit_page"]
