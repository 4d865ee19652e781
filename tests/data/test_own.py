from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from sluice._base.errors import DataError, InputError
from sluice.data import TensorExamples, load

X, Y = np.arange(40, dtype=np.float64).reshape(10, 4), np.arange(10) % 3


def save(folder: Path, form: str, **content: Any) -> Path:
    if form == "npz":
        np.savez(folder / "mine.npz", **content)
        return folder / "mine.npz"
    (folder / "mine").mkdir()
    for name, array in content.items():
        np.save(folder / "mine" / f"{name}.npy", array)
    return folder / "mine"


@pytest.mark.parametrize("form", ["npz", "npy"])
def test_x_and_y_are_split_in_a_fixed_way(form: str, tmp_path: Path) -> None:
    path = save(tmp_path, form, x=X, y=Y)
    splits = load(str(path))
    assert (splits.name, splits.kind, splits.classes) == ("mine", "features", ("0", "1", "2"))
    assert (len(splits.train), len(splits.test)) == (6, 4)
    both = torch.cat([splits.train.inputs, splits.test.inputs])
    np.testing.assert_array_equal(both[both[:, 0].argsort()].numpy(), X.astype(np.float32))
    assert torch.equal(load(path).test.inputs, splits.test.inputs)
    assert splits.fingerprint == load(path).fingerprint
    everything = load(path, test_fraction=0)
    assert (len(everything.train), len(everything.test)) == (10, 0)
    np.testing.assert_array_equal(everything.train.labels.numpy(), Y)


@pytest.mark.parametrize("form", ["npz", "npy"])
def test_named_parts_are_kept(form: str, tmp_path: Path) -> None:
    images = np.random.default_rng(0).integers(0, 256, (6, 5, 4, 3), dtype=np.uint8)
    path = save(tmp_path, form, x_train=images, y_train=np.arange(6), x_test=images[:2], y_test=[[8], [0]])
    splits = load(path)
    assert (len(splits.train), len(splits.test), splits.kind, len(splits.classes)) == (6, 2, "image", 9)
    assert splits.train.inputs.dtype == torch.uint8
    x, _ = splits.train.batch([4])
    np.testing.assert_allclose(x[0].numpy(), np.moveaxis(images[4], 2, 0) / 255, rtol=1e-6)
    assert splits.test.labels.tolist() == [8, 0]


def test_text_that_is_called_an_archive_is_not_taken_for_objects(tmp_path: Path) -> None:
    (tmp_path / "mine.npz").write_text("a,label\n1,0\n")
    with pytest.raises(DataError, match=r"mine\.npz is no numpy file, whatever it is called"):
        load(tmp_path / "mine.npz")


def test_the_fingerprint_tells_data_apart(tmp_path: Path) -> None:
    first = load(save(tmp_path, "npz", x=X, y=Y)).fingerprint
    assert load(save(tmp_path, "npz", x=X + 1, y=Y)).fingerprint != first
    assert load(save(tmp_path, "npz", x=X, y=Y[::-1])).fingerprint != first


@pytest.mark.parametrize(
    ("x", "kind", "shape", "dtype"),
    [
        (np.zeros((10, 8, 8), np.uint8), None, (1, 8, 8), torch.float32),
        (np.zeros((10, 3, 8, 8), np.float32), None, (3, 8, 8), torch.float32),
        (np.zeros((10, 8, 8, 1)), None, (1, 8, 8), torch.float32),
        (np.zeros((10, 7), np.uint8), None, (7,), torch.float32),
        (np.zeros((10, 7), bool), None, (7,), torch.float32),
        (np.zeros((10, 5, 7), np.float32), None, (5, 7), torch.float32),
        (np.ones((10, 7), np.int16), "text", (7,), torch.int64),
        (np.ones((10, 5, 7)), "image", (1, 5, 7), torch.float32),
    ],
)
def test_shapes_and_types(x: np.ndarray, kind: Any, shape: Any, dtype: Any, tmp_path: Path) -> None:
    splits = load(save(tmp_path, "npz", x=x, y=Y), kind=kind, test_fraction=0)
    assert splits.train.input_shape == shape
    assert splits.train.batch([0])[0].dtype == dtype


def test_byte_features_are_not_scaled(tmp_path: Path) -> None:
    splits = load(save(tmp_path, "npz", x=np.full((10, 2), 200, np.uint8), y=Y))
    assert splits.train.batch([0])[0].tolist() == [[200.0, 200.0]]


@pytest.mark.parametrize("form", ["npz", "npy"])
@pytest.mark.parametrize(
    ("content", "part"),
    [
        ({"x": X}, "needs x"),
        ({"x_train": X, "y_train": Y}, "needs x"),
        ({"data": X}, "needs x"),
        ({"x": X, "y": Y[:9]}, "10 records, y has 9 labels"),
        ({"x": X[:0], "y": Y[:0]}, "at least one"),
        ({"x": X[:, :0], "y": Y}, "at least one"),
        ({"x": X[:, 0], "y": Y}, r"shape \(10,\)"),
        ({"x": X, "y": Y[:, None].repeat(2, 1)}, r"shape \(10, 2\)"),
        ({"x": X, "y": Y[:0]}, "at least one"),
        ({"x": X, "y": np.where(Y == 1, np.nan, Y)}, "label 1 is nan"),
        ({"x": X, "y": Y + 0.5}, "integers"),
        ({"x": X, "y": Y - 1}, "from -1 to 1"),
        ({"x": X, "y": Y * 10**9}, "from 0 to 2000000000"),
        ({"x": X, "y": Y.astype(str)}, "names of classes.*class-names"),
        ({"x": X.astype(str), "y": Y}, "finite numbers"),
        ({"x": X.astype(complex), "y": Y}, "finite numbers"),
        ({"x": np.where(X == 3, np.nan, X), "y": Y}, "NaN or infinite"),
        ({"x": np.where(X == 3, np.inf, X), "y": Y}, "NaN or infinite"),
        ({"x": X * 1e300, "y": Y}, "too large for float32"),
        ({"x": np.zeros((10, 5, 5, 7)), "y": Y}, "channels"),
        ({"x": np.array([[1], [1, 2]] * 5, dtype=object), "y": Y}, "could run code"),
        ({"x": X, "y": Y.astype(object)}, "could run code"),
        ({"x_train": X, "y_train": Y, "x_test": X[:, :2], "y_test": Y}, "must have the same shape"),
    ],
)
def test_data_that_does_not_fit_is_refused(form: str, content: dict[str, Any], part: str, tmp_path: Path) -> None:
    path = save(tmp_path, form, **content)
    with pytest.raises(DataError, match=part) as caught:
        load(path)
    assert "mine" in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 not a zip", b"\x93NUMPY", b"plain text", b"\x80\x04K\x01."])
def test_files_that_are_no_archives_are_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "mine.npz"
    path.write_bytes(content)
    with pytest.raises(DataError, match="mine"):
        load(path)


@pytest.mark.parametrize("compressed", [False, True])
def test_a_truncated_or_flipped_archive_is_refused(compressed: bool, tmp_path: Path) -> None:
    path = tmp_path / "mine.npz"
    (np.savez_compressed if compressed else np.savez)(path, x=X, y=Y)
    content = bytearray(path.read_bytes())
    path.write_bytes(content[:-40])
    with pytest.raises(DataError, match="damaged"):
        load(path)
    content[150] ^= 255
    path.write_bytes(content)
    with pytest.raises(DataError, match="damaged"):
        load(path)


def test_objects_in_a_users_file_never_run(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "opened"),)

    trap = np.empty(1, dtype=object)
    trap[0] = Trap()
    with pytest.raises(DataError, match="could run code"):
        load(save(tmp_path, "npz", x=trap, y=Y))
    assert not (tmp_path / "opened").exists()


def test_paths_that_cannot_be_data_are_refused(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("1,2")
    with pytest.raises(InputError, match=r"\.npz"):
        load(tmp_path / "mine.txt")
    with pytest.raises(InputError, match="neither"):
        load(tmp_path / "nothing.npz")
    with pytest.raises(DataError, match="none"):
        load(tmp_path)
    np.save(tmp_path / "array.npy", X)
    (tmp_path / "array.npy").rename(tmp_path / "array.npz")
    with pytest.raises(DataError, match=r"not a \.npz"):
        load(tmp_path / "array.npz")
    path = save(tmp_path, "npz", x=X, y=Y)
    for wrong in ({"test_fraction": 1.0}, {"test_fraction": 0.01}, {"kind": "sound"}, {"vocabulary": 5}):
        with pytest.raises(InputError, match=r"fraction|kind|vocabulary"):
            load(path, **wrong)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="x_test"):
        load(path, test=TensorDataset(torch.zeros(1, 4), torch.zeros(1)))
    with pytest.raises(DataError, match="not text"):
        load(path, kind="text")


class Pairs(Dataset[Any]):
    def __init__(self, pairs: list[Any]) -> None:
        self.pairs = pairs

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> Any:
        return self.pairs[index]


def test_any_map_style_data_set_works() -> None:
    data = Pairs([(np.full((3, 4, 4), float(i)), i % 4) for i in range(20)])
    splits = load(data)
    assert (splits.name, splits.kind, splits.classes) == ("Pairs", "image", ("0", "1", "2", "3"))
    assert (len(splits.train), len(splits.test), splits.fingerprint) == (18, 2, None)
    x, y = splits.train.batch([5, 0, 5])
    assert (x.shape, x.dtype, y.dtype) == ((3, 3, 4, 4), torch.float32, torch.int64)
    assert torch.equal(x[:, 0, 0, 0].long() % 4, y)
    assert splits.train.batch([])[0].shape == (0, 3, 4, 4)
    seen = sorted(int(x[0, 0, 0]) for part in (splits.train, splits.test) for x, _ in part)
    assert seen == list(range(20))


def test_a_data_set_with_its_own_test_set_and_classes() -> None:
    data = Pairs([(torch.zeros(2), torch.tensor(i % 2)) for i in range(6)])
    data.classes = ["no", "yes"]  # type: ignore[attr-defined]
    splits = load(data, test=Pairs([(torch.ones(2), 1)]))
    assert (len(splits.train), len(splits.test), splits.classes) == (6, 1, ("no", "yes"))
    with pytest.raises(DataError, match="cannot be tested"):
        load(data, test=Pairs([(torch.ones(3), 1)]))


def test_tensor_data_sets_keep_their_speed() -> None:
    splits = load(TensorDataset(torch.arange(12.0).view(6, 2), torch.arange(6)), test_fraction=0)
    assert isinstance(splits.train, TensorExamples)
    assert splits.train.batch([3])[0].tolist() == [[6.0, 7.0]]


@pytest.mark.parametrize(
    ("data", "part"),
    [
        (Pairs([]), "empty"),
        (Pairs([1, 2]), "must yield"),
        (Pairs([(1.0, 2, 3)]), "must yield"),
        (Pairs([(torch.zeros(1), "cat")]), "label 0 is 'cat'"),
        (Pairs([(torch.zeros(1), 0), (torch.zeros(1), float("nan"))]), "label 1 is nan"),
        (Pairs([(torch.zeros(1), -1)]), "from 0"),
        (Pairs([(object(), 1)]), "cannot be stacked"),
        (Pairs([({"a": 1}, 1)]), "one tensor"),
        (TensorDataset(torch.zeros(3, 2)), "must yield"),
        (TensorDataset(torch.zeros(3, 2), torch.zeros(3, 2)), "one-hot"),
    ],
)
def test_data_sets_that_do_not_fit_are_refused(data: Any, part: str) -> None:
    with pytest.raises(DataError, match=part):
        load(data)


def test_inputs_of_different_shapes_are_refused_before_training() -> None:
    with pytest.raises(
        DataError, match=r"cannot be stacked.*record 1 of shape \(2,\) .*beside a record 0 of shape \(1,\)"
    ):
        load(Pairs([(torch.zeros(1), 0), (torch.zeros(2), 0)]), test_fraction=0)


@pytest.mark.parametrize("other", [torch.zeros(1), np.zeros(1)])
def test_inputs_of_different_types_are_refused_since_a_batch_would_take_the_type_that_holds_all(other: Any) -> None:
    with pytest.raises(DataError, match=r"record 1 .*float.* beside a record 0 .*int64"):
        load(Pairs([(torch.zeros(1, dtype=torch.int64), 0), (other, 0)]), test_fraction=0)


def test_the_number_of_classes_can_be_said_and_then_no_label_tells_it(tmp_path: Path) -> None:
    path = save(tmp_path, "npz", x=X, y=Y)
    assert load(path, classes=5).classes == ("0", "1", "2", "3", "4")
    data = Pairs([(torch.full((2,), float(i)), i % 2) for i in range(20)])
    assert len(load(data, classes=4).classes) == 4
    for source in (path, Pairs([(torch.zeros(2), 2)])):
        with pytest.raises(DataError, match="labels up to 2, which classes=2 does not allow"):
            load(source, classes=2, test_fraction=0)
    data.classes = ["only"]  # type: ignore[attr-defined]
    with pytest.raises(DataError, match="labels up to 1, which classes=1"):
        load(data)
    for wrong in (0, 1, 2.5, 65_537):
        with pytest.raises(InputError, match=f"classes={wrong}"):
            load(path, classes=wrong)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="are for your own data"):
        load("digits", classes=10)


def test_word_ids_beyond_the_vocabulary_are_refused_before_training(tmp_path: Path) -> None:
    path = save(tmp_path, "npz", x=(X * 1000).astype(np.int64), y=Y)
    with pytest.raises(DataError, match="word ids from 0 to 19999"):
        load(path, kind="text")
    assert int(load(path, kind="text", vocabulary=39_001, test_fraction=0).train.inputs.max()) == 39_000
    with pytest.raises(InputError, match="vocabulary"):
        load(path, vocabulary=39_001)


def test_streams_are_refused() -> None:
    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter([])

    with pytest.raises(InputError, match="TensorDataset"):
        load(Stream())


@settings(max_examples=40)
@given(
    x=arrays.arrays(
        st.sampled_from([np.uint8, np.int32, np.float32]),
        st.tuples(st.integers(2, 8), st.integers(1, 4)),
        elements={"min_value": 0, "max_value": 100},
    ),
    seed=st.integers(0, 5),
)
def test_whatever_is_saved_comes_back(x: np.ndarray, seed: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    y = np.random.default_rng(seed).integers(0, 4, len(x))
    path = save(tmp_path_factory.mktemp("own"), "npz", x=x, y=y)
    inputs, labels = load(path, test_fraction=0).train.batch(range(len(x)))
    np.testing.assert_array_equal(inputs.numpy(), x.astype(np.float32))
    np.testing.assert_array_equal(labels.numpy(), y)


def test_labels_in_half_precision_are_read(tmp_path: Path) -> None:
    """The largest number of classes is beyond what half precision can hold."""
    path = save(tmp_path, "npz", x=X, y=Y.astype(np.float16))
    assert load(path).classes == ("0", "1", "2")
