"""The accuracy table: stored cells of one row and heading become one line beside the printed number."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sluice._base import codec
from sluice.experiments.tables.accuracy_cells import VARIANTS, Cell, Plan
from sluice.experiments.tables.accuracy_printed import PrintedCell
from sluice.experiments.tables.accuracy_reasons import reason_below
from sluice.experiments.tables.accuracy_tables import TABLES

Printed = Callable[[str, str, float], PrintedCell | None]


@dataclass(frozen=True, kw_only=True)
class Figure:
    """What an accountant says of a cell: an epsilon if it is proved, else a claim."""

    label: str
    value: float
    meaning: str = ""


@dataclass(frozen=True, kw_only=True)
class Line:
    """One line of the table.

    Attributes:
        heading: the epsilon of the paper's column.
        row: method and variant.
        model: what was trained, on which features.
        accuracies: test accuracy in percent, one for each seed that has a result.
        missing: seeds without a result.
        remark: why there is no result.
        sound: the proved epsilon that the run was held to, by the run's own accountant; None where it was held to none.
        provable: the smallest epsilon that is proved for what was run; None where none is.
        claimed: figures that somebody claims and nobody has proved.
        seconds: wall time of a cell, on average.
    """

    dataset: str
    heading: float
    row: str
    method: str
    model: str
    seeds: tuple[int, ...]
    accuracies: tuple[float, ...]
    missing: tuple[int, ...]
    remark: str
    printed: PrintedCell | None
    sound: Figure | None
    provable: Figure | None
    claimed: tuple[Figure, ...]
    delta: float | None
    releases: int | None
    seconds: float | None

    @property
    def mean(self) -> float | None:
        return statistics.fmean(self.accuracies) if self.accuracies else None

    @property
    def deviation(self) -> float | None:
        """Standard deviation over seeds; None for fewer than two."""
        return statistics.stdev(self.accuracies) if len(self.accuracies) > 1 else None

    @property
    def difference(self) -> float | None:
        """Ours less the printed number, in points, of the rounded values that the table shows."""
        if self.mean is None or self.printed is None:
            return None
        return round(self.mean, 2) - float(self.printed.percent)

    @property
    def reason(self) -> str:
        """Why ours is below the printed number; empty where it is not."""
        if self.difference is None or self.difference >= -0.005:
            return ""
        variant = self.row.partition(":")[2]
        if variant and (self.method, variant) not in VARIANTS:
            return "Run with other settings than the method's own."
        return reason_below(self.dataset, self.method, budget_is_proved=self.sound is not None)


def table_lines(
    plan: Plan,
    results: Mapping[Cell, Mapping[str, Any]],
    *,
    epsilons: Sequence[float],
    failures: Mapping[Cell, str],
    printed: Printed = TABLES["same-nets"].printed,
) -> list[Line]:
    """The lines of the table, headings within data sets; methods that no epsilon shapes stand under every heading."""
    groups: dict[tuple[str, str, float | None], list[Cell]] = {}
    for planned in plan.cells:
        cell = planned.cell
        groups.setdefault((cell.dataset, cell.row, cell.epsilon), []).append(cell)
    datasets = dict.fromkeys([cell.cell.dataset for cell in plan.cells] + [dataset for dataset, _ in plan.left_out])
    lines = []
    for dataset in datasets:
        for heading in epsilons:
            for (owner, _, epsilon), cells in groups.items():
                if owner == dataset and epsilon in (None, heading):
                    lines.append(_line(cells, heading, results, failures, printed))
            for (owner, row), reason in plan.left_out.items():
                if owner == dataset and ":" not in row:
                    lines.append(_empty_line(dataset, heading, row, reason, printed))
    return lines


def _line(
    cells: Sequence[Cell],
    heading: float,
    results: Mapping[Cell, Mapping[str, Any]],
    failures: Mapping[Cell, str],
    printed: Printed,
) -> Line:
    first = cells[0]
    found = [results[cell] for cell in cells if cell in results]
    failed = next((failures[cell] for cell in cells if cell in failures), "")
    return Line(
        dataset=first.dataset,
        heading=heading,
        row=first.row,
        method=first.method,
        model=_model(found[0]) if found else "",
        seeds=tuple(cell.seed for cell in cells if cell in results),
        accuracies=tuple(100 * result["test_accuracy"] for result in found),
        missing=tuple(cell.seed for cell in cells if cell not in results),
        remark=f"failed: {failed}" if failed else "" if found else "not run",
        printed=printed(first.dataset, first.row, heading),
        sound=_sound(found),
        provable=_provable(found),
        claimed=_claimed(found),
        delta=found[0]["delta"] if found else None,
        releases=found[0]["releases"] if found else None,
        seconds=statistics.fmean(result["wall_seconds"] for result in found) if found else None,
    )


def _empty_line(dataset: str, heading: float, row: str, reason: str, printed: Printed) -> Line:
    method = row.partition(":")[0]
    return Line(
        dataset=dataset,
        heading=heading,
        row=row,
        method=method,
        model="",
        seeds=(),
        accuracies=(),
        missing=(),
        remark=reason,
        printed=printed(dataset, row, heading),
        sound=None,
        provable=None,
        claimed=(),
        delta=None,
        releases=None,
        seconds=None,
    )


def _model(result: Mapping[str, Any]) -> str:
    settings = result["settings"]
    model, features = settings["model"], settings["features"]
    return model if features in ("plain", model) else f"{model} on {features}"


def _sound(found: Sequence[Mapping[str, Any]]) -> Figure | None:
    if not found or any(result["epsilon"] is None or result["target_epsilon"] is None for result in found):
        return None
    worst = max(codec.decode_float(result["epsilon"]) for result in found)
    return Figure(label=found[0]["accountant"], value=worst)


def _provable(found: Sequence[Mapping[str, Any]]) -> Figure | None:
    """The tightest proof of each seed's run, and of these the largest."""
    tightest = []
    for result in found:
        proved = [_figure(item) for item in result["figures"] if item["proved"]]
        if not proved:
            return None
        tightest.append(min(proved, key=lambda figure: figure.value))
    return max(tightest, key=lambda figure: figure.value) if tightest else None


def _claimed(found: Sequence[Mapping[str, Any]]) -> tuple[Figure, ...]:
    claims: dict[tuple[str, str], Figure] = {}
    for result in found:
        for figure in (_figure(item) for item in result["figures"] if not item["proved"]):
            key = figure.label, figure.meaning
            if key not in claims or claims[key].value < figure.value:
                claims[key] = figure
    return tuple(claims.values())


def _figure(item: Mapping[str, Any]) -> Figure:
    meaning = str(item["meaning"]).removesuffix(": no guarantee")
    return Figure(label=item["label"], value=float(codec.decode_float(item["value"])), meaning=meaning)
