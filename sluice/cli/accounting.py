"""``sluice epsilon`` and ``sluice plan``: what a run costs, and the noise that a budget needs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sluice.cli.gate_options import (
    Beta,
    ClipRange,
    GateNoise,
    GateOptions,
    LargeNorm,
    MaxAttempts,
    MovedRecords,
    ReferenceNoise,
    SmallNorm,
    Strength,
)
from sluice.cli.output import JsonFlag, print_json, print_table

if TYPE_CHECKING:
    from sluice.accounting.calibration import Calibration
    from sluice.accounting.privacy_report import PrivacyReport

DatasetSize = Annotated[int, typer.Option("--dataset-size", help="Number of training records N.")]
BatchSize = Annotated[int, typer.Option("--batch-size", help="Expected batch size B; the sampling rate is B / N.")]
Releases = Annotated[int, typer.Option("--releases", help="Number of released (accepted) updates T.")]
Delta = Annotated[float, typer.Option("--delta", help="Target delta, well below 1 / N.")]


def epsilon(
    dataset_size: DatasetSize,
    batch_size: BatchSize,
    noise_multiplier: Annotated[
        float, typer.Option("--noise-multiplier", help="Gradient noise over the clipping bound.")
    ],
    releases: Releases,
    delta: Delta,
    gate_noise: GateNoise = None,
    beta: Beta = 3.0,
    clip_range: ClipRange = 2.0,
    reference_noise: ReferenceNoise = None,
    max_attempts: MaxAttempts = None,
    strength: Strength = None,
    small_norm: SmallNorm = None,
    large_norm: LargeNorm = 11.0,
    moved_records: MovedRecords = None,
    as_json: JsonFlag = False,
) -> None:
    """Account for given numbers by every accountant, side by side.

    With --gate-noise the run is gated: only accepted updates are released. Without --reference-noise the published
    reference then has 5 times the gradient noise. With --strength each record is kept by a coin of its own, which costs what no
    gate costs, or, if it is negative, what a larger batch costs. Figures that start with "paper" are claims, not guarantees.

    Example: sluice epsilon --dataset-size 60000 --batch-size 1024 --noise-multiplier 2 --releases 2000 --delta 1e-5
    --gate-noise 1 --reference-noise 10
    """
    from sluice._base import validate
    from sluice._base.errors import InputError
    from sluice.accounting.gate_calibration import REFERENCE_RATIO
    from sluice.accounting.privacy_report import privacy_report
    from sluice.mechanism.rates import exact_sample_rate

    rate = exact_sample_rate(batch_size=batch_size, dataset_size=dataset_size)
    validate.positive(noise_multiplier=noise_multiplier)
    if gate_noise is not None and reference_noise is None:
        reference_noise = REFERENCE_RATIO * noise_multiplier
    options = GateOptions(
        strength=strength,
        gate_noise=gate_noise,
        beta=beta,
        clip_range=clip_range,
        reference_noise=reference_noise,
        max_attempts=max_attempts,
        small_norm=small_norm,
        large_norm=large_norm,
        moved_records=moved_records,
    )
    gate = None
    if strength is not None or gate_noise is not None:
        gate = options.gate(expected_batch_size=rate * dataset_size)
        rate = gate.candidate_rate(rate)
    elif lonely := options.given("reference_noise", "max_attempts", "small_norm", "moved_records"):
        raise InputError(f"{lonely[0]} describes a gate: give --gate-noise (or --strength) as well.")
    report = privacy_report(
        sample_rate=rate, noise_multiplier=noise_multiplier, releases=releases, delta=delta, gate=gate
    )
    if as_json:
        print_json(
            {
                **report.figures(),
                "delta": delta,
                "sample_rate": rate,
                "noise_multiplier": noise_multiplier,
                "releases": releases,
                "gate": _gate_summary(gate),
                "reasons": report.reasons,
                "meanings": _meanings(),
                "warnings": _warnings(delta, dataset_size),
            }
        )
        return
    _print_report(report)
    _print_charge(gate)
    _print_warnings(delta, dataset_size)


def plan(
    dataset_size: DatasetSize,
    batch_size: BatchSize,
    releases: Releases,
    target_epsilon: Annotated[float, typer.Option("--epsilon", help="Target epsilon.")],
    delta: Delta,
    gated: Annotated[bool, typer.Option("--gate/--no-gate", help="Selective release, or plain DP-SGD.")] = True,
    gate_noise: GateNoise = None,
    beta: Beta = 3.0,
    clip_range: ClipRange = 2.0,
    reference_noise: ReferenceNoise = None,
    max_attempts: MaxAttempts = None,
    relative_gate_noise: Annotated[
        float, typer.Option("--relative-gate-noise", help="Noise of a decision over 4 times the gradient noise.")
    ] = 1.0,
    strength: Strength = None,
    small_norm: SmallNorm = None,
    large_norm: LargeNorm = 11.0,
    moved_records: MovedRecords = None,
    accountant: Annotated[str, typer.Option("--accountant", help="pld (tighter) or rdp.")] = "pld",
    plot: Annotated[Path, typer.Option("--plot", help="Where the plot goes, as SVG.")] = Path("plan.svg"),
    as_json: JsonFlag = False,
) -> None:
    """Choose gradient noise, gate noise and reference noise together for a target epsilon.

    Noises that are given are kept. Without --json a plot of epsilon over releases is drawn here and saved as SVG.

    Example: sluice plan --dataset-size 60000 --batch-size 1024 --releases 2000 --epsilon 1 --delta 1e-5
    """
    from sluice._base.errors import InputError
    from sluice.accounting.calibration import calibrate
    from sluice.accounting.privacy_report import privacy_report
    from sluice.mechanism.rates import exact_sample_rate

    options = GateOptions(
        strength=strength,
        gate_noise=gate_noise,
        beta=beta,
        clip_range=clip_range,
        reference_noise=reference_noise,
        max_attempts=max_attempts,
        small_norm=small_norm,
        large_norm=large_norm,
        moved_records=moved_records,
    )
    of_gates = ("strength", "gate_noise", "reference_noise", "max_attempts", "small_norm", "moved_records")
    if not gated and (meaningless := options.given(*of_gates)):
        raise InputError(f"--no-gate is not allowed together with {meaningless[0]}.")
    rate = exact_sample_rate(batch_size=batch_size, dataset_size=dataset_size)
    gate = options.gate(expected_batch_size=rate * dataset_size) if gated else None
    task: dict[str, Any] = {
        "sample_rate": rate if gate is None else gate.candidate_rate(rate),
        "releases": releases,
        "target_epsilon": target_epsilon,
        "target_delta": delta,
        "accountant": accountant,
    }
    chosen = calibrate(**task, gate=gate, relative_gate_noise=relative_gate_noise)
    plain = calibrate(**{**task, "sample_rate": rate})
    report = privacy_report(
        sample_rate=chosen.sample_rate,
        noise_multiplier=chosen.noise_multiplier,
        releases=releases,
        delta=delta,
        gate=chosen.gate,
    )
    if as_json:
        print_json(
            {
                **_plan_summary(chosen, plain),
                **report.figures(),
                "reasons": report.reasons,
                "meanings": _meanings(),
                "warnings": _warnings(delta, dataset_size),
            }
        )
        return
    _print_plan(chosen, plain)
    _print_report(report)
    _print_charge(chosen.gate)
    _print_warnings(delta, dataset_size)
    _draw(chosen, plot)


def _warnings(delta: float, dataset_size: int) -> list[str]:
    from sluice.mechanism.delta import delta_problem

    problem = delta_problem(delta, records=dataset_size)
    return [problem] if problem else []


def _print_warnings(delta: float, dataset_size: int) -> None:
    for warning in _warnings(delta, dataset_size):
        typer.echo(f"Warning: {warning}", err=True)


def _plan_summary(chosen: Calibration, plain: Calibration) -> dict[str, Any]:
    return {
        "noise_multiplier": chosen.noise_multiplier,
        "gate_noise": chosen.gate_noise,
        "reference_noise": chosen.reference_noise,
        "gate": _gate_summary(chosen.gate),
        "plain_noise_multiplier": plain.noise_multiplier,
        "sample_rate": chosen.sample_rate,
        "releases": chosen.releases,
        "delta": chosen.delta,
        "target_epsilon": chosen.target_epsilon,
        "epsilon": chosen.epsilon,
        "accountant": chosen.accountant,
    }


def _gate_summary(gate: Any) -> dict[str, Any] | None:
    if gate is None:
        return None
    if gate.thins:
        return {
            "gate": gate.kind,
            "strength": gate.strength,
            "small_norm": gate.small_norm,
            "large_norm": gate.large_norm,
            "moved_records": gate.moved_records,
        }
    return {
        "gate_noise": gate.gate_noise,
        "reference_noise": gate.reference_noise,
        "beta": gate.beta,
        "clip_range": gate.clip_range,
        "max_attempts": gate.max_attempts,
        "small_norm": gate.small_norm,
        "large_norm": gate.large_norm,
        "metric_error": gate.metric_error,
        "ratio_min": gate.acceptance.ratio_min,
        "acceptance_probability_min": gate.acceptance.probability_min,
    }


def _meanings() -> dict[str, str]:
    from sluice.accounting.privacy_report import MEANINGS

    return MEANINGS


def _print_plan(chosen: Calibration, plain: Calibration) -> None:
    """Noises are rounded up as well: those that are typed from here still keep the target."""
    from sluice._base.rounding import rounded_up

    rows: list[tuple[str, str, str]] = [
        (
            "gradient noise multiplier",
            rounded_up(chosen.noise_multiplier),
            f"plain DP-SGD needs {rounded_up(plain.noise_multiplier)}",
        )
    ]
    if chosen.gate is not None and chosen.gate.thins:
        rows.append(
            ("strength", f"{chosen.gate.strength:g}", f"candidates are drawn at the rate {chosen.sample_rate:.5g}")
        )
    elif chosen.gate is not None:
        worst = chosen.gate.acceptance.probability_min
        rows += [
            (
                "gate noise",
                rounded_up(chosen.gate.gate_noise),
                f"the worst batch is accepted with probability {worst:.3g}",
            ),
            (
                "reference noise multiplier",
                rounded_up(chosen.gate.reference_noise),
                "of the metric published with each release",
            ),
        ]
    rows.append(
        (
            "epsilon",
            rounded_up(chosen.epsilon),
            f"target {chosen.target_epsilon:g} at delta {chosen.delta:g}, {chosen.accountant}",
        )
    )
    print_table(("plan", "value", ""), rows)
    typer.echo()


def _print_report(report: PrivacyReport) -> None:
    from sluice._base.rounding import rounded_up

    rows = []
    for name, value in report.figures().items():
        if value is not None:
            rows.append((name, rounded_up(value), report.reasons.get(name, _meanings()[name])))
    print_table(("figure", f"epsilon (delta {report.delta:g})", "meaning"), rows)


def _print_charge(gate: Any) -> None:
    """For which run the figures hold, as far as rounding goes."""
    if gate is None:
        return
    typer.echo(
        f"\nWhat rounding may do is charged for a metric that rises between gradient norms of {gate.small_norm:g} (--small-norm) and "
        f"{gate.large_norm:g} (--large-norm)."
    )
    if gate.thins:
        typer.echo(
            f"It may move {gate.moved_records} of the other records: 1 in sluice train, more in a loop of your own over a mean "
            "loss (--moved-records)."
        )


def _draw(chosen: Calibration, plot: Path) -> None:
    from sluice._base.files import replaced_atomically
    from sluice.accounting.plan_curves import as_svg, in_characters, plan_curves

    curves = plan_curves(chosen)
    typer.echo()
    typer.echo(in_characters(curves))
    path = plot.with_suffix(".svg")
    with replaced_atomically(path) as temporary:
        temporary.write_text(as_svg(curves), "utf-8")
    typer.echo(f"\nSaved {path}.")
