"""Weighted bags are the same records as rows and as lists."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sluice._base.errors import InputError
from sluice.data import LabelledSequences, Sequences, WeightedBagExamples, WeightedBags, hold_out, text_digests
from sluice.data.weighted import VALUE_STEPS

STEPS = st.integers(-VALUE_STEPS, VALUE_STEPS).filter(bool)
ROWS = st.lists(st.dictionaries(st.integers(0, 9), STEPS, max_size=6), min_size=1, max_size=8)


def bags_of(rows: list[dict[int, int]]) -> WeightedBags:
    return WeightedBags(
        columns=torch.tensor([column for row in rows for column in sorted(row)], dtype=torch.int32),
        steps=torch.tensor([row[column] for row in rows for column in sorted(row)], dtype=torch.int32),
        offsets=torch.tensor([0, *(len(row) for row in rows)]).cumsum(0),
        width=10,
    )


@given(ROWS, st.data())
def test_rows_and_lists_say_what_was_put_in(rows: list[dict[int, int]], data: st.DataObject) -> None:
    bags = bags_of(rows)
    chosen = data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=10))
    positions = torch.tensor(chosen, dtype=torch.int64)
    lists, dense = bags.listed(positions), bags.dense(positions)
    assert lists.shape == (len(chosen), 2, max(1, max(len(row) for row in rows)))
    for place, position in enumerate(chosen):
        row = rows[position]
        columns, steps = lists[place].tolist()
        assert columns == sorted(row) + [-1] * (len(columns) - len(row))
        assert steps[: len(row)] == [row[column] for column in sorted(row)]
        assert dense[place].tolist() == [row.get(column, 0) / VALUE_STEPS for column in range(10)]
    assert torch.equal(bags.subset(positions).dense(torch.arange(len(chosen))), dense)


def test_examples_as_lists_are_the_same_records() -> None:
    bags = bags_of([{i % 10: i + 1, (3 * i + 1) % 10: -i - 1} for i in range(40)])
    examples = WeightedBagExamples(bags, torch.arange(40) % 2)
    lists = examples.listed()
    assert lists.digests() == examples.digests()
    assert len(set(lists.digests())) == 40
    assert lists.input_shape == examples.input_shape == (10,)
    assert lists.batch([])[0].shape == (0, 2, 2)
    assert torch.equal(lists.subset([7, 3]).batch([1])[0], lists.batch([3])[0])
    kept, held = hold_out(lists, 0.3, seed=2)
    assert sorted(kept.digests() + held.digests()) == sorted(lists.digests())
    with pytest.raises(InputError, match="equal in number"):
        WeightedBagExamples(bags, torch.tensor([0]))


def test_digests_follow_text_and_label() -> None:
    def digests(texts: list[list[int]], labels: list[int]) -> list[bytes]:
        return text_digests(LabelledSequences(sequences=Sequences.from_lists(texts), labels=torch.tensor(labels)))

    first = digests([[1, 2], [3], [1, 2], []], [0, 1, 1, 0])
    assert len(set(first)) == 4
    assert digests([[9, 9, 9], [3]], [0, 1])[1] == first[1]
    examples = WeightedBagExamples(bags_of([{}] * 4), torch.tensor([0, 1, 1, 0]), digests=first)
    assert examples.subset([2, 0]).listed().digests() == [first[2], first[0]]
