"""Which tables of accuracies there are: their rows, and where their cells are stored."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class AccuracyTable:
    """A table, as far as the command line does not say otherwise.

    Attributes:
        recipe: which of a method's own settings its cells are run with.
        results: where cells are stored.
        references: whether figures of other work stand below it.
    """

    recipe: str
    datasets: tuple[str, ...] = ("all",)
    methods: tuple[str, ...]
    epsilons: tuple[str, ...] = ("1", "2", "3")
    seeds: tuple[str, ...]
    results: Path
    references: bool = False


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
}

__all__ = ["TABLES", "AccuracyTable"]
