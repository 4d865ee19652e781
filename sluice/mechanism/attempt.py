"""One attempt at a release: its decision is fixed before any data is touched, and only its metric is awaited."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from sluice._base import validate
from sluice._base.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor

# An attempt that is useful less often than this is a mistake in the settings, not a gate.
RAREST_USEFUL_ATTEMPT = 1e-8


class DecisionNoise(Protocol):
    """What a gate asks of a source of randomness (`sluice.randomness.noise.NoiseSource`)."""

    def rounded_normal(self, count: int, *, scale: float) -> Tensor: ...

    def bernoulli(self, count: int, probability: float) -> Tensor: ...

    def noisy_number(
        self, raw: float, *, noise_multiplier: float, sensitivity: float, sum_error: float = 0.0
    ) -> float: ...


@dataclass(frozen=True, kw_only=True)
class ReferenceState:
    """What the next attempt is compared with.

    Attributes:
        value: the reference itself.
        weight: total weight of the published references averaged in ``value``; 0 before the first.
        public: whether ``value`` depends on the data through published values alone. If not, it is as sensitive as
            the data and belongs in no public file.
    """

    value: float
    weight: float = 0.0
    public: bool = True

    def __post_init__(self) -> None:
        validate.finite(value=self.value)
        validate.non_negative(weight=self.weight)

    def averaged_with(self, published: float, *, decay: float) -> ReferenceState:
        """The running average after one more published reference; the initial constant drops out with the first."""
        weight = decay * self.weight + 1.0
        return ReferenceState(value=self.value + (published - self.value) / weight, weight=weight)


class Attempt:
    """An attempt whose gate noise is drawn: released exactly if the metric of its whole batch stays below ``limit``.

    The metric only grows, so measuring can stop as soon as :meth:`add` says no. Everything here is sensitive: the
    limit and the metric tell about the batch, the count about the data, and a rejected attempt must leave no trace.

    Attributes:
        limit: the metric must stay strictly below; infinite where every batch is accepted.
        count: how many attempts this stands for: itself, and those before it that could not be accepted and were skipped.
        cannot_be_accepted: whatever the batch, because the attempts that were left ran out.
    """

    def __init__(self, *, limit: float, count: int, measure: Callable[[Tensor], Tensor]) -> None:
        self.limit = limit
        self.count = count
        self._measure = measure
        self._raw_metric = 0.0

    @property
    def cannot_be_accepted(self) -> bool:
        return self.limit == -math.inf

    @property
    def raw_metric(self) -> float:
        """The metric of all records added so far, without noise."""
        return self._raw_metric

    @property
    def still_possible(self) -> bool:
        return self._raw_metric < self.limit

    @property
    def accepted(self) -> bool:
        """Whether the attempt is released; it means that only after the whole batch was added."""
        return self.still_possible

    def add(self, norms: Tensor) -> bool:
        """Measure more records of the batch, by their gradient norms; false once acceptance is ruled out."""
        return self.add_metric(self.raw_metric_of(norms))

    def raw_metric_of(self, norms: Tensor) -> float:
        """What records with these gradient norms add to the metric."""
        return float(self._measure(norms).sum())

    def add_metric(self, raw_metric: float) -> bool:
        """Add a sum of measured records, for instance one that was reduced over workers."""
        if not (math.isfinite(raw_metric) and raw_metric >= 0):
            raise InputError(f"raw_metric={raw_metric!r} is not allowed: it must be a finite number >= 0.")
        self._raw_metric += raw_metric
        return self.still_possible


def first_above(
    bound: float, *, draw: Callable[[int], Tensor], probability: float, attempts_left: int | None
) -> tuple[float | None, int]:
    """Draw until a value exceeds the bound; give it, and how many were drawn up to it.

    Values come in batches of about three times as many as are needed on average; those behind the first useful one
    are dropped unused. None if there is no useful one among the attempts that are left.
    """
    if probability < RAREST_USEFUL_ATTEMPT and (attempts_left is None or attempts_left > 1 / RAREST_USEFUL_ATTEMPT):
        raise InputError(
            f"this gate accepts at most {probability:.1g} of all attempts, whatever the batch, and would never end: "
            "raise gate_noise, lower beta, or set max_attempts."
        )
    at_once = min(math.ceil(3 / max(probability, RAREST_USEFUL_ATTEMPT)), 1 << 16)
    skipped = 0
    while attempts_left is None or skipped < attempts_left:
        drawn = draw(at_once)
        useful = (drawn > bound).nonzero()
        if len(useful) == 0:
            skipped += at_once
            continue
        first = int(useful[0])
        if attempts_left is not None and skipped + first >= attempts_left:
            break
        return float(drawn[first]), skipped + first + 1
    return None, attempts_left or 0
