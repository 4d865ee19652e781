"""Weighted words are what a plain dictionary counts, of norm 1, and a matter of each text alone."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sluice._base.errors import InputError
from sluice.data import LabelledSequences, Sequences, hold_out
from sluice.features.words import COMMONEST, HEAD, TAIL, WeightedWords, hashed_pair
from sluice.features.words_negation import BOUNDARIES, NEGATIONS, Negation

INDEX = {"the": 1, "but": 2, "not": 3, "isn't": 4, "good": 5, "film": 70, "never": 71, "and": 90}
TEXTS = st.lists(st.lists(st.one_of(st.integers(1, 8), st.integers(60, 95)), max_size=25), min_size=1, max_size=8)
OPTIONS = st.builds(
    WeightedWords,
    vocabulary=st.sampled_from([4, 70, 100]),
    end=st.sampled_from([0.0, 1.0, 2.5]),
    start=st.sampled_from([0.0, 0.5]),
    negation=st.sampled_from([0.0, 0.5, 1.0]),
    window=st.integers(1, 3),
    limit=st.sampled_from([1.0, 2.0, 7.0]),
    exponent=st.sampled_from([-0.3, 0.0, 0.5]),
    pairs=st.sampled_from([0.0, 0.4]),
    pair_vocabulary=st.sampled_from([50, 80]),
    pair_columns=st.sampled_from([5, 64]),
    constant=st.sampled_from([0.0, 0.2]),
)


def dictionary_row(text: list[int], options: WeightedWords) -> dict[int, float]:
    """One text, word by word."""
    words = {rank: word for word, rank in INDEX.items()}
    sums: dict[int, float] = defaultdict(float)
    reach = 0
    for place, rank in enumerate(text):
        share = (place + 0.5) / len(text)
        count = 1 + options.end * max(0, (share - 1 + TAIL) / TAIL) + options.start * max(0, (HEAD - share) / HEAD)
        word = words.get(rank, "")
        if word in BOUNDARIES:
            reach = 0
        sign = -options.negation if reach > 0 and options.negation else 1.0
        reach = options.window if word in NEGATIONS or word.endswith("n't") else reach - 1
        if rank <= options.vocabulary:
            sums[rank - 1] += sign * count
        if options.pairs and place and COMMONEST < max(text[place - 1], rank) <= options.pair_vocabulary:
            sums[options.vocabulary + hashed_pair(text[place - 1], rank) % options.pair_columns] += count
    row = {}
    for column, total in sums.items():
        is_word = column < options.vocabulary
        weight = ((column + 1 + options.offset) / 1000) ** options.exponent if is_word else options.pairs
        row[column] = min(max(total, -options.limit), options.limit) * weight
    row = divided(row)
    if options.constant:
        row[options.width - 1] = options.constant
    return divided(row)


def divided(row: dict[int, float]) -> dict[int, float]:
    norm = math.sqrt(sum(value * value for value in row.values()))
    return {column: value / norm for column, value in row.items() if value}


@given(TEXTS, OPTIONS)
def test_rows_are_what_a_dictionary_counts(texts: list[list[int]], options: WeightedWords) -> None:
    bags = options.bags(Sequences.from_lists(texts), word_index=INDEX)
    assert len(bags) == len(texts)
    for text, row in zip(texts, bags.dense(torch.arange(len(texts))), strict=True):
        wanted = torch.zeros(options.width)
        for column, value in dictionary_row(text, options).items():
            wanted[column] = value
        torch.testing.assert_close(row, wanted, rtol=0, atol=1e-6)
        norm = float(row.double().norm())
        assert norm == 0 or abs(norm - 1) < 1e-5
        assert (norm == 0) == (not dictionary_row(text, options))


@given(TEXTS, OPTIONS, st.data())
def test_a_row_does_not_depend_on_other_texts(
    texts: list[list[int]], options: WeightedWords, data: st.DataObject
) -> None:
    position = data.draw(st.integers(0, len(texts) - 1))
    alone = options.bags(Sequences.from_lists([texts[position]]), word_index=INDEX)
    among = options.bags(Sequences.from_lists(texts), word_index=INDEX).subset(torch.tensor([position]))
    assert torch.equal(alone.columns, among.columns)
    assert torch.equal(alone.steps, among.steps)


def test_blocks_of_texts_give_the_same_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    texts = [torch.randint(1, 90, (i % 23,), generator=generator).tolist() for i in range(200)]
    options = WeightedWords(vocabulary=80, pairs=0.3, pair_columns=100)
    whole = options.bags(Sequences.from_lists(texts), word_index=INDEX)
    monkeypatch.setattr("sluice.features.words._TEXTS_AT_ONCE", 7)
    blocks = options.bags(Sequences.from_lists(texts), word_index=INDEX)
    for name in ("columns", "steps", "offsets"):
        assert torch.equal(getattr(whole, name), getattr(blocks, name))


def test_a_negation_reaches_to_the_end_of_its_clause_and_text() -> None:
    texts = Sequences.from_lists([[3, 5, 70, 5], [71, 2, 5], [3], [5, 5]])
    ids = texts.ids.numpy().astype("int64")
    first = torch.zeros(len(ids), dtype=torch.bool)
    first[texts.offsets[:-1]] = True
    found = Negation.of(INDEX).behind(ids, first.numpy(), window=2)
    assert found.tolist() == [False, True, True, False] + [False] * 3 + [False] + [False, False]


@pytest.mark.parametrize("constant", [0.0, 0.1])
def test_no_texts_and_empty_texts(constant: float) -> None:
    options = WeightedWords(vocabulary=10, constant=constant)
    none = options.bags(Sequences.from_lists([]), word_index=INDEX)
    assert (len(none), none.width) == (0, options.width)
    rows = options.bags(Sequences.from_lists([[], [999], [5]]), word_index=INDEX).dense(torch.arange(3))
    assert rows.norm(dim=1).tolist() == pytest.approx([float(constant > 0)] * 2 + [1.0])


def test_a_split_does_not_depend_on_the_options() -> None:
    texts = LabelledSequences(
        sequences=Sequences.from_lists([[i % 9 + 1, i % 7 + 1, i + 1] for i in range(60)]), labels=torch.arange(60) % 2
    )
    sides = []
    for options in (WeightedWords(), WeightedWords(vocabulary=3, end=0.0)):
        examples = options.examples(texts, word_index=INDEX)
        kept, held = hold_out(examples, 0.3, seed=1)
        assert len(kept) + len(held) == 60
        sides.append(held.digests())
    assert sides[0] == sides[1]


def test_negations_need_a_word_index() -> None:
    texts = Sequences.from_lists([[1, 2]])
    with pytest.raises(InputError, match=r"negation=0.5 is not allowed without a word index.*negation=0"):
        WeightedWords().bags(texts)
    assert len(WeightedWords(negation=0).bags(texts)) == 1


def test_a_rank_below_1_is_no_word() -> None:
    ids, offsets = torch.tensor([5, 70, 0, -3, 0, 5]), torch.tensor([0, 2, 5, 6])
    options = WeightedWords(vocabulary=10, pairs=0.3, pair_vocabulary=80, constant=0.1)
    rows = options.bags(Sequences(ids=ids, offsets=offsets), word_index=INDEX).dense(torch.arange(3))
    wanted = options.bags(Sequences.from_lists([[5, 70], [], [5]]), word_index=INDEX).dense(torch.arange(3))
    assert torch.equal(rows, wanted)


@pytest.mark.parametrize("rank", [0, 2**30, "3"])
def test_ranks_of_a_word_index_are_checked(rank: int) -> None:
    with pytest.raises(InputError, match=r"word_index\['not'\]"):
        WeightedWords().bags(Sequences.from_lists([[1]]), word_index={"not": rank})


def test_options_are_written_as_they_are_typed() -> None:
    assert WeightedWords().written() == "weighted-words"
    assert WeightedWords(vocabulary=8000, pairs=0.25).written() == "weighted-words:vocabulary=8000,pairs=0.25"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("vocabulary", 0), ("window", 1.5), ("limit", 0.0), ("end", -1.0), ("negation", math.nan)),
        *(
            ("exponent", math.inf),
            ("exponent", 9.0),
            ("pairs", 1e300),
            ("limit", 1e-200),
            ("pair_columns", 2**31),
            ("constant", -0.1),
        ),
    ],
)
def test_wrong_options_are_named(name: str, value: float) -> None:
    with pytest.raises(InputError, match=f"{name}="):
        replace(WeightedWords(), **{name: value})  # type: ignore[arg-type]
