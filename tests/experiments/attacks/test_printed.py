"""The paper's printed accuracies, cell by cell where a slip would be seen."""

from __future__ import annotations

import pytest

from sluice.experiments.attacks.printed import printed_accuracy


@pytest.mark.parametrize(
    ("attack", "dataset", "method", "epsilon", "printed"),
    [
        ("shadow", "fashion-mnist", "non-private", None, 0.582),
        ("shadow", "cifar-10", "non-private", None, 0.732),
        ("white-box", "fashion-mnist", "non-private", None, 0.584),
        ("white-box", "cifar-10", "non-private", None, 0.743),
        ("shadow", "fashion-mnist", "dpsgd", 3.0, 0.493),
        ("shadow", "fashion-mnist", "dpsgd", 0.5, None),
        ("lira", "fashion-mnist", "dpsgd", 3.0, None),
    ],
)
def test_printed(attack, dataset, method, epsilon, printed):
    assert printed_accuracy(attack, dataset=dataset, method=method, epsilon=epsilon) == printed
