"""Runs whose end nobody fixed in advance: charged by stages, so that stopping may depend on what was released."""

from __future__ import annotations

import math
from dataclasses import dataclass

from sluice._base import validate
from sluice._base.codec import Encoded

#: A staged run has no planned end. A ledger needs a number, which no run reaches.
MOST_RELEASES = 10**9


@dataclass(frozen=True, kw_only=True)
class Stage:
    """What a run is charged for that stopped in this stage.

    Attributes:
        number: 0 for the first.
        releases: the last release of the stage.
        delta_share: the part of delta that belongs to the stage.
    """

    number: int
    releases: int
    delta_share: float


@dataclass(frozen=True, kw_only=True)
class Stages(Encoded):
    """Stage k ends with release ``ceil(first * 2^(k/2))``, and ``1/((k+1)(k+2))`` of delta belongs to it.

    Attributes:
        first: the releases of the first stage, fixed before any record is read. Those that you expect to need at least.

    Guarantee:
        Shares of all stages add up to 1. A run that stopped in stage k, for any reason that is a function of what was
        released, costs the epsilon of as many releases as end the stage, at that stage's part of delta (docs/accounting.md,
        section 12.1).
    """

    first: int

    def __post_init__(self) -> None:
        validate.positive_integer(first=self.first)

    def stage(self, number: int) -> Stage:
        # Half powers of two from exact integers: the square root is rounded once, and upwards by the ceiling.
        releases = self.first << (number // 2)
        if number % 2:
            releases = math.isqrt(2 * releases * releases - 1) + 1
        return Stage(number=number, releases=releases, delta_share=1 / ((number + 1) * (number + 2)))

    def reached_by(self, releases: int) -> Stage:
        """The stage of a run that has made this many releases."""
        number = 0
        while self.stage(number).releases < releases:
            number += 1
        return self.stage(number)


__all__ = ["MOST_RELEASES", "Stage", "Stages"]
