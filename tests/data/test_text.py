from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sluice._base.errors import InputError
from sluice.data import BagExamples, Sequences, bag_of_words, padded

TEXTS = st.lists(st.lists(st.integers(1, 40), max_size=12), min_size=1, max_size=8)


def as_keras_does(ranks: list[int], vocabulary: int, length: int) -> list[int]:
    ids = [1] + [rank + 3 for rank in ranks]
    ids = [number if number < vocabulary else 2 for number in ids]
    return (ids + [0] * length)[:length]


@given(TEXTS, st.integers(4, 50), st.integers(1, 15))
def test_padded_equals_the_plain_definition(texts: list[list[int]], vocabulary: int, length: int) -> None:
    rows = padded(Sequences.from_lists(texts), vocabulary=vocabulary, length=length)
    assert rows.tolist() == [as_keras_does(text, vocabulary, length) for text in texts]


@given(TEXTS, st.integers(1, 45), st.integers(0, 10), st.data())
def test_bags_equal_the_plain_definition(
    texts: list[list[int]], vocabulary: int, skip: int, data: st.DataObject
) -> None:
    bags = bag_of_words(Sequences.from_lists(texts), vocabulary, skip)
    chosen = data.draw(st.lists(st.integers(0, len(texts) - 1), max_size=10))
    dense = bags.dense(torch.tensor(chosen, dtype=torch.int64))
    assert dense.shape == (len(chosen), vocabulary)
    for row, index in zip(dense, chosen, strict=True):
        words = {rank - skip - 1 for rank in texts[index] if skip < rank <= skip + vocabulary}
        expected = torch.zeros(vocabulary)
        expected[sorted(words)] = len(words) ** -0.5 if words else 0.0
        torch.testing.assert_close(row, expected)
    assert torch.equal(bags.subset(torch.tensor(chosen, dtype=torch.int64)).dense(torch.arange(len(chosen))), dense)


@given(TEXTS, st.data())
def test_a_subset_of_sequences_holds_the_chosen_lists(texts: list[list[int]], data: st.DataObject) -> None:
    chosen = data.draw(st.lists(st.integers(0, len(texts) - 1), max_size=10))
    subset = Sequences.from_lists(texts).subset(torch.tensor(chosen, dtype=torch.int64))
    assert [subset[i] for i in range(len(subset))] == [texts[i] for i in chosen]
    assert subset.lengths.tolist() == [len(texts[i]) for i in chosen]


def test_examples_of_bags_read_and_split_alike() -> None:
    examples = BagExamples(bag_of_words(Sequences.from_lists([[1, 2], [2], []]), 2, 0), torch.tensor([0, 1, 1]))
    x, y = examples.batch([2, 0])
    torch.testing.assert_close(x, torch.tensor([[0.0, 0.0], [0.5**0.5, 0.5**0.5]]))
    assert y.tolist() == [1, 0]
    assert examples.batch([])[0].shape == (0, 2)
    assert torch.equal(examples.subset([2, 0]).batch([0, 1])[0], x)
    with pytest.raises(InputError, match="equal in number"):
        BagExamples(examples.bags, torch.tensor([0]))


@given(TEXTS, st.data())
def test_lists_of_columns_say_the_same_as_rows(texts: list[list[int]], data: st.DataObject) -> None:
    bags = bag_of_words(Sequences.from_lists(texts), 30, 5)
    chosen = torch.tensor(data.draw(st.lists(st.integers(0, len(texts) - 1), max_size=10)), dtype=torch.int64)
    lists, rows = bags.listed(chosen), bags.dense(chosen)
    assert lists.dtype == torch.int32
    assert lists.shape[1] == max(1, max(len({r for r in text if 5 < r <= 35}) for text in texts))
    for columns, row in zip(lists, rows, strict=True):
        assert columns[columns >= 0].tolist() == row.nonzero().flatten().tolist()
        assert (columns[int((columns >= 0).sum()) :] == -1).all()


def test_lists_are_the_same_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    bags = bag_of_words(Sequences.from_lists([[1, 2], [2], [], [3, 1, 2]]), 3, 0)
    wanted = bags.listed(torch.tensor([3, 2, 0]))
    monkeypatch.setattr("sluice.data.text.library", lambda: None)
    assert torch.equal(bags.listed(torch.tensor([3, 2, 0])), wanted)


def test_examples_as_lists_are_the_same_records() -> None:
    examples = BagExamples(bag_of_words(Sequences.from_lists([[1, 2], [2], []]), 2, 0), torch.tensor([0, 1, 1]))
    lists = examples.listed()
    assert lists.digests() == examples.digests()
    assert lists.input_shape == examples.input_shape == (2,)
    assert lists.subset([2, 0]).batch([0, 1])[0].tolist() == [[-1, -1], [0, 1]]
    assert lists.batch([])[0].shape == (0, 2)


def test_wrong_arguments_are_named() -> None:
    sequences = Sequences.from_lists([[1, 2]])
    with pytest.raises(InputError, match="vocabulary=0"):
        bag_of_words(sequences, 0)
    with pytest.raises(InputError, match="skip_commonest=-1"):
        bag_of_words(sequences, 5, -1)
    with pytest.raises(InputError, match="vocabulary=3"):
        padded(sequences, vocabulary=3)
    with pytest.raises(InputError, match="below 1"):
        Sequences.from_lists([[0]])
    with pytest.raises(IndexError):
        sequences[1]
