"""Texts as word ranks (1 is the most frequent word): padded ids for embeddings, bags of words for linear models.

The ranks come from a public word index. An index that was counted on the private texts themselves would leak,
and its cost is not covered by the accounting of a training run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Self

import torch
from torch import Tensor

from sluice._base.errors import InputError
from sluice._base.validate import positive_integer
from sluice.data.examples import Examples, Indices
from sluice.data.parsers import flatten
from sluice.gradients.native.loading import library
from sluice.gradients.native.rows import pad_lists

PADDING, START, UNKNOWN, RANK_SHIFT = 0, 1, 2, 3


@dataclass(frozen=True, kw_only=True, eq=False)
class Sequences:
    """Lists of word ranks, kept as one row of numbers and the offsets where each list begins and ends."""

    ids: Tensor
    offsets: Tensor

    @classmethod
    def from_lists(cls, lists: Sequence[Sequence[int]]) -> Self:
        if any(rank < 1 for ranks in lists for rank in ranks):
            raise InputError("sequences hold a rank below 1: ranks must be integers from 1, the most frequent.")
        ids, offsets = flatten(lists)
        return cls(ids=torch.from_numpy(ids), offsets=torch.from_numpy(offsets))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> list[int]:
        if not 0 <= index < len(self):
            raise IndexError(f"index={index} is outside {len(self)} sequences")
        return self.ids[int(self.offsets[index]) : int(self.offsets[index + 1])].tolist()

    @property
    def lengths(self) -> Tensor:
        return self.offsets.diff()

    def subset(self, indices: Tensor) -> Self:
        """The lists at these positions, in this order."""
        lengths = self.lengths[indices]
        offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
        return type(self)(ids=self.ids[_spans(self.offsets[:-1][indices], lengths)], offsets=offsets)


@dataclass(frozen=True, kw_only=True)
class LabelledSequences:
    sequences: Sequences
    labels: Tensor


def padded(sequences: Sequences, *, vocabulary: int = 20_000, length: int = 80) -> Tensor:
    """Ids as Keras counts them, ``length`` for each text: a start mark, then rank + 3; cut or padded at the end.

    Ids of ``vocabulary`` and above become "unknown" (2); padding is 0, the start mark 1.

    **Guarantee.** Row i is a function of text i alone.
    """
    positive_integer(length=length, vocabulary=vocabulary)
    if vocabulary <= RANK_SHIFT:
        raise InputError(f"vocabulary={vocabulary} is not allowed: the first {RANK_SHIFT} ids are marks, so give more.")
    columns = torch.arange(length - 1)
    inside = columns[None, :] < sequences.lengths[:, None]
    positions = (sequences.offsets[:-1, None] + columns[None, :])[inside]
    ids = sequences.ids[positions] + RANK_SHIFT
    rows = torch.full((len(sequences), length), PADDING, dtype=torch.int32)
    rows[:, 0] = START
    rows[:, 1:][inside] = torch.where(ids < vocabulary, ids, UNKNOWN).to(torch.int32)
    return rows


@dataclass(frozen=True, kw_only=True, eq=False)
class BagsOfWords:
    """For each text the set of its words, kept as column numbers.

    ``dense`` makes rows of length 1 of them, ``listed`` lists of one length.
    """

    columns: Tensor
    offsets: Tensor
    width: int

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def dense(self, indices: Tensor) -> Tensor:
        """float32 rows: 1 / sqrt(words) for each word of the text, 0 elsewhere; a text without words is all 0.

        **Guarantee.** Row i is a function of text i alone, and its Euclidean norm is 1 or 0.
        """
        lengths = self.offsets.diff()[indices]
        columns = self.columns[_spans(self.offsets[:-1][indices], lengths)].to(torch.int64)
        rows = torch.arange(len(indices), device=columns.device).repeat_interleave(lengths)
        dense = torch.zeros(len(indices), self.width, device=columns.device)
        dense[rows, columns] = lengths.to(torch.float32).rsqrt()[rows]
        return dense

    def listed(self, indices: Tensor) -> Tensor:
        """The columns themselves as int32, filled up with -1 to the length of the longest list of all texts.

        **Guarantee.** Row i is a function of text i alone, but for how many -1 it ends with. That number depends on the
        longest text; nothing that is released may depend on it.
        """
        return padded_lists(self.columns, self.offsets, indices, length=self.longest)

    @cached_property
    def longest(self) -> int:
        return max(1, int(self.offsets.diff().max())) if len(self) else 1

    def subset(self, indices: Tensor) -> BagsOfWords:
        chosen = Sequences(ids=self.columns, offsets=self.offsets).subset(indices)
        return BagsOfWords(columns=chosen.ids, offsets=chosen.offsets, width=self.width)


def bag_of_words(sequences: Sequences, vocabulary: int, skip_commonest: int = 50) -> BagsOfWords:
    """Which of the ``vocabulary`` most frequent words, after the ``skip_commonest`` commonest, each text holds.

    Column j stands for the word of rank skip_commonest + 1 + j; how often a text holds a word does not count.

    **Guarantee.** Row i is a function of text i alone: the columns are chosen by public rank, not by the texts.
    """
    positive_integer(vocabulary=vocabulary)
    if not isinstance(skip_commonest, int) or skip_commonest < 0:
        raise InputError(f"skip_commonest={skip_commonest!r} is not allowed: it must be an integer >= 0.")
    columns = sequences.ids.to(torch.int64) - (skip_commonest + 1)
    rows = torch.arange(len(sequences)).repeat_interleave(sequences.lengths)
    kept = (columns >= 0) & (columns < vocabulary)
    pairs = torch.unique(rows[kept] * vocabulary + columns[kept])
    counts = torch.bincount(pairs // vocabulary, minlength=len(sequences))
    offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    return BagsOfWords(columns=(pairs % vocabulary).to(torch.int32), offsets=offsets, width=vocabulary)


class BagExamples(Examples):
    """Bags of words with labels; batches are dense rows of norm 1, or, if ``sparse``, lists of the columns that are not 0."""

    def __init__(self, bags: BagsOfWords, labels: Tensor, *, sparse: bool = False) -> None:
        if len(bags) != len(labels):
            raise InputError(f"bags ({len(bags)} texts) and labels ({len(labels)}) must be equal in number.")
        self.bags = bags
        self.labels = labels.to(torch.int64)
        self.sparse = sparse

    def inputs_at(self, indices: Tensor) -> Tensor:
        return self.bags.listed(indices) if self.sparse else self.bags.dense(indices)

    def digested_inputs_at(self, indices: Tensor) -> Tensor:
        return self.bags.dense(indices)

    @property
    def input_shape(self) -> tuple[int, ...]:
        return (self.bags.width,)

    def listed(self) -> Self:
        """The same records as lists of columns, for models that take them (`sluice.models.SparseLinear`)."""
        return type(self)(self.bags, self.labels, sparse=True)

    def subset(self, indices: Indices) -> Self:
        positions = self.positions(indices)
        return type(self)(self.bags.subset(positions), self.labels.index_select(0, positions), sparse=self.sparse)


def _spans(starts: Tensor, lengths: Tensor) -> Tensor:
    """The positions start, start + 1, ... of every span, one span after the other."""
    ends = lengths.cumsum(0)
    within = torch.arange(int(lengths.sum()), device=lengths.device) - (ends - lengths).repeat_interleave(lengths)
    return starts.repeat_interleave(lengths) + within


def padded_lists(values: Tensor, offsets: Tensor, indices: Tensor, *, length: int) -> Tensor:
    """The lists at these positions as rows of int32 of one length, filled up with -1."""
    if values.device.type == "cpu" and library() is not None:
        return pad_lists(values, offsets, indices, length=length)
    lengths = offsets.diff()[indices]
    rows = torch.full((len(indices), length), -1, dtype=torch.int32, device=values.device)
    inside = torch.arange(length, device=values.device) < lengths[:, None]
    rows[inside] = values[_spans(offsets[:-1][indices], lengths)]
    return rows
