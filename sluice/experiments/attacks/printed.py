"""Accuracies of attacks as the DPSR-CG paper prints them."""

from __future__ import annotations

DATASETS = ("fashion-mnist", "cifar-10")
METHODS = ("dpsr-cg", "dpsgd", "non-private")
EPSILONS = (1.0, 2.0, 3.0)

_PRINTED: dict[tuple[str, str, str], tuple[float, ...]] = {
    ("shadow", "fashion-mnist", "dpsr-cg"): (0.503, 0.501, 0.500),
    ("shadow", "fashion-mnist", "dpsgd"): (0.498, 0.503, 0.493),
    ("shadow", "fashion-mnist", "non-private"): (0.582,),
    ("shadow", "cifar-10", "dpsr-cg"): (0.500, 0.502, 0.505),
    ("shadow", "cifar-10", "dpsgd"): (0.504, 0.505, 0.504),
    ("shadow", "cifar-10", "non-private"): (0.732,),
    ("white-box", "fashion-mnist", "dpsr-cg"): (0.500, 0.500, 0.502),
    ("white-box", "fashion-mnist", "dpsgd"): (0.501, 0.502, 0.502),
    ("white-box", "fashion-mnist", "non-private"): (0.584,),
    ("white-box", "cifar-10", "dpsr-cg"): (0.500, 0.501, 0.500),
    ("white-box", "cifar-10", "dpsgd"): (0.500, 0.501, 0.501),
    ("white-box", "cifar-10", "non-private"): (0.743,),
}


def printed_accuracy(attack: str, *, dataset: str, method: str, epsilon: float | None) -> float | None:
    """The printed accuracy, or None where the paper has none."""
    row = _PRINTED.get((attack, dataset, method))
    if row is None:
        return None
    if epsilon is None:
        return row[0]
    return row[EPSILONS.index(epsilon)] if epsilon in EPSILONS else None
