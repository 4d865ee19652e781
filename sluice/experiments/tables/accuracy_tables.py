"""Which tables of accuracies there are: their rows, and where their cells are stored."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from sluice.experiments.tables import ablation
from sluice.experiments.tables.accuracy_printed import PrintedCell, printed_cell


@dataclass(frozen=True, kw_only=True)
class AccuracyTable:
    """A table, as far as the command line does not say otherwise.

    Attributes:
        recipe: which of a method's own settings its cells are run with.
        results: where cells are stored.
        references: whether figures of other work stand below it.
        title: its heading.
        printed: from data set, row and epsilon to what the paper prints.
    """

    recipe: str
    datasets: tuple[str, ...] = ("all",)
    methods: tuple[str, ...]
    epsilons: tuple[str, ...] = ("1", "2", "3")
    seeds: tuple[str, ...]
    results: Path
    references: bool = False
    title: str = "Accuracy: ours and printed"
    printed: Callable[[str, str, float], PrintedCell | None] = lambda dataset, row, epsilon: printed_cell(
        dataset, row.partition(":")[0], epsilon
    )


TABLES = {
    "same-nets": AccuracyTable(
        recipe="paper", methods=("all",), seeds=("0", "1", "2"), results=Path("results/accuracy")
    ),
    "best": AccuracyTable(
        recipe="best",
        methods=("dpsgd", "dpsr-cg"),
        seeds=("0", "1", "2", "3", "4"),
        results=Path("results/best"),
        references=True,
    ),
    "ablation": AccuracyTable(
        recipe="paper",
        datasets=ablation.DATASETS,
        methods=("dpsr-cg", f"dpsr-cg:{ablation.WITHOUT_SELECTION}", f"dpsur:{ablation.SAME_SCALING}"),
        seeds=("0", "1", "2"),
        results=Path("results/ablation"),
        title="Ablation: ours and printed",
        printed=ablation.printed_in_ablation,
    ),
}

__all__ = ["TABLES", "AccuracyTable"]
