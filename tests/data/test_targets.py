"""Numbers and counts as targets: float32, one for each record, and refused where they cannot be trained on."""

from __future__ import annotations

import math
from datetime import date
from decimal import Decimal
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sluice._base.errors import DataError, InputError
from sluice.data import load
from sluice.data.targets import Targets

X = np.random.default_rng(0).normal(size=(40, 3))
Y = np.linspace(-5.0, 5.0, 40)
NUMBERS, COUNTS = Targets(kind="number"), Targets(kind="count")


def saved(folder: Path, y: np.ndarray) -> Path:
    np.savez(folder / "own.npz", x=X, y=y)
    return folder / "own.npz"


@given(st.lists(st.floats(-1e18, 1e18), min_size=1, max_size=20))
def test_a_number_depends_on_its_own_target_alone(values):
    together = NUMBERS.read(np.array(values), "y")
    assert together.dtype == torch.float32
    assert torch.equal(together, torch.cat([NUMBERS.read(np.array([value]), "y") for value in values]))


@pytest.mark.parametrize("shape", [(40,), (40, 1)])
def test_a_file_of_numbers_has_floats_and_no_classes(tmp_path, shape):
    data = load(saved(tmp_path, Y.reshape(shape)), target_kind="number")
    assert data.classes == ()
    assert data.train.labels.dtype == torch.float32
    both = torch.cat([data.train.labels, data.test.labels])
    assert torch.equal(both.sort().values, torch.from_numpy(Y.astype(np.float32)))


def test_a_table_has_its_target_column_as_numbers(tmp_path):
    rows = "\n".join(f"{a},{b},{y}" for (a, b, _), y in zip(X, Y, strict=True))
    (tmp_path / "own.csv").write_text(f"a,b,price\n{rows}\n")
    data = load(tmp_path / "own.csv", target="price", target_kind="number")
    assert data.train.batch([0, 1])[1].dtype == torch.float32
    assert len(data.train) + len(data.test) == 40


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e19])
def test_what_is_no_finite_number_is_refused_by_its_place(tmp_path, bad):
    with pytest.raises(DataError, match=r"\[y\]: target 7 is .*must be finite numbers"):
        load(saved(tmp_path, np.where(np.arange(40) == 7, bad, Y)), target_kind="number")


def test_counts_are_not_negative_nor_huge():
    with pytest.raises(DataError, match=r"target 1 is -0\.5; counts must not be negative"):
        COUNTS.read(np.array([0.0, -0.5]), "y")
    with pytest.raises(DataError, match="at most 1e"):
        COUNTS.read(np.array([2e8]), "y")
    assert COUNTS.read(np.array([0, 3]), "y").tolist() == [0.0, 3.0]


@pytest.mark.parametrize("y", [np.array(["a", "b"]), np.zeros((2, 2)), np.zeros(0)])
def test_what_holds_no_number_for_each_record_is_refused(y):
    with pytest.raises(DataError, match=r"targets must be one row of numbers|holds no numbers"):
        NUMBERS.read(y, "y")


def test_classes_and_numbers_do_not_go_together(tmp_path):
    path = saved(tmp_path, Y)
    with pytest.raises(InputError, match=r"classes .* are not allowed with target_kind='number'"):
        load(path, target_kind="number", classes=3)
    with pytest.raises(DataError, match="For numbers to predict: --loss squared"):
        load(path)
    with pytest.raises(InputError, match="are for your own data"):
        load("digits", target_kind="number")
    with pytest.raises(InputError, match="target_kind are for files"):
        load(torch.utils.data.TensorDataset(torch.zeros(4, 2), torch.zeros(4)), target_kind="number")


PRICES = {
    "floats": [1.5 * i for i in range(40)],
    "integers": list(range(40)),
    "decimals": [Decimal(i) / 4 for i in range(40)],
    "booleans": [i % 2 == 0 for i in range(40)],
}


@pytest.mark.parametrize("kind", PRICES)
def test_a_parquet_file_has_its_target_column_as_numbers(tmp_path, kind):
    pyarrow = pytest.importorskip("pyarrow", reason="Parquet is read by pyarrow: pip install 'sluice[tables]'")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "own.parquet"
    parquet.write_table(pyarrow.table({"a": list(range(40)), "price": PRICES[kind]}), path)
    data = load(path, target="price", target_kind="number", test_fraction=0)
    assert data.classes == ()
    assert torch.equal(data.train.labels, torch.tensor([float(each) for each in PRICES[kind]]))
    assert data.train.input_shape == (1,)


def test_a_parquet_file_without_a_number_for_each_record_is_refused(tmp_path):
    pyarrow = pytest.importorskip("pyarrow", reason="Parquet is read by pyarrow: pip install 'sluice[tables]'")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "own.parquet"
    for bad, said in [
        ([1.0, None] * 20, "record 2 has nothing in the column 'price', the target"),
        (["dear", "cheap"] * 20, "record 1 has 'dear' in the column 'price', the target, which must hold numbers"),
        ([date(2020, 1, 1)] * 40, "holds no numbers"),
        ([[1.0, 2.0]] * 40, "holds no numbers"),
        ([1.0, math.inf] * 20, "target 1 is inf"),
    ]:
        parquet.write_table(pyarrow.table({"a": list(range(40)), "price": bad}), path)
        with pytest.raises(DataError, match=said):
            load(path, target="price", target_kind="number")


@pytest.mark.parametrize("kind", PRICES)
@pytest.mark.parametrize("form", [None, "torch", "numpy"])
def test_a_hugging_face_data_set_has_its_target_column_as_numbers(kind, form):
    datasets = pytest.importorskip("datasets", reason="Hugging Face's datasets is not installed")
    whole = datasets.Dataset.from_dict({"a": [i / 2 for i in range(40)], "price": PRICES[kind]}).with_format(form)
    data = load(whole, target="price", target_kind="count", test_fraction=0)
    assert data.classes == ()
    assert torch.equal(data.train.labels, torch.tensor([float(each) for each in PRICES[kind]]))
    parts = load(whole.train_test_split(10, seed=0), target="price", target_kind="number")
    assert (len(parts.train), len(parts.test)) == (30, 10)
    assert parts.test.labels.dtype == torch.float32


def test_a_hugging_face_data_set_without_a_number_for_each_record_is_refused():
    datasets = pytest.importorskip("datasets", reason="Hugging Face's datasets is not installed")
    for bad, said in [
        ([1.0, None] * 20, "record 1 of the data set has nothing in the column 'price', the target"),
        (["dear", "cheap"] * 20, "holds no numbers"),
        ([[1.0, 2.0]] * 40, "targets must be one row of numbers"),
        ([[1.0], [1.0, 2.0]] * 20, "'price', the target, has values of several shapes"),
        ([1.0, math.inf] * 20, "target 1 is inf"),
    ]:
        whole = datasets.Dataset.from_dict({"a": list(range(40)), "price": bad})
        with pytest.raises(DataError, match=said):
            load(whole, target="price", target_kind="number")
    named = datasets.Dataset.from_dict(
        {"a": list(range(40)), "price": [0, 1] * 20},
        features=datasets.Features({"a": datasets.Value("int64"), "price": datasets.ClassLabel(names=["u", "v"])}),
    )
    with pytest.raises(InputError, match="a declared ClassLabel"):
        load(named, target="price", target_kind="number")
    with pytest.raises(InputError, match="is streamed"):
        load(named.to_iterable_dataset(), target="price", target_kind="number")
