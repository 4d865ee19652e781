"""What the planner is asked and what it answers: one run's settings, and what they cost."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from sluice._base import validate
from sluice._base.errors import InputError
from sluice._base.rounding import rounded_up
from sluice.accounting.calibration import Calibration, calibrate
from sluice.accounting.gate_calibration import REFERENCE_RATIO
from sluice.accounting.plan_curves import as_svg, plan_curves
from sluice.accounting.privacy_report import PrivacyReport, privacy_report
from sluice.mechanism.delta import delta_problem
from sluice.mechanism.gates import ClippingBiasGate
from sluice.mechanism.rates import exact_sample_rate

GATES = ("none", "clipping-bias")

#: The ends of each slider. What lies outside may cost minutes to compute, or means nothing.
LIMITS: dict[str, tuple[float, float]] = {
    "dataset_size": (100, 1e9),
    "batch_size": (1, 1e9),
    "releases": (1, 100_000),
    "delta": (1e-12, 0.1),
    "target_epsilon": (0.05, 20),
    "noise_multiplier": (0.3, 200),
    "beta": (-5, 10),
}


@dataclass(frozen=True, kw_only=True)
class Question:
    """A run that is being planned: either by the epsilon that it may cost, or by its noise.

    Attributes:
        target_epsilon: the noise is chosen for it. Or:
        noise_multiplier: epsilon follows from it.
        gate: "none" for plain DP-SGD, "clipping-bias" for selective release.
        beta: threshold of the gate.
    """

    dataset_size: int
    batch_size: int
    releases: int
    delta: float
    target_epsilon: float | None = None
    noise_multiplier: float | None = None
    gate: str = "none"
    beta: float = 3.0

    def __post_init__(self) -> None:
        validate.one_of(GATES, gate=self.gate)
        if (self.target_epsilon is None) == (self.noise_multiplier is None):
            raise InputError("target_epsilon and noise_multiplier: give exactly one of them.")
        for name, (low, high) in LIMITS.items():
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                raise InputError(f"{name}={value:g} is not allowed: it must be from {low:g} to {high:g}.")
        if self.batch_size > self.dataset_size:
            raise InputError(
                f"batch_size={self.batch_size} is not allowed: it must be at most dataset_size={self.dataset_size}."
            )

    @classmethod
    def read(cls, words: Mapping[str, str]) -> Question:
        """From the text of a query. Whole numbers may be written 1e6."""
        known = {field.name for field in fields(cls)}
        if unknown := sorted(set(words) - known):
            raise InputError(f"{unknown[0]!r} is not allowed: known are {', '.join(sorted(known))}.")
        values: dict[str, Any] = {name: _number(name, text) for name, text in words.items() if name != "gate"}
        for name in ("dataset_size", "batch_size", "releases"):
            if name not in values:
                raise InputError(f"{name} is missing.")
            if not values[name].is_integer():
                raise InputError(f"{name}={values[name]:g} is not allowed: it must be an integer.")
            values[name] = int(values[name])
        if "delta" not in values:
            raise InputError("delta is missing.")
        return cls(**values, gate=words.get("gate", "none"))

    @property
    def sample_rate(self) -> float:
        return exact_sample_rate(batch_size=self.batch_size, dataset_size=self.dataset_size)

    @property
    def command(self) -> str:
        """What to type for the same answer."""
        words = [
            f"--dataset-size {self.dataset_size} --batch-size {self.batch_size}",
            f"--releases {self.releases} --delta {self.delta:g}",
        ]
        if self.target_epsilon is not None:
            gate = f"--beta {self.beta:g}" if self.gate != "none" else "--no-gate"
            return " ".join(["sluice plan", *words, f"--epsilon {self.target_epsilon:g}", gate])
        gate = f" --gate-noise {self.noise_multiplier:g} --beta {self.beta:g}" if self.gate != "none" else ""
        return " ".join(["sluice epsilon", *words, f"--noise-multiplier {self.noise_multiplier:g}"]) + gate


@functools.lru_cache(maxsize=512)
def answer(question: Question) -> Mapping[str, Any]:
    """What the page shows: figures as text, warnings, the plot, and the command that gives the same."""
    plan = _planned(question)
    plain = _plain(question)
    report = privacy_report(
        sample_rate=plan.sample_rate,
        noise_multiplier=plan.noise_multiplier,
        releases=plan.releases,
        delta=plan.delta,
        gate=plan.gate,
    )
    return {
        "epsilon": rounded_up(report.pld),
        "figures": _figures(question, plan, plain, report),
        "warnings": _warnings(question, report),
        "svg": as_svg(plan_curves(plan)),
        "command": question.command,
    }


def _planned(question: Question) -> Calibration:
    if question.target_epsilon is not None:
        return _calibrated(question, _gate(question))
    noise = question.noise_multiplier or 0.0
    gate = _gate(question)
    if gate is not None:
        gate = gate.with_noise(gate_noise=noise, reference_noise=REFERENCE_RATIO * noise)
    report = privacy_report(
        sample_rate=question.sample_rate,
        noise_multiplier=noise,
        releases=question.releases,
        delta=question.delta,
        gate=gate,
    )
    return Calibration(
        sample_rate=question.sample_rate,
        noise_multiplier=noise,
        releases=question.releases,
        gate=gate,
        prior_releases=(),
        accountant="pld",
        epsilon=report.pld,
        target_epsilon=report.pld,
        delta=question.delta,
    )


def _gate(question: Question) -> ClippingBiasGate | None:
    """Charged for rounding as a run is, for the norms that cost most: which ones count is not asked."""
    if question.gate == "none":
        return None
    expected = question.sample_rate * question.dataset_size
    return ClippingBiasGate(beta=question.beta).for_batches_of(expected, small_norm=math.inf)


def _plain(question: Question) -> Calibration | None:
    return _calibrated(question, None) if question.target_epsilon is not None else None


def _calibrated(question: Question, gate: ClippingBiasGate | None) -> Calibration:
    assert question.target_epsilon is not None
    return calibrate(
        sample_rate=question.sample_rate,
        releases=question.releases,
        target_epsilon=question.target_epsilon,
        target_delta=question.delta,
        gate=gate,
    )


def _figures(
    question: Question, plan: Calibration, plain: Calibration | None, report: PrivacyReport
) -> list[tuple[str, str]]:
    rows = [("epsilon, proved", rounded_up(report.pld)), ("noise multiplier", rounded_up(plan.noise_multiplier))]
    if plan.gate is not None:
        rows += [
            ("gate noise", rounded_up(plan.gate.gate_noise)),
            ("reference noise multiplier", rounded_up(plan.gate.reference_noise)),
            ("worst batch is accepted with probability", f"{plan.gate.acceptance.probability_min:.3g}"),
            ("plain DP-SGD with this noise: epsilon", rounded_up(report.plain_pld)),
        ]
        if plain is not None:
            rows.append(("plain DP-SGD needs a noise multiplier of", rounded_up(plain.noise_multiplier)))
        if report.paper_rdp is not None:
            rows.append(("claimed by the paper's formula, no guarantee", rounded_up(report.paper_rdp)))
    rows += [
        ("sample rate", f"{plan.sample_rate:.4g}"),
        ("passes over the data", f"{plan.sample_rate * plan.releases:.4g}"),
    ]
    return rows


def _warnings(question: Question, report: PrivacyReport) -> list[str]:
    problem = delta_problem(question.delta, records=question.dataset_size)
    warnings = [problem] if problem else []
    if report.pld > 10:
        warnings.append("An epsilon above 10 promises little on paper.")
    return warnings


def _number(name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise InputError(f"{name}={text[:40]!r} is not allowed: it must be a number.") from None
    validate.finite(**{name: value})
    return value
