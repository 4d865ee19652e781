"""What ``sluice train`` shows: the plan, progress in releases, and at the end what was reached and what it cost."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from sluice._base.progress import terminal_bar
from sluice._base.rounding import rounded_up
from sluice.cli.output import print_table
from sluice.experiments.evaluation import ClassAccuracy, balanced_accuracy
from sluice.experiments.run import Progress, Training, TrainResult
from sluice.mechanism.base import Mechanism
from sluice.methods import method_of
from sluice.models import activation_of
from sluice.runs.derived import PLOT
from sluice.runs.evaluations import Evaluation
from sluice.runs.scores import by_name, score_text, score_title, scores_text
from sluice.runs.trace import TraceRow

_LINES = 10
_CLASSES_SHOWN = 20


class Screen:
    """Progress on standard error: a bar on a terminal, plain lines without any timing elsewhere.

    Guarantee:
        Unless ``show_private`` is set, what is shown is a function of what `Training` reports as public.
    """

    def __init__(self, *, show_private: bool, quiet: bool) -> None:
        self._show_private = show_private
        self._quiet = quiet
        self._others: list[Callable[[Progress], None]] = []
        self._bar: Bar | None = None
        self._task: TaskID | None = None
        self._latest = ""

    def say(self, text: str) -> None:
        typer.echo(f"sluice: {text}", err=True)

    def also(self, other: Callable[[Progress], None]) -> None:
        """Report to somebody else too."""
        self._others.append(other)

    @contextmanager
    def shown(self, releases: int) -> Iterator[None]:
        """Show progress inside the block."""
        columns = (
            TextColumn("releases"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.description}"),
        )
        with terminal_bar(*columns) as self._bar:
            if self._bar is not None:
                self._task = self._bar.add_task("", total=releases)
            yield
        self._bar = None

    def report(self, progress: Progress) -> None:
        for other in self._others:
            other(progress)
        if progress.evaluation is not None:
            self._latest = _evaluation_text(progress.evaluation)
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=progress.release, description=self._latest)
        elif not self._quiet and (progress.evaluation is not None or _is_tenth(progress)):
            text = f": {_evaluation_text(progress.evaluation)}" if progress.evaluation is not None else ""
            typer.echo(f"release {progress.release} of {progress.releases}{text}", err=True)

    def report_private(self, row: TraceRow) -> None:
        if not self._show_private:
            return
        text = (
            f"PRIVATE release {row.release}: {row.attempts} attempts, {row.measured} records measured, "
            f"metric {row.metric:.4g}, {row.seconds:.3f} s"
        )
        if self._bar is not None:
            self._bar.console.print(text, highlight=False)
        else:
            typer.echo(text, err=True)


def print_plan(training: Training) -> None:
    """The calibrated mechanism and what all of its releases will cost."""
    settings, mechanism = training.settings, training.mechanism
    activation = activation_of(settings.model, settings.activation)
    model = settings.model if activation is None else f"{settings.model} with {activation}"
    rows: list[tuple[str, str]] = [
        ("data", f"{settings.dataset}, features {settings.features}, model {model}"),
        ("method", f"{settings.method}: {method_of(settings.method).summary}"),
        *mechanism.summary,
    ]
    rows.append(("releases", f"{mechanism.releases:,}"))
    target = method_of(settings.method).target(settings)
    text = f"epsilon {target:g} at delta {settings.delta:g}, by {settings.accountant}" if target else "none"
    rows.append(("target", text))
    rows += _figure_rows(mechanism, settings.delta)
    rows += [("note", note) for note in training.notes]
    if settings.seed is not None:
        rows.append(("seed", f"{settings.seed}: for experiments only, protects nobody"))
    print_table(("", ""), rows, title="Plan")


def print_result(result: TrainResult) -> None:
    """What was reached, what the run guarantees by each accountant, and where everything is."""
    for note in result.notes:
        typer.echo(f"Note: {note}")
    rows: list[tuple[str, str]] = []
    test = by_name(result.test_accuracy, result.test_scores)
    held_out = by_name(result.held_out_accuracy, result.held_out_scores)
    rows += [(f"test {score_title(name)}", score_text(name, value)) for name, value in test.items()]
    balanced = balanced_accuracy(result.by_class)
    if balanced is not None:
        rows.append(("balanced accuracy", f"{100 * balanced:.2f} % (the mean over classes)"))
        rows += [("of each class", _class_text(result.by_class))] * (len(result.by_class) <= _CLASSES_SHOWN)
    rows += [
        (f"held-out {score_title(name)}", f"{score_text(name, value)} (of private records: not to publish)")
        for name, value in held_out.items()
    ]
    rows.append(("releases", f"{result.releases:,} of {result.mechanism.releases:,}"))
    rows += _figure_rows(result.mechanism, result.delta)
    rows.append(("delta", f"{result.delta:g}"))
    rows.append(("run", f"{result.run} (publish public/ only)"))
    plot = result.run / "public" / PLOT
    if plot.exists():
        rows.append(("plot", str(plot)))
    rows.append(("certificate", str(result.run / "public" / "certificate.html")))
    print_table(("", ""), rows, title="Result")
    if result.epsilon is None:
        typer.echo(f"Nothing is proved about the privacy of this run: {result.mechanism.unproved_because}")


def _class_text(by_class: Sequence[ClassAccuracy]) -> str:
    return ", ".join(
        f"{each.name} {'none' if each.accuracy is None else f'{100 * each.accuracy:.1f} %'}" for each in by_class
    )


def result_as_json(result: TrainResult) -> dict[str, Any]:
    figures = result.mechanism.report(delta=result.delta)
    plot = result.run / "public" / PLOT
    return {
        "test_accuracy": result.test_accuracy,
        "balanced_accuracy": balanced_accuracy(result.by_class),
        "by_class": [asdict(each) for each in result.by_class],
        "held_out_accuracy": result.held_out_accuracy,
        "test_scores": result.test_scores,
        "held_out_scores": result.held_out_scores,
        "epsilon": result.epsilon,
        "delta": result.delta,
        "accountant": result.accountant,
        "releases": result.releases,
        "run": str(result.run),
        "picture": str(plot) if plot.exists() else None,
        "figures": [asdict(figure) for figure in figures],
        "mechanism": result.mechanism.to_dict(),
        "notes": list(result.notes),
    }


def _figure_rows(mechanism: Mechanism, delta: float) -> list[tuple[str, str]]:
    rows = []
    for figure in mechanism.report(delta=delta):
        name = f"epsilon by {figure.accountant}" if figure.guaranteed else figure.accountant
        rows.append((name, f"{rounded_up(figure.value)} ({figure.meaning})"))
    return rows or [("epsilon", "none is proved")]


def _evaluation_text(evaluation: Evaluation) -> str:
    text = f"test {scores_text(evaluation.scores)}"
    epsilon = evaluation.epsilon_if_planned_to_stop_here
    if epsilon is None:
        return f"{text}, no epsilon is proved"
    return f"{text}, epsilon {rounded_up(epsilon)} if planned to stop here"


def _is_tenth(progress: Progress) -> bool:
    return progress.release % max(1, progress.releases // _LINES) == 0
