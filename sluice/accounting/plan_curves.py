"""Epsilon over the number of releases, for the plan's plot: as SVG, and in characters for a terminal."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from sluice._base.line_plot import BLUE, GREEN, GREY, RED, Line, LinePlot
from sluice.accounting import dpa
from sluice.accounting.calibration import Calibration, release_event
from sluice.accounting.claims import CLAIMED_LABEL, claimed_account
from sluice.accounting.gate_terms import ClaimedGate
from sluice.accounting.pld_accountant import SelectivePLDAccountant

# A plot of a few hundred pixels shows no more than this.
_PLOT_TOLERANCE = 2e-3


@dataclass(frozen=True, kw_only=True)
class Curve:
    """One line of the plot: its name, the letter it is drawn with on a terminal, and epsilon at each release count."""

    name: str
    letter: str
    epsilons: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class PlanCurves:
    releases: tuple[int, ...]
    curves: tuple[Curve, ...]
    target_epsilon: float


def plan_curves(plan: Calibration, *, points: int = 12) -> PlanCurves:
    """Epsilon of plain DP-SGD, of the planned mechanism, and as the paper would claim, up to the planned releases."""
    counts = sorted({max(1, round(plan.releases * (step / points) ** 1.5)) for step in range(1, points + 1)})
    plain = release_event(sample_rate=plan.sample_rate, noise_multiplier=plan.noise_multiplier, gate=None)
    curves = [Curve(name="plain DP-SGD, same noise (PLD)", letter="o", epsilons=_epsilons(plan, plain, counts))]
    if plan.gate is not None:
        release = release_event(sample_rate=plan.sample_rate, noise_multiplier=plan.noise_multiplier, gate=plan.gate)
        curves.append(
            Curve(name="selective release, proved (PLD)", letter="#", epsilons=_epsilons(plan, release, counts))
        )
    if isinstance(plan.gate, ClaimedGate) and plan.gate.gate_noise is not None:
        account = claimed_account(
            sample_rate=plan.sample_rate,
            noise_multiplier=plan.noise_multiplier,
            gate_noise=plan.gate.gate_noise,
            beta=plan.gate.beta,
            clip_range=plan.gate.clip_range,
            once=dpa.ComposedDpEvent([dpa.GaussianDpEvent(multiplier) for multiplier in plan.prior_releases]),
        )
        claimed = tuple(account.claimed_epsilon(releases=count, delta=plan.delta) for count in counts)
        curves.append(Curve(name=f"selective release, {CLAIMED_LABEL}, RDP", letter="?", epsilons=claimed))
    return PlanCurves(releases=tuple(counts), curves=tuple(curves), target_epsilon=plan.target_epsilon)


def _epsilons(plan: Calibration, event: dpa.DpEvent, counts: Sequence[int]) -> tuple[float, ...]:
    def after(count: int) -> float:
        accountant = SelectivePLDAccountant(tolerance=_PLOT_TOLERANCE)
        for multiplier in plan.prior_releases:
            accountant.compose(dpa.GaussianDpEvent(multiplier))
        accountant.compose(event, count)
        return accountant.get_epsilon(plan.delta)

    return tuple(after(count) for count in counts)


def in_characters(curves: PlanCurves, *, width: int = 64, height: int = 16) -> str:
    """The plot for a terminal. Where lines meet, the proved one is on top."""
    finite = [e for curve in curves.curves for e in curve.epsilons if math.isfinite(e)]
    top = max([*finite, curves.target_epsilon]) * 1.02
    last = curves.releases[-1]
    canvas = [[" "] * width for _ in range(height)]
    target_row = _row(curves.target_epsilon, top, height)
    canvas[target_row] = ["-"] * width
    for curve in sorted(curves.curves, key=lambda each: each.letter == "#"):
        for column in range(width):
            epsilon = _interpolate(curves.releases, curve.epsilons, last * (column + 1) / width)
            if math.isfinite(epsilon):
                canvas[_row(epsilon, top, height)][column] = curve.letter
    lines = []
    for row, cells in enumerate(canvas):
        label = f"{top * (height - 1 - row) / (height - 1):8.3g}" if row % 3 == 0 else " " * 8
        lines.append(f"{label} |{''.join(cells)}".rstrip())
    lines.append(" " * 9 + "+" + "-" * width)
    lines.append(" " * 10 + "0" + f"{last} releases".rjust(width - 1))
    legend = [f"{curve.letter} {curve.name}" for curve in curves.curves]
    lines += ["", "epsilon:  " + "   ".join([*legend, f"- target {curves.target_epsilon:g}"])]
    return "\n".join(lines)


def _row(epsilon: float, top: float, height: int) -> int:
    return height - 1 - min(height - 1, max(0, round(epsilon / top * (height - 1))))


def _interpolate(counts: Sequence[int], values: Sequence[float], at: float) -> float:
    """Between known points along the square root of the count, which epsilon roughly follows; nothing before 0."""
    previous_count, previous_value = 0.0, 0.0
    for count, value in zip(counts, values, strict=True):
        if at <= count:
            if math.isinf(value):
                return value
            span = math.sqrt(count) - math.sqrt(previous_count)
            return previous_value + (value - previous_value) * (math.sqrt(at) - math.sqrt(previous_count)) / span
        previous_count, previous_value = count, value
    return values[-1]


def as_svg(curves: PlanCurves) -> str:
    """The plot as SVG, byte for byte the same for the same curves."""
    styles = {"o": (BLUE, "solid"), "#": (GREEN, "solid"), "?": (RED, "dashed")}
    target = curves.target_epsilon
    finite = [e for curve in curves.curves for e in curve.epsilons if math.isfinite(e)]
    return LinePlot(
        x_label="releases",
        y_label="epsilon",
        bottom=0.0,
        top=1.05 * max([*finite, target]) or 1.0,  # an epsilon of 0 is possible, an empty axis is not
        lines=[_line(curve, curves.releases, *styles[curve.letter]) for curve in curves.curves],
        level=Line(points=[(0.0, target)], color=GREY, dash="dotted", width=1.0, label="target"),
    ).as_svg()


def _line(curve: Curve, releases: Sequence[int], color: str, dash: str) -> Line:
    pairs = zip(releases, curve.epsilons, strict=True)
    return Line(points=[each for each in pairs if math.isfinite(each[1])], color=color, dash=dash, label=curve.name)
