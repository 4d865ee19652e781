"""Texts as sparse rows of numbers: for each text some columns and the value at each, read as rows or as lists."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Self

import torch
from torch import Tensor

from sluice._base.errors import InputError
from sluice.data.examples import Examples, Indices
from sluice.data.text import LabelledSequences, Sequences, padded_lists

VALUE_STEPS = 2**24
"""Values are whole multiples of one over this: float32 holds each of them from -1 to 1 exactly."""


@dataclass(frozen=True, kw_only=True, eq=False)
class WeightedBags:
    """For each text the columns that are not 0, each once, and the values there, from -1 to 1.

    Attributes:
        columns: int32, those of one text after those of another.
        steps: int32, the values times ``VALUE_STEPS``, beside the columns.
        offsets: int64, where each text begins, and where the last one ends.
        width: number of columns.
    """

    columns: Tensor
    steps: Tensor
    offsets: Tensor
    width: int

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def values(self) -> Tensor:
        """The values beside the columns, float32."""
        return self.steps.to(torch.float32) / VALUE_STEPS

    def dense(self, indices: Tensor) -> Tensor:
        """The texts at these positions as float32 rows.

        **Guarantee.** Row i is a function of text i alone.
        """
        chosen = self.subset(indices)
        rows = torch.arange(len(indices), device=chosen.columns.device).repeat_interleave(chosen.offsets.diff())
        dense = torch.zeros(len(indices), self.width, device=chosen.columns.device)
        dense[rows, chosen.columns.to(torch.int64)] = chosen.values()
        return dense

    def listed(self, indices: Tensor) -> Tensor:
        """int32 of shape ``(n, 2, longest)``: for each text its columns, filled up with -1, and its steps below them.

        **Guarantee.** Row i is a function of text i alone, but for how many -1 it ends with. That number depends on the
        longest text; nothing that is released may depend on it.
        """
        both = (padded_lists(part, self.offsets, indices, length=self.longest) for part in (self.columns, self.steps))
        return torch.stack(tuple(both), dim=1)

    @cached_property
    def longest(self) -> int:
        return max(1, int(self.offsets.diff().max())) if len(self) else 1

    def subset(self, indices: Tensor) -> WeightedBags:
        columns, steps = (
            Sequences(ids=part, offsets=self.offsets).subset(indices) for part in (self.columns, self.steps)
        )
        return WeightedBags(columns=columns.ids, steps=steps.ids, offsets=columns.offsets, width=self.width)


class WeightedBagExamples(Examples):
    """Weighted bags with labels; batches are dense rows, or, if ``sparse``, lists of columns and values.

    ``digests`` are those of the texts that the bags were made of (`text_digests`): a text then stays the same record,
    and falls on the same side of a split, whatever options its features have. ``function_words`` are the words, with their
    ranks, that told how to read the texts: public, and needed to read others in the same way.
    """

    def __init__(
        self,
        bags: WeightedBags,
        labels: Tensor,
        *,
        sparse: bool = False,
        digests: list[bytes] | None = None,
        function_words: Mapping[str, int] | None = None,
    ) -> None:
        if len(bags) != len(labels):
            raise InputError(f"bags ({len(bags)} texts) and labels ({len(labels)}) must be equal in number.")
        self.bags = bags
        self.labels = labels.to(torch.int64)
        self.sparse = sparse
        self._digests = digests
        self.function_words = dict(function_words or {})

    def inputs_at(self, indices: Tensor) -> Tensor:
        return self.bags.listed(indices) if self.sparse else self.bags.dense(indices)

    def digests(self) -> list[bytes]:
        """The sha256 of each record: of its text where that is known, else of its columns and values; and of its label.

        **Guarantee.** Entry i is a function of record i alone. Like any hash of records it is itself private.
        """
        if self._digests is not None:
            return self._digests
        pairs = torch.stack((self.bags.columns, self.bags.steps), dim=1)
        return _hashed(f"weighted bag of {self.bags.width}", pairs, self.bags.offsets, self.labels)

    @property
    def input_shape(self) -> tuple[int, ...]:
        return (self.bags.width,)

    def listed(self) -> Self:
        """The same records as lists, for models that take them (`sluice.models.SparseLinear`)."""
        return self._with(self.bags, self.labels, self._digests, sparse=True)

    def subset(self, indices: Indices) -> Self:
        positions = self.positions(indices)
        digests = None if self._digests is None else [self._digests[position] for position in positions.tolist()]
        labels = self.labels.index_select(0, positions)
        return self._with(self.bags.subset(positions), labels, digests, sparse=self.sparse)

    def _with(self, bags: WeightedBags, labels: Tensor, digests: list[bytes] | None, *, sparse: bool) -> Self:
        return type(self)(bags, labels, sparse=sparse, digests=digests, function_words=self.function_words)


def text_digests(texts: LabelledSequences) -> list[bytes]:
    """The sha256 of each text, all its words in order, and of its label.

    **Guarantee.** Entry i is a function of text i and its label alone. Like any hash of records it is itself private.
    """
    return _hashed("text", texts.sequences.ids.to(torch.int32), texts.sequences.offsets, texts.labels)


def _hashed(what: str, entries: Tensor, offsets: Tensor, labels: Tensor) -> list[bytes]:
    numbers, ends = entries.cpu().contiguous().numpy(), offsets.tolist()
    kind = f"sluice record, version 1: {what}\n".encode()
    return [
        hashlib.sha256(kind + f"{label}\n".encode() + numbers[first:end].tobytes()).digest()
        for label, first, end in zip(labels.tolist(), ends, ends[1:], strict=False)
    ]


__all__ = ["VALUE_STEPS", "WeightedBagExamples", "WeightedBags", "text_digests"]
