"""Cells of the accuracy table as independent jobs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

from sluice.experiments.jobs import JobOptions, Lost, run_jobs
from sluice.experiments.run import Progress
from sluice.experiments.tables.accuracy_cells import PlannedCell
from sluice.experiments.tables.accuracy_results import result_path, store_result, stored_result
from sluice.experiments.tables.accuracy_run import Conditions, Outcome, Watch, run_cell


def run_cells(
    cells: Sequence[PlannedCell],
    conditions: Conditions,
    *,
    options: JobOptions = JobOptions(),
    report: Callable[[PlannedCell, Progress], None] | None = None,
    watch: Watch | None = None,
) -> Iterator[Outcome]:
    """What becomes of each cell, in the order in which they end; every job stores its own result.

    Args:
        report: called after every release, where cells are run one by one in this process.
        watch: makes what watches a cell's run, and adds to its result.
    """
    if options.here:
        for planned in cells:
            yield run_cell(planned, conditions, None if report is None else partial(report, planned), watch)
        return
    for planned, outcome in run_jobs(partial(_run_or_read, conditions=conditions, watch=watch), cells, options):
        if isinstance(outcome, Lost):
            yield Outcome(cell=planned.cell, failure=outcome.reason)
            continue
        if outcome.result is not None and not result_path(conditions.results, outcome.cell).exists():
            store_result(conditions.results, outcome.cell, outcome.result)  # the worker has a disk of its own
        yield outcome


def _run_or_read(planned: PlannedCell, conditions: Conditions, watch: Watch | None = None) -> Outcome:
    """A worker may die between storing a result and handing it over; then another one finds it here."""
    found, _ = stored_result(conditions.results, planned)
    return (
        run_cell(planned, conditions, watch=watch) if found is None else Outcome(cell=planned.cell, result=dict(found))
    )
