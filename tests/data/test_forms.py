"""Data of the user's own in its many forms: tables, folders of images, names of classes, one-hot rows, Hugging Face."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sluice._base.errors import DataError, InputError
from sluice.data import load
from sluice.data.hugging_face import is_hugging_face
from sluice.data.labels import class_labels, class_names_from

NAMES = ("cat", "dog")


def write_csv(path: Path, *rows: str) -> Path:
    path.write_text("\n".join(rows) + "\n", encoding="utf-8")
    return path


def table(records: int = 40, *, separator: str = ",") -> list[str]:
    rows = [separator.join((f"{i / 10}", f"{-i}", NAMES[i % 2])) for i in range(records)]
    return [separator.join(("width", "height", "label")), *rows]


@pytest.mark.parametrize(("name", "separator"), [("mine.csv", ","), ("mine.tsv", "\t")])
def test_a_table_with_names_of_classes(tmp_path, name, separator):
    path = write_csv(tmp_path / name, *table(separator=separator))
    data = load(path, class_names="cat, dog", test_fraction=0)
    assert data.classes == NAMES
    x, y = data.train.batch([3])
    assert torch.allclose(x, torch.tensor([[0.3, -3.0]]))
    assert int(y) == 1
    assert int(load(path, class_names=("dog", "cat"), test_fraction=0).train.labels[3]) == 0


def test_names_of_classes_must_be_said(tmp_path):
    path = write_csv(tmp_path / "mine.csv", *table())
    with pytest.raises(DataError, match=r"--class-names a,b,c.*must not be collected from private records"):
        load(path)
    with pytest.raises(
        DataError, match=r"record 2 has 'dog' in the column 'label', which is not among class_names \(cat, bird\)"
    ):
        load(path, class_names="cat,bird")
    for wrong in ("cat", "cat,cat", "cat,,dog"):
        with pytest.raises(InputError, match="class_names="):
            load(path, class_names=wrong)
    with pytest.raises(InputError, match=r"classes=3 contradicts"):
        load(path, class_names="cat,dog", classes=3)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (["a,label", "1,0", "x,1"], r"record 2 has 'x' in the column 'a'.*must hold numbers"),
        (["a,label", "1,0", ",1"], r"record 2 has missing in the column 'a'"),
        (["a,label", "nan,0", "2,1"], r"record 1 has nan"),
        (["a,label", "1,0", "2,"], r"record 2 has nothing in the column 'label'"),
        (["a,label", "1,0", "2"], r"record 2 has 1 entries.*2 columns"),
        (["a,label"], "at least one record"),
        (["a,a,label", "1,2,0"], "differ"),
        (["label", "0", "1"], "no column beside"),
        (["a,b", "1,0"], r"name the one to predict"),
        (["y,label", "1,0"], r"name the one to predict"),
    ],
)
def test_tables_that_cannot_be_read_say_where(tmp_path, rows, message):
    with pytest.raises((DataError, InputError), match=message):
        load(write_csv(tmp_path / "mine.csv", *rows))


def test_the_target_can_be_named_and_parts_can_be_files(tmp_path):
    rows = ["a,group", *(f"{i},{i % 3}" for i in range(30))]
    data = load(write_csv(tmp_path / "mine.csv", *rows), target="group", test_fraction=0)
    assert data.classes == ("0", "1", "2")
    with pytest.raises(InputError, match=r"target='b'.*columns a, group"):
        load(tmp_path / "mine.csv", target="b")
    folder = tmp_path / "parts"
    folder.mkdir()
    write_csv(folder / "train.csv", *rows[:21])
    write_csv(folder / "test.csv", rows[0], *rows[21:])
    data = load(folder, target="group")
    assert (len(data.train), len(data.test)) == (20, 10)


def test_a_parquet_file(tmp_path, monkeypatch):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    columns = {"a": [float(i) for i in range(30)], "label": [NAMES[i % 2] for i in range(30)]}
    parquet.write_table(pyarrow.table(columns), tmp_path / "mine.parquet")
    data = load(tmp_path / "mine.parquet", class_names="cat,dog", test_fraction=0)
    assert data.train.labels.tolist() == [i % 2 for i in range(30)]
    (tmp_path / "broken.parquet").write_bytes(b"PAR1nonsense")
    with pytest.raises(DataError, match="cannot be read as Parquet"):
        load(tmp_path / "broken.parquet")


def test_a_parquet_file_without_the_library_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "mine.parquet").write_bytes(b"PAR1")
    with pytest.raises(InputError, match=r"sluice\[tables\]"):
        load(tmp_path / "mine.parquet")


def images(folder: Path, *, count: int = 12, size: tuple[int, int] = (6, 4), mode: str = "L") -> None:
    image = pytest.importorskip("PIL.Image")
    folder.mkdir(parents=True, exist_ok=True)
    for i in range(count):
        image.new(mode, size, i * 10 if mode == "L" else (i * 10, 0, 0)).save(folder / f"{i:02}.png")


@pytest.mark.parametrize(("mode", "channels"), [("L", 1), ("RGB", 3)])
def test_a_folder_of_images_for_each_class(tmp_path, mode, channels):
    images(tmp_path / "dog", mode=mode)
    images(tmp_path / "cat", mode=mode)
    (tmp_path / "emu").mkdir()  # nobody has one, and that it could be is public
    data = load(tmp_path, test_fraction=0)
    assert data.classes == ("cat", "dog", "emu")
    assert data.kind == "image"
    x, y = data.train.batch([3, 15])
    assert x.shape == (2, channels, 4, 6)
    assert torch.allclose(x[:, 0, 0, 0], torch.tensor([30 / 255, 30 / 255]))
    assert y.tolist() == [0, 1]


def test_folders_of_images_for_training_and_testing(tmp_path):
    for part, count in (("train", 8), ("test", 3)):
        for name in NAMES:
            images(tmp_path / part / name, count=count)
    data = load(tmp_path)
    assert (len(data.train), len(data.test), data.classes) == (16, 6, NAMES)


def test_images_that_do_not_fit_are_named(tmp_path):
    images(tmp_path / "cat")
    images(tmp_path / "dog", size=(5, 4))
    with pytest.raises(DataError, match=r"dog.00\.png is 5 x 4, grey.*cat.00\.png is 6 x 4, grey"):
        load(tmp_path)
    images(tmp_path / "dog", mode="RGB")
    with pytest.raises(DataError, match="all grey or all coloured"):
        load(tmp_path)
    (tmp_path / "cat" / "00.png").write_bytes(b"nonsense")
    with pytest.raises(DataError, match=r"00\.png cannot be read as an image"):
        load(tmp_path)


LEVELS = np.array([[0, 1, 128], [129, 40_000, 65_535]], dtype=np.uint16)


@pytest.mark.parametrize("ending", ["png", "tif", "pgm"])
def test_images_of_16_bits_keep_their_grey_levels(tmp_path, ending):
    image = pytest.importorskip("PIL.Image")
    images(tmp_path / "cat", size=(3, 2))
    (tmp_path / "dog").mkdir()
    if ending == "pgm":
        (tmp_path / "dog" / "0.pgm").write_bytes(b"P5 3 2 65535 " + LEVELS.astype(">u2").tobytes())
    else:
        image.fromarray(LEVELS).save(tmp_path / "dog" / f"0.{ending}")
    data = load(tmp_path, test_fraction=0)
    assert (data.train.batch([12])[0][0, 0] * 255).round().tolist() == [[0, 0, 0], [1, 156, 255]]


@pytest.mark.parametrize("mode", ["I", "F"])
def test_images_of_other_modes_are_refused_by_name(tmp_path, mode):
    image = pytest.importorskip("PIL.Image")
    images(tmp_path / "cat")
    (tmp_path / "dog").mkdir()
    image.new(mode, (6, 4), 70_000).save(tmp_path / "dog" / "0.tif")
    with pytest.raises(DataError, match=rf"0\.tif has the mode {mode}; allowed are 1, L, I;16, LA, P, RGB, RGBA"):
        load(tmp_path)


@given(st.lists(st.integers(0, 4), min_size=1, max_size=20))
def test_one_hot_rows_and_names_are_the_numbers_of_classes(numbers):
    y = np.array(numbers)
    names = ("a", "b", "c", "d", "e")
    for form in (y, np.eye(5)[y], np.eye(5, dtype=bool)[y], np.array(names)[y], y[:, None]):
        assert class_labels(form, "y", names=names).tolist() == numbers


@pytest.mark.parametrize("y", [np.zeros((3, 2)), np.ones((3, 2)), np.full((3, 2), 0.5), np.array([["a", "b"]])])
def test_rows_that_are_not_one_hot_are_refused(y):
    with pytest.raises(DataError, match="one-hot"):
        class_labels(y, "y")


def test_one_hot_columns_are_the_classes(tmp_path):
    np.savez(tmp_path / "mine.npz", x=np.random.default_rng(0).normal(size=(30, 4)), y=np.eye(5)[np.arange(30) % 3])
    assert load(tmp_path / "mine.npz", test_fraction=0).classes == ("0", "1", "2", "3", "4")
    named = load(tmp_path / "mine.npz", test_fraction=0, class_names="a,b,c,d,e")
    assert named.classes == ("a", "b", "c", "d", "e")


def test_no_names_are_no_names():
    assert class_names_from(None) == ()
    assert not is_hugging_face(object())
    with pytest.raises(InputError, match="are for your own data"):
        load("digits", class_names="a,b")


def test_hugging_face_data_sets():
    datasets = pytest.importorskip("datasets")
    features = datasets.Features(
        {"x": datasets.Sequence(datasets.Value("float32")), "label": datasets.ClassLabel(names=NAMES)}
    )
    rows = {"x": [[i / 10, 1.0] for i in range(40)], "label": [i % 2 for i in range(40)]}
    whole = datasets.Dataset.from_dict(rows, features=features)
    data = load(whole, test_fraction=0)
    assert data.classes == NAMES
    assert torch.allclose(data.train.batch([7])[0], torch.tensor([[0.7, 1.0]]))
    parts = whole.train_test_split(10, seed=0)
    data = load(parts)
    assert (len(data.train), len(data.test)) == (30, 10)
    columns = datasets.Dataset.from_dict({"a": [1.0, 2.0] * 10, "b": [3, 4] * 10, "kind": ["u", "v"] * 10})
    data = load(columns, target="kind", class_names="u,v", test_fraction=0)
    assert data.train.input_shape == (2,)
    with pytest.raises(DataError, match="'kind' holds str"):
        load(columns, target="a")
    with pytest.raises(InputError, match="name the one to predict"):
        load(columns)


def test_names_as_bytes_that_are_no_text_are_refused():
    with pytest.raises(DataError, match="not UTF-8"):
        class_labels(np.array([b"a", b"\x80"]), "y", names=("a", "b"))
    assert class_labels(np.array([b"a", b"b"]), "y", names=("a", "b")).tolist() == [0, 1]
