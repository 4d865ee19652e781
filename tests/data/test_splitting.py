from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import Dataset, TensorDataset

from sluice._base.errors import InputError
from sluice.data import Examples, TensorExamples, hold_out, load, to_float
from sluice.data.text import BagExamples, Sequences, bag_of_words
from sluice.data.transforms import unscaled

Splitter = Callable[[np.ndarray, np.ndarray, Path], tuple[Examples, Examples]]


def examples(count: int) -> TensorExamples:
    """Record i holds the number i and has label i mod 3."""
    return TensorExamples(torch.arange(count, dtype=torch.float32)[:, None], torch.arange(count) % 3, unscaled)


def numbers(part: Examples) -> list[int]:
    return part.batch(range(len(part)))[0][:, 0].int().tolist()


class Pairs(Dataset[Any]):
    def __init__(self, x: np.ndarray, y: np.ndarray) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Any:
        return self.x[index], int(self.y[index])


def from_file(x: np.ndarray, y: np.ndarray, folder: Path) -> tuple[Examples, Examples]:
    np.savez(folder / "own.npz", x=x, y=y)
    splits = load(folder / "own.npz")
    return splits.train, splits.test


def from_dataset(x: np.ndarray, y: np.ndarray, folder: Path) -> tuple[Examples, Examples]:
    splits = load(Pairs(x, y))
    return splits.train, splits.test


def from_tensors(x: np.ndarray, y: np.ndarray, folder: Path) -> tuple[Examples, Examples]:
    splits = load(TensorDataset(torch.from_numpy(x), torch.from_numpy(y)))
    return splits.train, splits.test


def held_out(x: np.ndarray, y: np.ndarray, folder: Path) -> tuple[Examples, Examples]:
    return hold_out(TensorExamples(torch.from_numpy(x), torch.from_numpy(y), unscaled), 0.2, 0)


def contents(part: Examples) -> list[tuple[bytes, int]]:
    inputs, labels = part.batch(range(len(part)))
    return [(x.numpy().tobytes(), int(y)) for x, y in zip(inputs, labels, strict=True)]


@pytest.mark.parametrize("split", [from_file, from_dataset, from_tensors, held_out])
@pytest.mark.parametrize("place", [0, 123, 300])
def test_one_more_record_changes_no_others_side_and_no_order(split: Splitter, place: int, tmp_path: Path) -> None:
    generator = np.random.default_rng(5)
    x, y = generator.random((300, 4)).astype(np.float32), generator.integers(0, 3, 300)
    parts = split(x, y, tmp_path)
    for extra in generator.random((10, 4)).astype(np.float32):
        larger = split(np.insert(x, place, extra, axis=0), np.insert(y, place, 1), tmp_path)
        added = 0
        for before, after in zip(map(contents, parts), map(contents, larger), strict=True):
            record = (extra.tobytes(), 1)
            added += after.count(record)
            assert [each for each in after if each != record] == before
        assert added == 1


@given(st.integers(2, 200), st.floats(0.05, 0.95), st.integers(0, 2**32 - 1))
def test_every_record_lands_in_one_part_whatever_the_others_are(count: int, fraction: float, seed: int) -> None:
    whole = examples(count)
    try:
        train, held = hold_out(whole, fraction, seed)
    except InputError:  # one side came out empty
        return
    assert sorted(numbers(train) + numbers(held)) == list(range(count))
    assert numbers(train) == sorted(numbers(train))
    assert numbers(held) == sorted(numbers(held))
    anywhere = torch.randperm(count, generator=torch.Generator().manual_seed(seed % 1000))
    shuffled, _ = hold_out(whole.subset(anywhere), fraction, seed)
    assert sorted(numbers(shuffled)) == numbers(train)


def test_the_share_is_about_the_one_asked_for() -> None:
    for fraction in (0.05, 0.5, 0.9):
        held = len(hold_out(examples(5000), fraction, 0)[1])
        assert abs(held - 5000 * fraction) < 5 * (5000 * fraction * (1 - fraction)) ** 0.5


def test_the_seed_decides_and_sides_stay_the_same_for_ever() -> None:
    assert numbers(hold_out(examples(20), 0.3, 0)[1]) == [0, 1, 11, 18, 19]
    assert numbers(hold_out(examples(20), 0.3, 1)[1]) != [0, 1, 11, 18, 19]


def test_the_label_belongs_to_the_record_and_equal_records_stay_together() -> None:
    twice = examples(60).subset([*range(60), *range(60)])
    train, held = hold_out(twice, 0.3, 0)
    assert not set(numbers(train)) & set(numbers(held))
    relabelled = TensorExamples(examples(60).inputs, torch.arange(60) % 5, unscaled)
    assert numbers(hold_out(relabelled, 0.3, 0)[1]) != numbers(hold_out(examples(60), 0.3, 0)[1])


def test_test_records_and_held_out_records_are_drawn_independently() -> None:
    splits = load(TensorDataset(torch.arange(5000.0)[:, None], torch.zeros(5000, dtype=torch.int64)))
    train, held = hold_out(splits.train, 0.2, 0)
    assert 0.16 < len(held) / len(splits.train) < 0.24
    assert len(train) + len(held) == len(splits.train)


def test_sides_follow_from_values_not_from_the_type_of_the_file(tmp_path: Path) -> None:
    values, labels = np.arange(200).reshape(50, 4) % 256, np.arange(50) % 2
    parts = [from_file(values.astype(kind), labels, tmp_path)[1] for kind in (np.uint8, np.int16, np.float64)]
    assert contents(parts[0]) == contents(parts[1]) == contents(parts[2])


def test_bags_of_words_and_images_can_be_held_out() -> None:
    words = Sequences.from_lists([[60 + i, 100 + i % 7] for i in range(40)])
    bags = BagExamples(bag_of_words(words, 200), torch.arange(40) % 2)
    train, held = hold_out(bags, 0.3, 0)
    assert len(train) + len(held) == 40
    images = TensorExamples(torch.arange(40, dtype=torch.uint8).view(40, 1, 1, 1), torch.zeros(40), to_float)
    train, held = hold_out(images, 0.3, 0)
    assert len(train) + len(held) == 40


def test_a_side_without_records_is_refused_with_what_to_do(tmp_path: Path) -> None:
    np.savez(tmp_path / "own.npz", x=np.zeros((10, 4)), y=np.zeros(10, dtype=int))
    with pytest.raises(
        InputError,
        match=r"a share of 0\.2 for test records .* (all|none) of them came out as test records\. Add records, or make",
    ):
        load(tmp_path / "own.npz", classes=2)
    with pytest.raises(InputError, match="came out as held-out records"):
        hold_out(examples(1), 0.5, 0)


@pytest.mark.parametrize("arguments", [(0.0, 1), (1.0, 1), (float("nan"), 1), (0.5, -1), (0.5, 1.5), (0.5, True)])
def test_holding_out_refuses_wrong_arguments(arguments: Any) -> None:
    with pytest.raises(InputError, match=r"fraction=|seed="):
        hold_out(examples(10), *arguments)
