from __future__ import annotations

import os
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sluice._base.errors import DataError, InputError
from sluice.data import load, load_sequences, load_word_index, names
from sluice.data.catalog import CATALOG
from sluice.data.files import read_verified
from sluice.data.parsers import CIFAR_10_MEMBERS


def test_digits_have_a_fixed_split() -> None:
    first, second = load("digits"), load("digits")
    assert (len(first.train), len(first.test)) == (1437, 360)
    assert first.train.labels[:10].tolist() == [6, 5, 3, 4, 4, 4, 8, 8, 7, 0]
    assert first.test.labels[:5].tolist() == [2, 8, 2, 6, 6]
    assert torch.equal(first.test.batch(range(360))[0], second.test.batch(range(360))[0])
    x, y = first.train.batch(range(1437))
    assert (x.shape, x.dtype, y.dtype) == ((1437, 1, 8, 8), torch.float32, torch.int64)
    assert (x.min(), x.max()) == (0.0, 1.0)
    together = torch.cat([x, first.test.batch(range(360))[0]]).flatten(1)
    assert len(torch.unique(together, dim=0)) == len(together)


def test_mnist_keeps_bytes_and_converts_by_batch(tiny_mnist: Any, tmp_path: Path) -> None:
    splits = load("mnist", data_dir=tiny_mnist.write(tmp_path))
    assert (splits.name, splits.kind, splits.classes) == ("mnist", "image", tuple("0123456789"))
    assert splits.train.inputs.dtype == torch.uint8
    x, y = splits.train.batch([3, 0])
    expected = tiny_mnist.truth["train-images-idx3-ubyte.gz"][[3, 0]][:, None] / 255
    np.testing.assert_allclose(x.numpy(), expected, rtol=1e-6)
    assert y.tolist() == [3, 0]
    assert len(splits.test) == 20


def test_cifar_10_gives_the_same_from_both_archives_and_the_unpacked_folder(tiny_cifar: Any, tmp_path: Path) -> None:
    mean, std = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])
    for marker in (".tar.gz", ".tar.xz", "batches-py"):
        root = tiny_cifar.write(tmp_path / marker, only=lambda place, marker=marker: marker in place)
        splits = load("cifar-10", data_dir=root)
        assert splits.train.inputs.dtype == torch.uint8
        raw = np.concatenate([tiny_cifar.truth[f"data_batch_{number}"] for number in range(1, 6)])
        np.testing.assert_array_equal(splits.train.inputs.numpy(), raw)
        np.testing.assert_array_equal(splits.test.inputs.numpy(), tiny_cifar.truth["test_batch"])
        x, _ = splits.train.batch([7])
        expected = (raw[7] / 255 - mean[:, None, None]) / std[:, None, None]
        np.testing.assert_allclose(x[0].numpy(), expected, rtol=1e-4, atol=1e-6)


def test_torchvision_places_are_found(tiny_mnist: Any, tiny_cifar: Any, tmp_path: Path) -> None:
    tiny_mnist.write(tmp_path / "old")
    tiny_cifar.write(tmp_path / "old", only=lambda place: "batches-py" in place)
    (tmp_path / "new" / "MNIST").mkdir(parents=True)
    (tmp_path / "old" / "mnist").rename(tmp_path / "new" / "MNIST" / "raw")
    (tmp_path / "old" / "cifar-10" / "cifar-10-batches-py").rename(tmp_path / "new" / "cifar-10-batches-py")
    assert len(load("mnist", data_dir=tmp_path / "new", download=False).train) == 50
    assert len(load("cifar-10", data_dir=tmp_path / "new", download=False).train) == 30


def test_search_order(tiny_mnist: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    explicit, environment, cache = tmp_path / "explicit", tmp_path / "environment", tmp_path / "cache" / "data"
    monkeypatch.setenv("SLUICE_DATA", str(environment))
    for place in (explicit, environment, cache):
        tiny_mnist.write(place)
    opened: list[Path] = []

    def spy(path: Path, *arguments: Any, **options: Any) -> Any:
        opened.append(path)
        return read_verified(path, *arguments, **options)

    monkeypatch.setattr("sluice.data.loading.read_verified", spy)
    for data_dir, first in ((explicit, explicit), (None, environment)):
        opened.clear()
        load("mnist", data_dir=data_dir)
        assert {path.parents[1] for path in opened} == {first}
    monkeypatch.delenv("SLUICE_DATA")
    opened.clear()
    load("mnist")
    assert {path.parents[1] for path in opened} == {cache}


def test_a_complete_copy_later_in_the_order_beats_a_broken_folder_before_it(tiny_cifar: Any, tmp_path: Path) -> None:
    tiny_cifar.write(tmp_path / "partly", only=lambda place: place.endswith("data_batch_2"))
    tiny_cifar.write(tmp_path / "cache" / "data", only=lambda place: place.endswith(".gz"))
    assert len(load("cifar-10", data_dir=tmp_path / "partly").train) == 30


@pytest.mark.parametrize("harm", ["flipped", "truncated", "extended", "empty", "folder", "dangling"])
def test_a_damaged_file_is_refused_and_left_as_it_is(harm: str, tiny_mnist: Any, tmp_path: Path) -> None:
    root = tiny_mnist.write(tmp_path / "my data")
    path = root / "mnist" / "t10k-images-idx3-ubyte.gz"
    good = path.read_bytes()
    bad = {"flipped": good[:-1] + bytes([good[-1] ^ 4]), "truncated": good[:100], "extended": good + b"x", "empty": b""}
    path.unlink()
    if harm == "folder":
        path.mkdir()
    elif harm == "dangling":
        path.symlink_to(tmp_path / "nowhere")
    else:
        path.write_bytes(bad[harm])
    with pytest.raises(DataError) as caught:
        load("mnist", data_dir=root)
    message = str(caught.value)
    assert str(path) in message
    assert tiny_mnist.entry.layouts[0][2].contents[0].sha256 in message
    assert f"sluice data get mnist --replace --data-dir '{root}'" in message
    assert message.count("\n") == 1
    assert os.path.lexists(path)
    if harm in bad:
        assert path.read_bytes() == bad[harm]
        assert f"({len(bad[harm])} bytes)" in message


def test_damage_is_found_although_an_unpacked_copy_is_in_the_cache(tiny_mnist: Any, tmp_path: Path) -> None:
    root = tiny_mnist.write(tmp_path)
    load("mnist", data_dir=root)
    (root / "mnist" / "train-labels-idx1-ubyte.gz").write_bytes(b"other")
    with pytest.raises(DataError, match="is damaged"):
        load("mnist", data_dir=root)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(position=st.integers(0, 10**6), bit=st.integers(0, 7))
def test_any_flipped_bit_is_refused(position: int, bit: int, tiny_cifar: Any, tmp_path: Path) -> None:
    layout = tiny_cifar.entry.layouts[1]
    path = tmp_path / layout[0].places[0]
    path.parent.mkdir(exist_ok=True)
    content = bytearray(tiny_cifar.files[layout[0].places[0]])
    content[position % len(content)] ^= 1 << bit
    path.write_bytes(content)
    with pytest.raises(DataError, match="is damaged"):
        load("cifar-10", data_dir=tmp_path)


class _Trap:
    """A pickle that leaves a mark when it is opened."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.mark),)


@pytest.mark.parametrize("same_size", [False, True])
def test_no_pickle_is_opened_before_its_checksum_is_known(
    same_size: bool, tiny_cifar: Any, tiny_imdb: Any, tmp_path: Path
) -> None:
    mark = tmp_path / "opened"
    trap = pickle.dumps(_Trap(mark))
    for tiny, name, place in (
        (tiny_cifar, "cifar-10", "cifar-10/cifar-10-batches-py/data_batch_1"),
        (tiny_imdb, "imdb", "imdb/imdb.npz"),
    ):
        root = tiny.write(tmp_path / name, only=lambda place: not place.endswith(("gz", "xz")))
        (root / place).write_bytes(trap.ljust(len(tiny.files[place]), b"\0") if same_size else trap)
        with pytest.raises(DataError, match="is damaged"):
            load(name, data_dir=root)
        assert not mark.exists()
    pickle.loads(trap)
    assert mark.exists(), "the trap itself must work"


def test_members_of_an_archive_are_checked_too(
    tiny_cifar: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(CIFAR_10_MEMBERS, "data_batch_4", "0" * 64)
    root = tiny_cifar.write(tmp_path, only=lambda place: place.endswith(".gz"))
    with pytest.raises(DataError, match="data_batch_4 is damaged"):
        load("cifar-10", data_dir=root)


def test_what_is_parsed_is_what_was_checked(tiny_mnist: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tiny_mnist.write(tmp_path)

    def exchange_then_unpack(contents: Any) -> Any:
        for path in (root / "mnist").iterdir():
            path.write_bytes(b"exchanged")
        return tiny_mnist.entry.unpack(contents)

    monkeypatch.setitem(CATALOG, "mnist", replace(tiny_mnist.entry, unpack=exchange_then_unpack))
    splits = load("mnist", data_dir=root)
    np.testing.assert_array_equal(
        splits.train.inputs[:, 0].numpy(), tiny_mnist.truth["train-images-idx3-ubyte.gz"].astype(np.uint8)
    )


def test_missing_files_name_places_and_the_command(tiny_mnist: Any, tiny_cifar: Any, tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        load("mnist", data_dir=tmp_path, download=False)
    assert str(tmp_path) in str(caught.value)
    assert "train-images-idx3-ubyte.gz is missing" in str(caught.value)
    assert "Repair it with: sluice data get mnist" in str(caught.value)
    tiny_cifar.write(tmp_path, only=lambda place: place.endswith("data_batch_2"))
    with pytest.raises(DataError, match=r"data_batch_1 is missing(.|\n)*sluice data get cifar-10 --replace --data-dir"):
        load("cifar-10", data_dir=tmp_path)


def test_folders_that_do_not_exist_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="data_dir="):
        load("mnist", data_dir=tmp_path / "typo")
    monkeypatch.setenv("SLUICE_DATA", str(tmp_path / "typo"))
    with pytest.raises(InputError, match="SLUICE_DATA="):
        load("mnist")
    assert len(load("digits").train) == 1437


def test_imdb_has_the_order_of_keras_and_both_forms(tiny_imdb: Any, tmp_path: Path) -> None:
    root = tiny_imdb.write(tmp_path)
    train, test = load_sequences("imdb", data_dir=root)
    generator = np.random.RandomState(113)
    order = np.arange(30)
    generator.shuffle(order)
    assert [train.sequences[i][0] - 1 for i in range(30)] == order.tolist()
    assert train.labels.tolist() == [int(position < 15) for position in order]
    order = np.arange(30)
    generator.shuffle(order)
    assert [30 - test.sequences[i][0] for i in range(30)] == order.tolist()

    splits = load("imdb", data_dir=root, vocabulary=60, length=5)
    x, y = splits.train.batch([4])
    position = train.sequences[4][0] - 1
    assert (splits.kind, x.dtype) == ("text", torch.int64)
    assert x.tolist() == [[1, position + 4, *[2, 2, 2][: min(position, 3)], *[0] * max(0, 3 - position)]]
    assert y.tolist() == [int(position < 15)]
    assert load("imdb", data_dir=root).train.input_shape == (80,)

    bags = load("imdb", data_dir=root, text_as="bag-of-words", vocabulary=70)
    assert (bags.kind, bags.train.input_shape) == ("features", (70,))
    row = bags.train.batch([4])[0][0]
    words = [rank - 51 for rank in train.sequences[4] if 51 <= rank < 121]
    assert sorted(row.nonzero().flatten().tolist()) == sorted(words)
    assert load_word_index(data_dir=root) == {"the": 1}


def test_a_missing_word_index_does_not_stop_the_reviews(tiny_imdb: Any, tmp_path: Path) -> None:
    root = tiny_imdb.write(tmp_path, only=lambda place: place.endswith(".npz"))
    assert len(load("imdb", data_dir=root).train) == 30
    with pytest.raises(DataError, match=r"imdb_word_index\.json is missing"):
        load_word_index(data_dir=root)


@pytest.mark.parametrize(
    ("source", "options", "part"),
    [
        ("mnst", {}, "neither a data set"),
        ("mnist", {"length": 3}, "only allowed for 'imdb'"),
        ("digits", {"text_as": "bag-of-words"}, "only allowed for 'imdb'"),
        ("digits", {"kind": "image"}, "own data"),
        ("imdb", {"text_as": "words"}, "text_as='words'"),
        ("imdb", {"text_as": "bag-of-words", "length": 9}, "length=9"),
        (3, {}, "__getitem__"),
    ],
)
def test_options_that_do_not_fit_are_refused(source: Any, options: dict[str, Any], part: str) -> None:
    with pytest.raises(InputError, match=part):
        load(source, **options)


@pytest.mark.parametrize("options", [{"vocabulary": 3}, {"vocabulary": 0}, {"length": 0}, {"length": 2.5}])
def test_text_options_are_checked(options: dict[str, Any], tiny_imdb: Any, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=next(iter(options))):
        load("imdb", data_dir=tiny_imdb.write(tmp_path), **options)


def test_names() -> None:
    assert names() == ("digits", "mnist", "fashion-mnist", "cifar-10", "imdb")
    splits = load("digits")
    assert load(splits) is splits
