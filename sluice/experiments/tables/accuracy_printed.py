"""The accuracy table of the DPSR-CG paper as printed, and where each of its numbers comes from.

The paper ran three of its rows itself: DPSR-CG, DPSUR (under a stricter accounting than DPSUR's own) and the matrix
mechanism. The other five are those of Table 2 of the DPSUR paper, digit for digit, in all 57 cells.
"""

from __future__ import annotations

from dataclasses import dataclass

EPSILONS = (1.0, 2.0, 3.0)
DATASETS = ("mnist", "fashion-mnist", "cifar-10", "imdb")

OWN = "DPSR-CG paper, accuracy table"
COPIED = "DPSR-CG paper, accuracy table; equal to DPSUR's Table 2"

#: Test accuracy in percent at epsilon 1, 2, 3, as it is printed.
PRINTED: dict[str, dict[str, tuple[str, str, str]]] = {
    "mnist": {
        "dpsr-cg": ("99.06", "99.22", "99.24"),
        "dpsur": ("96.32", "97.51", "98.12"),
        "matrix": ("98.39", "98.66", "98.79"),
        "dpis": ("97.79", "98.51", "98.62"),
        "dpsgd-hf": ("97.78", "98.39", "98.32"),
        "dpsgd-ts": ("97.06", "97.87", "98.22"),
        "dpagd": ("95.91", "97.30", "97.52"),
        "dpsgd": ("95.11", "96.10", "96.82"),
    },
    "fashion-mnist": {
        "dpsr-cg": ("90.31", "90.87", "90.98"),
        "dpsur": ("86.40", "86.46", "86.60"),
        "matrix": ("87.16", "87.84", "88.32"),
        "dpis": ("86.25", "88.24", "88.82"),
        "dpsgd-hf": ("85.54", "87.96", "89.01"),
        "dpsgd-ts": ("83.63", "85.33", "86.29"),
        "dpagd": ("81.26", "84.50", "86.04"),
        "dpsgd": ("80.25", "82.63", "84.72"),
    },
    "cifar-10": {
        "dpsr-cg": ("69.94", "72.25", "72.37"),
        "dpsur": ("59.49", "66.25", "67.48"),
        "matrix": ("59.53", "66.40", "69.21"),
        "dpis": ("63.23", "67.94", "69.63"),
        "dpsgd-hf": ("63.15", "66.55", "69.35"),
        "dpsgd-ts": ("51.52", "56.78", "60.42"),
        "dpagd": ("45.78", "53.30", "56.21"),
        "dpsgd": ("46.03", "51.33", "54.67"),
    },
    "imdb": {
        "dpsr-cg": ("68.43", "71.44", "73.01"),
        "dpsur": ("60.56", "67.56", "67.59"),
        "matrix": ("67.51", "71.87", "72.53"),
        "dpis": ("63.56", "66.11", "68.49"),
        "dpsgd-ts": ("65.08", "68.34", "70.10"),
        "dpagd": ("58.72", "63.48", "64.59"),
        "dpsgd": ("64.13", "68.55", "70.41"),
    },
}

#: The column "non-private" of the same table.
NON_PRIVATE = {"mnist": "99.10", "fashion-mnist": "90.99", "cifar-10": "71.12", "imdb": "79.97"}

#: Rows that stand for another one: two readings of DPSR-CG face the same printed numbers.
_ROW_OF = {"dpsr-cg-paper": "dpsr-cg"}
_COPIED_ROWS = ("dpis", "dpsgd-hf", "dpsgd-ts", "dpagd", "dpsgd")


@dataclass(frozen=True, kw_only=True)
class PrintedCell:
    """One printed accuracy in percent, and where it stands."""

    percent: str
    source: str


def printed_cell(dataset: str, method: str, epsilon: float | None) -> PrintedCell | None:
    """What the paper prints for a method at the heading ``epsilon``, or None where it prints nothing."""
    if method == "non-private":
        return PrintedCell(percent=NON_PRIVATE[dataset], source=OWN) if dataset in NON_PRIVATE else None
    row = _ROW_OF.get(method, method)
    values = PRINTED.get(dataset, {}).get(row)
    if values is None or epsilon not in EPSILONS:
        return None
    source = COPIED if row in _COPIED_ROWS else OWN
    return PrintedCell(percent=values[EPSILONS.index(epsilon)], source=source)


def has_printed_row(dataset: str, method: str) -> bool:
    """Whether the paper ran the method on the data set. DPSGD-HF has no features for texts: its row is missing there."""
    return printed_cell(dataset, method, EPSILONS[0]) is not None
