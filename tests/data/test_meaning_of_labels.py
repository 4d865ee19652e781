"""What a label means is decided by public settings and by declared types: one more record changes no label of the others."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice._base.errors import DataError, InputError, SluiceError
from sluice.data import load
from sluice.data.labels import class_labels

NAMES = "1,2,3,unknown"
CLASSES = ["1", "2", "3"] * 10
#: What somebody might write into the column of the target.
ENTRIES = [*NAMES.split(","), "0", "4", "1.0", " 2 ", "unknown ", "cat", "nan", "-1", "1e3", "", "0.5"]


def write(path: Path, labels: list[Any]) -> Path:
    """A table whose inputs are the numbers of its records."""
    if path.suffix == ".parquet":
        pyarrow = pytest.importorskip("pyarrow", reason="Parquet is read by pyarrow: pip install 'sluice[tables]'")
        parquet = pytest.importorskip("pyarrow.parquet")
        parquet.write_table(pyarrow.table({"a": list(range(len(labels))), "label": labels}), path)
        return path
    with path.open("w", newline="") as file:
        rows = csv.writer(file, delimiter="\t" if path.suffix == ".tsv" else ",")
        rows.writerows([("a", "label"), *enumerate(labels)])
    return path


def labels_of(path: Path, **settings: Any) -> list[int]:
    found: list[int] = load(path, test_fraction=0, **settings).train.labels.tolist()
    return found


@pytest.mark.parametrize("ending", ["csv", "tsv", "parquet"])
@pytest.mark.parametrize("names", [NAMES, None])
@given(labels=st.lists(st.sampled_from(ENTRIES), min_size=2, max_size=6), added=st.sampled_from(ENTRIES))
def test_one_more_record_changes_no_other_label(tmp_path_factory, ending, names, labels, added):
    path = tmp_path_factory.mktemp("table") / f"own.{ending}"
    found = []
    for each in (labels, [*labels, added], *([label] for label in labels)):
        try:
            found.append(labels_of(write(path, each), class_names=names))
        except SluiceError:
            found.append(None)
    without, together, alone = found[0], found[1], found[2:]
    assert (without is None) == (None in alone)
    if without is not None:
        assert [without] == [[label for row in alone for label in row]]
    if together is not None:
        assert together[:-1] == without


@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_no_label_moves_nor_any_side_of_the_split_if_somebody_is_of_another_class(tmp_path, ending):
    path = tmp_path / f"own.{ending}"
    assert labels_of(write(path, CLASSES), class_names=NAMES) == [0, 1, 2] * 10
    sides = [
        {tuple(row) for row in load(write(path, labels), class_names=NAMES).train.inputs.tolist()}
        for labels in (CLASSES, [*CLASSES, "unknown"])
    ]
    assert sides[0] ^ sides[1] <= {(30.0,)}


def test_text_that_is_none_of_the_names_is_refused_by_its_place(tmp_path):
    path = write(tmp_path / "own.csv", ["0", "1", "0"])
    with pytest.raises(DataError, match=r"record 1 has '0' in the column 'label'.*leave class_names out"):
        load(path, class_names="cat,dog")
    assert labels_of(path, class_names="1,0") == [1, 0, 1]
    with pytest.raises(DataError, match=r"record 4 has 'cat' in the column 'label', the target, .*--class-names a,b,c"):
        load(write(path, ["0", "1", "0", "cat"]))


def test_parts_are_read_alike(tmp_path):
    write(tmp_path / "train.csv", ["1", "2"])
    write(tmp_path / "test.csv", ["unknown", "1"])
    parts = load(tmp_path, class_names=NAMES)
    assert (parts.train.labels.tolist(), parts.test.labels.tolist()) == ([0, 1], [3, 0])


def test_columns_of_parts_belong_together_by_their_names(tmp_path):
    (tmp_path / "train.csv").write_text("a,b,label\n1,2,0\n3,4,1\n")
    (tmp_path / "test.csv").write_text("label,b,a\n1,20,10\n")
    assert load(tmp_path).test.inputs.tolist() == [[10.0, 20.0]]
    (tmp_path / "test.csv").write_text("a,c,label\n10,20,1\n")
    with pytest.raises(DataError, match=r"has the columns a, b, label, .* has a, c, label: both must have the same"):
        load(tmp_path)


@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_a_folder_that_only_looks_like_a_table_is_refused(tmp_path, ending):
    (tmp_path / f"own.{ending}").mkdir()
    with pytest.raises(InputError, match="is a folder without tables train and test"):
        load(tmp_path / f"own.{ending}")


@pytest.mark.parametrize("kind", [np.int64, np.uint8, np.float32, bool])
def test_numbers_are_positions_and_refused_where_they_could_be_names(tmp_path, kind):
    y = np.array([0, 1, 1]).astype(kind)
    for same in ("0,1", "0,1,other", "cat,dog", "cat,1"):
        assert class_labels(y, "y", names=same.split(",")).tolist() == [0, 1, 1]
    for other in ("1,0", "1,2,other", "cat,2", "1.5,dog"):
        with pytest.raises(InputError, match=rf"class_names='{other}' is ambiguous for y, whose labels are numbers"):
            class_labels(y, "y", names=other.split(","))
    assert class_labels(np.array(["0", "1", "1"]), "y", names=("1", "0")).tolist() == [1, 0, 0]


def test_numbers_of_a_parquet_file_are_positions(tmp_path):
    path = write(tmp_path / "own.parquet", [0, 1, 1])
    assert labels_of(path, class_names="cat,dog") == [0, 1, 1]
    with pytest.raises(InputError, match="ambiguous"):
        load(path, class_names="1,0")


def test_categories_of_a_parquet_file_are_text(tmp_path):
    pyarrow = pytest.importorskip("pyarrow", reason="Parquet is read by pyarrow: pip install 'sluice[tables]'")
    path = write(tmp_path / "own.parquet", pyarrow.array(["1", "2", "1"]).dictionary_encode())
    assert labels_of(path, class_names="2,1") == [1, 0, 1]


def image_folder(folder: Path, *names: str) -> Path:
    image = pytest.importorskip("PIL.Image")
    for number, name in enumerate(names):
        (folder / name).mkdir(parents=True, exist_ok=True)
        image.new("L", (3, 2), number).save(folder / name / "0.png")
    return folder


def test_folders_of_images_are_classes_by_their_names(tmp_path):
    path = image_folder(tmp_path, "2", "3")
    assert load(path, test_fraction=0).classes == ("2", "3")
    assert labels_of(path, class_names="3,2,1") == [1, 0]
    image_folder(tmp_path, "1")  # stands before the others, and moves none of their numbers
    assert labels_of(path, class_names="3,2,1") == [2, 1, 0]
    with pytest.raises(
        InputError, match=r"class_names='3,2' is not allowed for .* whose classes are 1, 2, 3: give all"
    ):
        load(path, class_names="3,2")


class Column(list):  # type: ignore[type-arg]
    def __init__(self, values: list[Any], names: tuple[str, ...] | None = None) -> None:
        super().__init__(values)
        self.names = names


class FakeDataset:
    """What is read of a `datasets.Dataset`, for where that library is not installed."""

    def __init__(self, **columns: Column) -> None:
        self.features = columns
        self.column_names = list(columns)

    def __len__(self) -> int:
        return len(next(iter(self.features.values())))

    def with_format(self, kind: None) -> FakeDataset:
        return self

    def __getitem__(self, rows: slice) -> dict[str, list[Any]]:
        return {name: list(column) for name, column in self.features.items()}


FakeDataset.__module__ = "datasets.fake"


def test_declared_names_of_hugging_face_go_by_name():
    whole = FakeDataset(x=Column([0.0, 1.0, 2.0]), label=Column([0, 1, 1], names=("3", "1")))
    assert labels_of(whole) == [0, 1, 1]  # type: ignore[arg-type]
    assert load(whole, test_fraction=0).classes == ("3", "1")  # type: ignore[arg-type]
    assert labels_of(whole, class_names="1,2,3") == [2, 0, 0]  # type: ignore[arg-type]
    with pytest.raises(InputError, match="whose classes are 3, 1: give all"):
        load(whole, class_names="1,2")  # type: ignore[arg-type]
    test = FakeDataset(label=Column([0, 1], names=("1", "3")), x=Column([7.0, 8.0]))
    parts = load(whole, test=test)  # type: ignore[arg-type]
    assert parts.test.labels.tolist() == [1, 0]
    unnamed = FakeDataset(x=Column([0.0, 1.0]), label=Column([0, -1], names=("a", "b")))
    with pytest.raises(DataError, match="record 1 of the data set has nothing in the column 'label'"):
        load(unnamed)  # type: ignore[arg-type]


def test_columns_of_hugging_face_parts_belong_together_by_their_names():
    train = FakeDataset(a=Column([1.0, 2.0]), b=Column([3.0, 4.0]), label=Column([0, 1]))
    test = FakeDataset(b=Column([30.0]), a=Column([10.0]), label=Column([0]))
    assert load(train, test=test).test.inputs.tolist() == [[10.0, 30.0]]  # type: ignore[arg-type]
    with pytest.raises(InputError, match="both must have the same"):
        load(train, test=FakeDataset(a=Column([10.0]), c=Column([1.0]), label=Column([0])))  # type: ignore[arg-type]


def test_one_record_of_another_type_does_not_change_how_all_are_scaled():
    images = [np.full((4, 4, 3), 255, dtype=np.uint8)] * 3
    whole = FakeDataset(x=Column(images), label=Column([0, 1, 1]))
    assert float(load(whole, test_fraction=0).train.batch([0])[0].max()) == 1.0  # type: ignore[arg-type]
    images = [*images, images[0].astype(np.uint16)]
    whole = FakeDataset(x=Column(images), label=Column([0, 1, 1, 1]))
    with pytest.raises(DataError, match="'x' holds uint16 in record 3 and uint8 in record 0"):
        load(whole, test_fraction=0)  # type: ignore[arg-type]


def test_images_of_hugging_face_are_read_as_those_of_folders():
    image = pytest.importorskip("PIL.Image")
    grey = [image.new("L", (3, 2), 255), image.fromarray(np.full((2, 3), 65_535, dtype=np.uint16))]
    data = load(FakeDataset(x=Column(grey), label=Column([0, 1])), test_fraction=0)  # type: ignore[arg-type]
    assert (data.kind, data.train.batch([0, 1])[0].unique().tolist()) == ("image", [1.0])
    several = [image.new("RGB", (3, 2), "red"), image.new("RGBA", (3, 2), "red"), image.new("P", (3, 2))]
    data = load(FakeDataset(x=Column(several), label=Column([0, 1, 1])), test_fraction=0)  # type: ignore[arg-type]
    assert data.train.batch([0, 1, 2])[0][:, :, 0, 0].tolist() == [[1.0, 0.0, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, 0.0]]
    with pytest.raises(DataError, match="record 1 of 'x' has the mode F"):
        load(FakeDataset(x=Column([grey[0], image.new("F", (3, 2))]), label=Column([0, 1])))  # type: ignore[arg-type]
