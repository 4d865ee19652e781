"""The ablation table of the DPSR-CG paper: its method, the same without selection, and DPSUR with its scaling.

The printed table gives its own method other numbers than the accuracy table does (CIFAR-10 at epsilon 1 and 3, IMDB at 1 and
3), and its rows were not run with equal settings: other batches, other numbers of updates, other accounting. Here all
three rows hold the heading's epsilon as proved.
"""

from __future__ import annotations

from typing import Any

from sluice.experiments.tables.accuracy_printed import EPSILONS, PrintedCell
from sluice.methods.reference import nearest

DATASETS = ("cifar-10", "imdb")
SOURCE = "DPSR-CG paper, ablation table"

WITHOUT_SELECTION = "ungated"
SAME_SCALING = "same-scaling"

#: Test accuracy in percent at epsilon 1, 2, 3, as it is printed.
PRINTED: dict[tuple[str, str], tuple[str, str, str]] = {
    ("cifar-10", "dpsr-cg"): ("70.15", "72.25", "72.51"),
    ("cifar-10", f"dpsr-cg:{WITHOUT_SELECTION}"): ("68.41", "71.58", "71.85"),
    ("cifar-10", f"dpsur:{SAME_SCALING}"): ("65.54", "69.81", "71.78"),
    ("imdb", "dpsr-cg"): ("68.61", "71.44", "73.03"),
    ("imdb", f"dpsr-cg:{WITHOUT_SELECTION}"): ("67.26", "69.57", "70.43"),
    ("imdb", f"dpsur:{SAME_SCALING}"): ("64.43", "68.49", "69.16"),
}

_DPSUR: dict[str, dict[str, Any]] = {
    "cifar-10": {"lr": 0.1, "scaling_bound": 3.0, "batch_size": 2048},
    "imdb": {"lr": 0.02, "scaling_bound": 1.0, "batch_size": 512},
}
_DPSUR_RELEASES = {"cifar-10": (158, 359, 652), "imdb": (122, 327, 230)}


def printed_in_ablation(dataset: str, row: str, epsilon: float) -> PrintedCell | None:
    """What the ablation table prints for a row, METHOD or METHOD:VARIANT, or None where it prints nothing."""
    values = PRINTED.get((dataset, row))
    if values is None or epsilon not in EPSILONS:
        return None
    return PrintedCell(percent=values[EPSILONS.index(epsilon)], source=SOURCE)


def dpsur_with_scaling(dataset: str, epsilon: float) -> dict[str, Any]:
    """What the authors ran as "DPSUR with the same gradient scaling", but for its noise, which is calibrated to what is proved."""
    return {
        **_DPSUR[dataset],
        "scaling": "global",
        "max_grad_norm": 1.0,
        "releases": nearest(epsilon, _DPSUR_RELEASES[dataset]),
    }


__all__ = ["DATASETS", "SAME_SCALING", "WITHOUT_SELECTION", "dpsur_with_scaling", "printed_in_ablation"]
