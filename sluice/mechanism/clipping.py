"""Ways of clipping a record's gradient, and schedules that are fixed before the first record is read (no torch needed).

Each says what one record adds to a sum at most; noise is a multiple of that. docs/accounting.md, section 12, has the proofs.
"""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Self

from sluice._base import validate
from sluice._base.codec import ADDED_IF_GIVEN, Encoded, readable
from sluice._base.errors import InputError
from sluice.mechanism.rounding_error import NORM_ERROR, largest_batch

#: Each level of noise is composed on its own, so an accountant takes the longer the more there are.
MOST_FACTORS = 1000

#: Whether a gradient is clipped counts as 1/2 from (1 + COUNT_RAMP) C on, as -1/2 up to (1 - COUNT_RAMP) C, and rises between.
COUNT_RAMP = 2.0**-5

#: Counts are multiples of this, so that sums of up to 2^26 of them are exact.
COUNT_GRID = 2.0**-26


#: Beyond this a bound jumps from end to end.
LARGEST_RATE = 10.0


@dataclass(frozen=True, kw_only=True)
class Schedule(Encoded):
    """Factors for one release after the other, fixed in advance; the last one stays.

    Attributes:
        factors: of the first releases, the next ones and so on.
        every: for how many releases each factor holds.
    """

    factors: tuple[float, ...]
    every: int = 1

    def __post_init__(self) -> None:
        validate.positive_integer(every=self.every)
        if not 1 <= len(self.factors) <= MOST_FACTORS:
            raise InputError(
                f"factors of length {len(self.factors)} are not allowed: give 1 to {MOST_FACTORS}, and let each hold for "
                "more releases (every)."
            )
        for factor in self.factors:
            validate.positive(factors=factor)

    @classmethod
    def exponential(cls, *, factor: float, every: int, times: int) -> Self:
        """Multiplied with ``factor`` after each ``every`` releases, so many times."""
        validate.positive(factor=factor)
        validate.positive_integer(times=times)
        return cls(factors=tuple(factor**power for power in range(times + 1)), every=every)

    def at(self, turn: int) -> float:
        """The factor of a release; turns are counted from 0."""
        return self.factors[min(turn // self.every, len(self.factors) - 1)]

    def counts(self, releases: int) -> Iterator[tuple[float, int]]:
        """Factors, and for how many of the first so many releases each holds; neighbours are not alike."""
        stretches = [(factor, len(list(group))) for factor, group in itertools.groupby(self.factors)]
        begun = 0
        for place, (factor, length) in enumerate(stretches):
            is_last = place == len(stretches) - 1
            held = releases - begun if is_last else min(releases - begun, self.every * length)
            begun += held
            if held:
                yield factor, held


#: What holds where no schedule is given.
CONSTANT = Schedule(factors=(1.0,))


@dataclass(frozen=True, kw_only=True)
class Clipping(Encoded, ABC):
    """How gradients are clipped."""

    tag: ClassVar[str | None] = "clipping"

    @property
    def count_noise(self) -> float:
        """Standard deviation of the noise on the count that is published beside each sum; infinite where none is."""
        return math.inf

    @property
    @abstractmethod
    def summary(self) -> str:
        """What to show of it before a run."""


@readable
@dataclass(frozen=True, kw_only=True)
class FlatClipping(Clipping):
    """The gradient over all parameters is clipped to ``max_grad_norm``, times the schedule's factor."""

    kind: ClassVar[str] = "flat"

    max_grad_norm: float
    schedule: Schedule | None = field(default=None, metadata=ADDED_IF_GIVEN)

    def __post_init__(self) -> None:
        validate.positive(max_grad_norm=self.max_grad_norm)

    def bound_at(self, turn: int) -> float:
        """The maximum norm of a record's gradient in a release; turns are counted from 0."""
        return self.max_grad_norm * (self.schedule or CONSTANT).at(turn)

    @property
    def summary(self) -> str:
        return f"gradients up to {self.max_grad_norm:g}" + (" by a schedule" if self.schedule else "")


@readable
@dataclass(frozen=True, kw_only=True)
class LayerClipping(Clipping):
    """The gradient of each layer is clipped to a bound of its own, times the schedule's factor.

    Attributes:
        layers: names of the modules that hold trainable parameters; "" for the model itself.
        bounds: the maximum norm in each of them.

    Guarantee:
        One record moves the sum over all layers by at most the root of the sum of the squared bounds.
    """

    kind: ClassVar[str] = "per layer"

    layers: tuple[str, ...]
    bounds: tuple[float, ...]
    schedule: Schedule | None = field(default=None, metadata=ADDED_IF_GIVEN)

    def __post_init__(self) -> None:
        if not self.layers or len(self.layers) != len(self.bounds) or len(set(self.layers)) != len(self.layers):
            raise InputError(
                f"layers={self.layers}, bounds={self.bounds} is not allowed: give each layer once, and one bound for each."
            )
        for bound in self.bounds:
            validate.positive(bounds=bound)

    @classmethod
    def of(cls, bounds: Mapping[str, float], *, schedule: Schedule | None = None) -> Self:
        return cls(layers=tuple(bounds), bounds=tuple(bounds.values()), schedule=schedule)

    def bounds_at(self, turn: int) -> dict[str, float]:
        factor = (self.schedule or CONSTANT).at(turn)
        return {layer: bound * factor for layer, bound in zip(self.layers, self.bounds, strict=True)}

    @property
    def summary(self) -> str:
        total = math.hypot(*self.bounds)
        return f"each of {len(self.layers)} layers, {total:g} together" + (" by a schedule" if self.schedule else "")


@readable
@dataclass(frozen=True, kw_only=True)
class QuantileClipping(Clipping):
    """The bound follows a quantile of the norms (Andrew et al., 2021): a noisy count of clipped records moves it.

    After each release the bound is multiplied with ``exp(-rate (share - quantile))``, share being the noisy share of records
    that were not clipped.

    Attributes:
        max_grad_norm: the first bound.
        quantile: the share of records that should not be clipped.
        rate: how fast the bound moves.
        noise: standard deviation of the noise on the count. A twentieth of the batch size is usual.
        smallest, largest: the bound stays between them.
    """

    kind: ClassVar[str] = "quantile"

    max_grad_norm: float
    quantile: float = 0.5
    rate: float = 0.2
    noise: float
    smallest: float
    largest: float

    def __post_init__(self) -> None:
        validate.positive(
            max_grad_norm=self.max_grad_norm,
            rate=self.rate,
            noise=self.noise,
            smallest=self.smallest,
            largest=self.largest,
        )
        validate.open_fraction(quantile=self.quantile)
        if self.rate > LARGEST_RATE:
            raise InputError(f"rate={self.rate} is not allowed: it must be at most {LARGEST_RATE:g}.")
        if not self.smallest <= self.max_grad_norm <= self.largest:
            raise InputError(
                f"max_grad_norm={self.max_grad_norm} is not allowed: it must lie between smallest={self.smallest} and "
                f"largest={self.largest}."
            )

    @property
    def count_noise(self) -> float:
        return self.noise

    def next_bound(self, bound: float, unclipped_share: float) -> float:
        """The bound after a release, from the noisy share of records that were not clipped: post-processing."""
        away = min(max(unclipped_share, 0.0), 1.0) - self.quantile
        return min(max(bound * math.exp(-self.rate * away), self.smallest), self.largest)

    @property
    def summary(self) -> str:
        return f"at the {100 * self.quantile:g} % quantile of norms, from {self.max_grad_norm:g}"


def count_error(expected_batch_size: float) -> float:
    """How far rounding may move the count of the other records when one is added (docs/noise.md, section 6)."""
    steepness = (1 + COUNT_RAMP) / (2 * COUNT_RAMP)
    return (NORM_ERROR * steepness + COUNT_GRID) * largest_batch(expected_batch_size)


__all__ = ["Clipping", "FlatClipping", "LayerClipping", "QuantileClipping", "Schedule", "count_error"]
