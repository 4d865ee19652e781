from __future__ import annotations

import pytest

from sluice.experiments.tables.q_sup import METHODS, PRINTED, q_sup_table, truncate


def test_all_24_cells_are_explained():
    cells = q_sup_table()
    assert len(cells) == 24
    assert [cell for cell in cells if not cell.explained] == []


def test_the_cells_stand_in_the_papers_order():
    cells = q_sup_table()
    assert [(cell.data, cell.method) for cell in cells[::3]] == list(PRINTED)
    assert [cell.epsilon for cell in cells] == [1, 2, 3] * 8
    assert [cell.held_epsilon for cell in cells] == [3, 2, 1] * 8
    assert {cell.method for cell in cells} == set(METHODS)


def test_neither_rounding_nor_the_printed_order_would_do():
    cells = q_sup_table()
    rounded = [cell for cell in cells if f"{cell.claimed_table_reading:.2f}" == cell.printed]
    in_order = [cell for cell in cells if cell.corrected == cell.printed]
    assert len(rounded) == 18
    assert len(in_order) < 10
    assert sum(cell.explained_by_printed_reading for cell in cells) == 2


@pytest.mark.parametrize(
    ("data", "method", "corrected"),
    [
        ("MNIST", "DPSR-CG", ["1.12", "1.25", "1.29"]),
        ("FMNIST", "DPSR-CG", ["1.06", "1.09", "1.14"]),
        ("CIFAR-10", "DPSR-CG", ["1.04", "1.08", "1.08"]),
        ("IMDB", "DPSR-CG", ["1.12", "1.19", "1.29"]),
        ("MNIST", "DPSUR", ["2.26", "3.15", "3.75"]),
        ("FMNIST", "DPSUR", ["2.26", "2.26", "4.73"]),
        ("CIFAR-10", "DPSUR", ["2.26", "2.26", "2.75"]),
        ("IMDB", "DPSUR", ["2.26", "2.47", "3.15"]),
    ],
)
def test_corrected_columns(data, method, corrected):
    assert [cell.corrected for cell in q_sup_table() if (cell.data, cell.method) == (data, method)] == corrected


def test_three_cells_rest_on_a_noise_read_off_the_table():
    inferred = [(cell.data, cell.held_epsilon) for cell in q_sup_table() if not cell.noise_is_published]
    assert inferred == [("MNIST", 3), ("MNIST", 2), ("IMDB", 3)]


@pytest.mark.parametrize(("value", "text"), [(1.15, "1.15"), (1.2479, "1.24"), (2.0, "2.00"), (1.0099, "1.00")])
def test_truncation_is_exact(value, text):
    assert truncate(value) == text
