"""``sluice reproduce accuracy``: what is stored, what is left to run, and the files of the table."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sluice._base.files import write_atomically
from sluice.experiments.tables.accuracy_cells import Cell, Plan, PlannedCell
from sluice.experiments.tables.accuracy_plot import accuracy_over_epsilon_png, accuracy_table_png
from sluice.experiments.tables.accuracy_results import stored_result
from sluice.experiments.tables.accuracy_table import Line
from sluice.experiments.tables.accuracy_tables import AccuracyTable
from sluice.experiments.tables.accuracy_texts import as_csv, markdown


@dataclass(frozen=True, kw_only=True)
class Stock:
    """The results that can be re-used, the cells that have none, and what to say about the latter."""

    results: Mapping[Cell, Mapping[str, Any]]
    open: tuple[PlannedCell, ...]
    remarks: tuple[str, ...]


def take_stock(plan: Plan, results: Path, *, lacks: Callable[[Mapping[str, Any]], str] = lambda result: "") -> Stock:
    """Look at the stored results; those of other settings do not count.

    Args:
        lacks: says what a result lacks beside what every cell has, "" for nothing.
    """
    found: dict[Cell, Mapping[str, Any]] = {}
    open_cells, remarks = [], []
    for planned in plan.cells:
        result, remark = stored_result(results, planned)
        if result is not None and (lacking := lacks(result)):
            result, remark = None, f"{planned.cell.title} {lacking}"
        if result is not None:
            found[planned.cell] = result
            continue
        open_cells.append(planned)
        if remark:
            remarks.append(remark)
    return Stock(results=found, open=tuple(open_cells), remarks=tuple(remarks))


def write_table(lines: Sequence[Line], output: Path, table: AccuracyTable) -> dict[str, Path]:
    """Write ``output`` with the endings .md, .csv and .png, each as a whole or not at all."""
    paths = {kind: output.with_name(f"{output.name}.{kind}") for kind in ("md", "csv", "png")}
    page = markdown(lines, title=table.title, plot=paths["png"].name, references=table.references)
    write_atomically(paths["md"], page.encode("utf-8"), public=True)
    write_atomically(paths["csv"], as_csv(lines).encode("utf-8"), public=True)
    draw = accuracy_over_epsilon_png if table.references else accuracy_table_png
    write_atomically(paths["png"], draw(lines), public=True)
    return paths
