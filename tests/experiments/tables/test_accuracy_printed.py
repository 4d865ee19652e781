from __future__ import annotations

import pytest

from sluice.experiments.tables.accuracy_printed import (
    COPIED,
    DATASETS,
    EPSILONS,
    OWN,
    PRINTED,
    has_printed_row,
    printed_cell,
)

METHODS = ("dpsr-cg", "dpsur", "matrix", "dpis", "dpsgd-hf", "dpsgd-ts", "dpagd", "dpsgd")


def test_every_cell_of_the_paper_is_there_once():
    assert tuple(PRINTED) == DATASETS
    assert sum(len(values) for rows in PRINTED.values() for values in rows.values()) == 93
    for dataset, rows in PRINTED.items():
        assert tuple(rows) == tuple(method for method in METHODS if (dataset, method) != ("imdb", "dpsgd-hf"))


def test_57_cells_are_copied_and_36_are_the_papers_own():
    sources = [
        cell.source
        for dataset in DATASETS
        for method in METHODS
        for epsilon in EPSILONS
        if (cell := printed_cell(dataset, method, epsilon)) is not None
    ]
    assert (sources.count(COPIED), sources.count(OWN)) == (57, 36)


@pytest.mark.parametrize(
    ("dataset", "method", "epsilon", "percent"),
    [
        ("mnist", "dpsr-cg", 3, "99.24"),
        ("mnist", "dpsr-cg-paper", 3, "99.24"),
        ("mnist", "dpsgd-hf", 3, "98.32"),
        ("imdb", "dpsur", 1.0, "60.56"),
        ("cifar-10", "matrix", 2, "66.40"),
        ("imdb", "non-private", None, "79.97"),
        ("imdb", "non-private", 3, "79.97"),
    ],
)
def test_printed_values(dataset, method, epsilon, percent):
    cell = printed_cell(dataset, method, epsilon)
    assert cell is not None
    assert cell.percent == percent


@pytest.mark.parametrize(
    ("dataset", "method", "epsilon"),
    [("imdb", "dpsgd-hf", 3), ("mnist", "dpsgd", 4), ("mnist", "dpsgd", None), ("digits", "dpsgd", 3), ("digits", "non-private", 3)],
)  # fmt: skip
def test_nothing_is_made_up_where_nothing_is_printed(dataset, method, epsilon):
    assert printed_cell(dataset, method, epsilon) is None


def test_the_paper_has_no_handcrafted_features_for_texts():
    assert not has_printed_row("imdb", "dpsgd-hf")
    assert has_printed_row("imdb", "dpsgd-ts")
    assert has_printed_row("mnist", "non-private")
