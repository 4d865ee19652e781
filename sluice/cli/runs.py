"""``sluice verify``, ``sluice certificate`` and ``sluice private``: what can be done with a run folder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sluice.cli.output import JsonFlag, print_json

if TYPE_CHECKING:
    from sluice.experiments.published import PublishedModel
    from sluice.runs.privacy_spent import PrivacySpent
    from sluice.runs.verify import Verification

Run = Annotated[Path, typer.Argument(metavar="RUN", help="Folder of the run.")]
Runs = Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders of runs on the same records.")]
Records = Annotated[
    Path, typer.Argument(metavar="DATA", help="Records, in any form that data of your own can have (docs/data.md).")
]
Delta = Annotated[float | None, typer.Option("--delta", help="Report epsilon at this delta, not at the run's own.")]


def verify(runs: Runs, delta: Delta = None, as_json: JsonFlag = False) -> None:
    """Recompute epsilon from the ledger alone and check all that a run publishes, one line for each check.

    The exit code is 1 if something does not hold. Several runs on the same records also get their joint epsilon.

    Example: sluice verify runs/first runs/second --delta 1e-5
    """
    from sluice.runs.verify import verify_together

    verifications, joint = verify_together(runs, delta=delta)
    holds = all(verification.holds for verification in verifications)
    if as_json:
        together = None if joint is None else asdict(joint)
        print_json({"holds": holds, "runs": [_as_json(each) for each in verifications], "joint": together})
    else:
        for verification in verifications:
            typer.echo(verification.run)
            for check in verification.checks:
                typer.echo(f"  {'holds' if check.holds else 'FAILS':<6} {check.name:<18} {check.detail}")
            for left in verification.not_checked:
                typer.echo(f"  not checked: {left.name}: {left.why}")
        if joint is not None:
            typer.echo(_joint_line(joint, verifications))
        elif len(runs) > 1:
            typer.echo("no joint epsilon: not every ledger can be read")
    if not holds:
        raise typer.Exit(1)


def predict(
    run: Run,
    data: Records,
    output: Annotated[
        Path | None, typer.Option("--output", help="Write the predictions to this CSV file, not to the screen.")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Classify records with the model of a finished run, or predict their numbers, from its public folder alone.

    Records are in the form of the training data; labels may be missing. Each line gives a record's number, its class and how probable the model
    thinks that is, or the number that the model predicts. Where the file has targets too, it is shown how good that is.

    Example: sluice predict runs/first images.npz --output predictions.csv
    """
    from sluice.data import read_records
    from sluice.experiments.published import load_model

    model = load_model(run)
    records, labels = read_records(data, targets=model.targets, classes=model.classes, target=model.settings.target)
    if model.objective.predicts_numbers:
        return _predict_numbers(model, records, labels, output=output, as_json=as_json)
    certainty, numbers = model.probabilities(records).max(dim=1)
    named = [model.classes[number] for number in numbers.tolist()]
    accuracy = None if labels is None else float((numbers == labels).double().mean())
    if as_json:
        print_json({"classes": named, "probabilities": certainty.tolist(), "accuracy": accuracy})
        return None
    lines = [f"{index},{name},{value:.4f}" for index, (name, value) in enumerate(zip(named, certainty, strict=True))]
    _write_lines(["record,class,probability", *lines], output)
    if accuracy is not None:
        typer.echo(f"Right: {accuracy:.2%} of {len(named)} labelled records", err=output is None)
    return None


def _predict_numbers(model: PublishedModel, records: Any, wanted: Any, *, output: Path | None, as_json: bool) -> None:
    from sluice.runs.scores import scores_text

    found = model.predict(records)
    scores = None
    if wanted is not None:
        scores = model.objective.scores(found, wanted)
    if as_json:
        print_json({"predictions": found.tolist(), "scores": scores})
        return
    lines = [f"{index},{value:.6g}" for index, value in enumerate(found.tolist())]
    _write_lines(["record,prediction", *lines], output)
    if scores is not None:
        typer.echo(f"On {len(lines)} records with targets: {scores_text(scores)}", err=output is None)


def _write_lines(lines: list[str], output: Path | None) -> None:
    """A heading and a line for each record, to the screen or to a file."""
    from sluice._base.files import explained, replaced_atomically

    text = "\n".join(lines) + "\n"
    if output is None:
        typer.echo(text, nl=False)
        return
    with explained("write", output), replaced_atomically(output) as temporary:  # the user's own file, with its time
        temporary.write_text(text, encoding="utf-8")
    typer.echo(f"Written: {output} ({len(lines) - 1} records)")


def certificate(run: Run, as_json: JsonFlag = False) -> None:
    """Write the certificate of a run (JSON, Markdown, HTML and a plot of epsilon) into its public folder.

    Example: sluice certificate runs/first
    """
    from sluice.runs.certificate import write_certificate
    from sluice.runs.folder import RunFolder
    from sluice.runs.pages import headline

    folder = RunFolder.look(run)
    written = write_certificate(folder)
    if as_json:
        print_json(written)
        return
    for warning in written["warnings"]:
        typer.echo(f"Warning: {warning}")
    typer.echo(headline(written))
    typer.echo(f"Written to {folder.public}: certificate.json, certificate.md, certificate.html, epsilon.svg")


def report(
    runs: Runs,
    output: Annotated[Path, typer.Option("--output", "-o", help="The page to write.")] = Path("report.html"),
    delta: Delta = None,
    as_json: JsonFlag = False,
) -> None:
    """Write one self-contained HTML page about one run or several: guarantee, test results, budget, comparison, audits.

    It is made from the public folders alone. The exit code is 1 if something that a run publishes does not hold; the
    page then says what.

    Example: sluice report runs/first runs/second -o report.html
    """
    from sluice._base.files import write_atomically
    from sluice.runs.report import report_page

    page, holds = report_page(runs, delta=delta)
    write_atomically(output, page.encode("utf-8"), public=True)
    if as_json:
        print_json({"file": str(output), "holds": holds})
    else:
        typer.echo(f"Written: {output}")
        if not holds:
            typer.echo("Warning: not everything that these runs publish holds; the page says what.", err=True)
    if not holds:
        raise typer.Exit(1)


def private(run: Run, as_json: JsonFlag = False) -> None:
    """Draw acceptance and metric of a run into its private folder. For the developer's own eyes: do not publish.

    Example: sluice private runs/first
    """
    from sluice._base.errors import InputError
    from sluice._base.files import write_atomically
    from sluice.runs.folder import RunFolder
    from sluice.runs.private_plots import acceptance_plot, metric_plot
    from sluice.runs.trace import read_trace

    folder = RunFolder.look(run)
    rows = read_trace(folder.trace_path)
    if not rows:
        raise InputError(f"RUN={str(run)!r} is not allowed: {folder.trace_path} holds no release yet.")
    plots = {"acceptance.png": acceptance_plot(rows), "metric.png": metric_plot(rows)}
    for name, content in plots.items():
        write_atomically(folder.private / name, content, public=False)
    written = [str(folder.private / name) for name in plots]
    if as_json:
        print_json({"releases": len(rows), "files": written})
        return
    typer.echo("\n".join(written))


def _as_json(verification: Verification) -> dict[str, Any]:
    contents, spent = verification.contents, verification.spent
    return {
        "run": verification.run,
        "holds": verification.holds,
        "checks": [asdict(check) for check in verification.checks],
        "releases": None if contents is None else contents.spent,
        "not_checked": [asdict(left) for left in verification.not_checked],
        "audit_releases": None if verification.audit is None else verification.audit.spent,
        "spent": None if spent is None else asdict(spent),
    }


def _joint_line(joint: PrivacySpent, verifications: Sequence[Verification]) -> str:
    all_runs = f"all {len(verifications)} runs"
    if any(each.audit is not None for each in verifications):
        all_runs += ", with the audits on their records,"
    if joint.epsilon is None:
        return f"{all_runs} together: no epsilon is proved, because it is not for one of them"
    from sluice._base.rounding import rounded_up

    return f"{all_runs} together: epsilon {rounded_up(joint.epsilon)} at delta {joint.delta:g}, if on the same records"
