"""Features of texts that need no training and no public texts: words weighted by place, negation and public rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from sluice._base import validate
from sluice._base.errors import InputError
from sluice.data.text import LabelledSequences, Sequences
from sluice.data.weighted import VALUE_STEPS, WeightedBagExamples, WeightedBags, text_digests
from sluice.features.catalog import written
from sluice.features.words_negation import Negation, Numbers

Reals = NDArray[np.float64]
WordIndex = Mapping[str, int]

#: The parts of a text, as shares of its length, where words count more.
HEAD, TAIL = 0.1, 0.25
#: Pairs of two words that are both commoner than this say nothing that the words do not say.
COMMONEST = 60
#: The word of this rank is weighted with 1.
MIDDLE_RANK = 1000
LARGEST_OPTION = 1000
LARGEST_EXPONENT = 4
MOST_COLUMNS = 2**30
_TEXTS_AT_ONCE = 2048


@dataclass(frozen=True, kw_only=True)
class WeightedWords:
    """Texts as sparse rows of norm 1, one column for each frequent word. All fields are public.

    A word counts 1, more near the end and the beginning of its text; behind a negation it counts with the opposite sign. The
    counts of a word are added up, limited, and multiplied by a power of its rank, so that rare words weigh more. Pairs of
    neighbouring words fall into further columns by a hash. Last, the row is divided by its norm.

    Attributes:
        vocabulary: words of a rank up to this have a column.
        end: what the last word of a text counts in addition; less before it, and nothing before the last quarter.
        start: what the first word counts in addition; less behind it, and nothing behind the first tenth.
        negation: what a word behind a negation counts, with a minus; 0 gives negations no meaning.
        window: how many words a negation reaches.
        limit: the largest count of one word in one text.
        exponent: the word of rank r is weighted with ``((r + offset) / 1000) ** exponent``.
        offset: see there.
        pairs: the weight of pairs of neighbouring words; 0 for none.
        pair_vocabulary: words of a rank up to this make pairs.
        pair_columns: into how many columns pairs fall.
        constant: the value, before the division by the norm (which counts as 1 without it), of a last column that is the
            same for all texts; 0 for no such column. It does what a bias does, for classes of unequal size.

    Guarantee:
        Row i is a function of text i, of these fields and of the word index alone, bit for bit, so features cost no
        privacy as far as ranks and word index are public. Its norm is 1 up to rounding, or 0 for a text without any of
        the words. Ranks below 1, which no list of words can hold, stand for no word.
    """

    kind: ClassVar[str] = "weighted-words"
    summary: ClassVar[str] = "words of texts, weighted by place, negation and public rank"
    version: ClassVar[int] = 1

    vocabulary: int = 5000
    end: float = 1.0
    start: float = 0.5
    negation: float = 0.5
    window: int = 2
    limit: float = 2.0
    exponent: float = 0.5
    offset: float = 6.0
    pairs: float = 0.0
    pair_vocabulary: int = 2000
    pair_columns: int = 65_536
    constant: float = 0.0

    def __post_init__(self) -> None:
        validate.positive_integer(
            vocabulary=self.vocabulary,
            window=self.window,
            pair_vocabulary=self.pair_vocabulary,
            pair_columns=self.pair_columns,
        )
        validate.positive(limit=self.limit)
        validate.finite(exponent=self.exponent)
        validate.non_negative(
            end=self.end,
            start=self.start,
            negation=self.negation,
            offset=self.offset,
            pairs=self.pairs,
            constant=self.constant,
        )
        if self.vocabulary + self.pair_columns > MOST_COLUMNS:
            raise InputError(
                f"vocabulary={self.vocabulary} with pair_columns={self.pair_columns} is not allowed: together they must "
                f"be {MOST_COLUMNS} at most."
            )
        # Beyond these, squares of values could overflow or vanish, and rows would have no norm to be divided by.
        if abs(self.exponent) > LARGEST_EXPONENT:
            raise InputError(
                f"exponent={self.exponent} is not allowed: it must be from -{LARGEST_EXPONENT} to {LARGEST_EXPONENT}."
            )
        for name in ("end", "start", "negation", "limit", "offset", "pairs", "constant"):
            value = getattr(self, name)
            if value and not 1 / LARGEST_OPTION <= value <= LARGEST_OPTION:
                raise InputError(
                    f"{name}={value} is not allowed: if it is not 0, it must be from {1 / LARGEST_OPTION} to {LARGEST_OPTION}."
                )

    @property
    def width(self) -> int:
        """The number of columns."""
        return self._constant_column + (self.constant > 0)

    @property
    def _constant_column(self) -> int:
        return self.vocabulary + (self.pair_columns if self.pairs else 0)

    def written(self) -> str:
        """The name with the options that are not the default, as a user would type it."""
        return written(self.kind, self)

    def examples(self, texts: LabelledSequences, *, word_index: WordIndex | None = None) -> WeightedBagExamples:
        """Labelled texts as records that a model can be trained on.

        **Guarantee.** Record i is a function of text i and its label.
        """
        bags = self.bags(texts.sequences, word_index=word_index)
        known = Negation.words_in(word_index) if self.negation and word_index is not None else None
        return WeightedBagExamples(bags, texts.labels, digests=text_digests(texts), function_words=known)

    def bags(self, sequences: Sequences, *, word_index: WordIndex | None = None) -> WeightedBags:
        """The rows of these texts.

        Args:
            word_index: from words to the ranks that the texts are made of; not needed with ``negation=0``.

        **Guarantee.** That of the class.
        """
        if self.negation and word_index is None:
            raise InputError(
                f"negation={self.negation} is not allowed without a word index: which ranks are negations cannot be known. "
                "Give word_index (words and their ranks), or set negation=0."
            )
        negation = Negation.of(word_index) if self.negation and word_index is not None else None
        parts = [
            self._rows(sequences.subset(positions), negation)
            for positions in torch.arange(len(sequences)).split(_TEXTS_AT_ONCE)
        ]
        columns, values, counts = (np.concatenate(kind) for kind in zip(*parts, strict=True))
        return WeightedBags(
            columns=torch.from_numpy(columns.astype(np.int32)),
            steps=torch.from_numpy(np.rint(values * VALUE_STEPS).astype(np.int32)),
            offsets=torch.from_numpy(np.concatenate([[0], counts.cumsum()])),
            width=self.width,
        )

    def _rows(self, sequences: Sequences, negation: Negation | None) -> tuple[Numbers, Reals, Numbers]:
        """The columns and values of all texts, and how many each text has.

        Only operations that are rounded entry by entry are used, and sums in the order of the words: so no text's values
        depend on the others that are computed with it.
        """
        ids, lengths = sequences.ids.numpy().astype(np.int64), sequences.lengths.numpy()
        texts = np.repeat(np.arange(len(lengths)), lengths)
        places = np.arange(len(ids)) - np.repeat(lengths.cumsum() - lengths, lengths)
        counts = self._counts(places, np.repeat(lengths, lengths))
        signed = counts
        if negation is not None:
            turned = negation.behind(ids, places == 0, window=self.window)
            signed = np.where(turned, -self.negation * counts, counts)
        kept = (ids >= 1) & (ids <= self.vocabulary)
        keys, added = texts[kept] * self.width + ids[kept] - 1, signed[kept]
        if self.pairs:
            second, columns = self._pairs(ids, places)
            keys = np.concatenate((keys, texts[second] * self.width + self.vocabulary + columns))
            added = np.concatenate((added, counts[second]))
        keys, which = np.unique(keys, return_inverse=True)
        sums: Reals = np.bincount(which, weights=added, minlength=len(keys)).astype(np.float64)
        return self._normalised(keys, np.clip(sums, -self.limit, self.limit), len(lengths))

    def _counts(self, places: Numbers, lengths: Numbers) -> Reals:
        """What a word counts at each place of a text of this length."""
        share = (places + 0.5) / lengths
        end = np.maximum(0.0, (share - (1 - TAIL)) / TAIL)
        start = np.maximum(0.0, (HEAD - share) / HEAD)
        counts: Reals = 1.0 + self.end * end + self.start * start
        return counts

    def _pairs(self, ids: Numbers, places: Numbers) -> tuple[Numbers, Numbers]:
        """The second words of pairs, by position, and the pairs' columns."""
        before, after = ids[:-1], ids[1:]
        frequent = np.maximum(before, after) <= self.pair_vocabulary
        known = (np.minimum(before, after) >= 1) & (places[1:] > 0)
        found = known & frequent & (np.maximum(before, after) > COMMONEST)
        second = np.flatnonzero(found) + 1
        return second, _hashed(ids[second - 1], ids[second]) % self.pair_columns

    def _normalised(self, keys: Numbers, sums: Reals, texts: int) -> tuple[Numbers, Reals, Numbers]:
        weights = np.full(self._constant_column, self.pairs)
        ranks = np.arange(1, self.vocabulary + 1)
        weights[: self.vocabulary] = ((ranks + self.offset) / MIDDLE_RANK) ** self.exponent
        values = sums * weights[keys % self.width]
        keys, values = keys[values != 0], values[values != 0]
        if self.constant:
            values = values / _norms(keys // self.width, values, texts)
            keys = np.concatenate((keys, np.arange(texts) * self.width + self._constant_column))
            values = np.concatenate((values, np.full(texts, self.constant)))
            order = np.argsort(keys)
            keys, values = keys[order], values[order]
        rows = keys // self.width
        return keys % self.width, values / _norms(rows, values, texts), np.bincount(rows, minlength=texts)


def _norms(rows: Numbers, values: Reals, texts: int) -> Reals:
    """The norm of the row that each value belongs to."""
    norms: Reals = np.sqrt(np.bincount(rows, weights=values * values, minlength=texts))[rows]
    return norms


def hashed_pair(before: int, after: int) -> int:
    """What decides the column of a pair of ranks."""
    return int(_hashed(np.array([before]), np.array([after]))[0])


def _hashed(before: Numbers, after: Numbers) -> Numbers:
    """A number for each pair of ranks that looks random: the finaliser of MurmurHash3 on both of them."""
    mixed = before.astype(np.uint64) << np.uint64(32) | after.astype(np.uint64)
    for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
        mixed = (mixed ^ mixed >> np.uint64(33)) * np.uint64(factor)
    return (mixed >> np.uint64(33)).astype(np.int64)


__all__ = ["WeightedWords", "WordIndex", "hashed_pair"]
