"""Which words of a text stand behind a negation, by public lists of English function words."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from sluice._base.errors import InputError

NEGATIONS = frozenset(
    (
        *("not", "no", "never", "cannot", "without", "nor", "neither", "hardly", "barely", "nothing", "nobody", "none"),
        *("arent", "cant", "couldnt", "didnt", "doesnt", "dont", "hasnt", "havent", "isnt", "shouldnt", "wasnt"),
        *("werent", "wont", "wouldnt"),
    )
)
"""Words that turn what follows; so does every word that ends in n't."""

BOUNDARIES = frozenset(("but", "and", "or", "however", "although", "though", "because", "which", "who", "that"))
"""Words at which a negation no longer holds."""

MOST_RANKS = 2**24

Flags = NDArray[np.bool_]
Numbers = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, eq=False)
class Negation:
    """The ranks of negations and of boundaries, as tables; the last entry stands for all higher ranks, the first for none."""

    turns: Flags
    ends: Flags

    @classmethod
    def of(cls, word_index: Mapping[str, int]) -> Self:
        """From a word index: words and their ranks."""
        wrong = [word for word, rank in word_index.items() if not isinstance(rank, int) or not 1 <= rank <= MOST_RANKS]
        if wrong:
            raise InputError(
                f"word_index[{wrong[0]!r}]={word_index[wrong[0]]!r} is not allowed: ranks are integers from 1 to {MOST_RANKS}."
            )
        turns = (rank for word, rank in word_index.items() if word in NEGATIONS or word.endswith("n't"))
        return cls(turns=_table(turns), ends=_table(rank for word, rank in word_index.items() if word in BOUNDARIES))

    @staticmethod
    def words_in(word_index: Mapping[str, int]) -> dict[str, int]:
        """The part of a word index that `of` reads: whoever has it needs no more of the index."""
        known = NEGATIONS | BOUNDARIES
        return {word: rank for word, rank in word_index.items() if word in known or word.endswith("n't")}

    def behind(self, ids: Numbers, first: Flags, *, window: int) -> Flags:
        """Which words are among the ``window`` after a negation, as far as the text and the clause reach.

        Args:
            ids: ranks of words, one text after another.
            first: whether a word begins its text.
        """
        stops = first | _looked_up(self.ends, ids)
        reached = _looked_up(self.turns, ids)
        found = np.zeros_like(reached)
        for _ in range(window):
            reached = np.roll(reached, 1) & ~stops
            found |= reached
        return found


def _table(ranks: Iterable[int]) -> Flags:
    known = list(ranks)
    table = np.zeros(max(known, default=0) + 2, dtype=bool)
    table[known] = True
    return table


def _looked_up(table: Flags, ids: Numbers) -> Flags:
    found: Flags = table[np.clip(ids, 0, len(table) - 1)]
    return found


__all__ = ["BOUNDARIES", "NEGATIONS", "Negation"]
