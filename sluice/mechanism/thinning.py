"""Selection record by record: a gate that keeps each record of a batch by a coin of its own, and the same as a scaling rule.

A gate whose acceptance of a batch is a product over its records *is* Poisson sampling at other rates, so it needs no attempts,
no reference and no noise of its own, and costs what plain DP-SGD costs (docs/accounting.md, section 13).
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from sluice._base import validate
from sluice._base.codec import readable
from sluice._base.errors import InputError
from sluice.accounting.acceptance import Acceptance
from sluice.mechanism.attempt import Attempt, DecisionNoise, ReferenceState
from sluice.mechanism.gates import LARGEST_SMALL_NORM, METRIC_GRID, Gate, rising_metric
from sluice.mechanism.rounding_error import NORM_ERROR
from sluice.mechanism.scaling import ScalingRule

if TYPE_CHECKING:
    from torch import Tensor

# Probabilities are tabulated at so many steps of the metric and straight lines in between: products and sums of floats,
# which are rounded alike whatever stands beside them, where an exponential function may depend on its place in a vector.
TABLE_STEPS = 4096

# No record is kept more often than this. So that a coin falls either way for everybody, and the last digits of a norm cannot
# make possible what was impossible.
LARGEST_SHARE = 1 - 2.0**-8

LARGEST_STRENGTH = 10.0


@readable
@dataclass(frozen=True, kw_only=True)
class ThinningGate(Gate):
    """Keep each record of one Poisson batch by a coin of its own, the more rarely the larger its gradient is.

    Record i has the metric ``e_i`` of `ClippingBiasGate`, in [0, 1]. Its *odds* of being in a release are those of the plain
    Poisson sample times ``exp(-strength * e_i)``: the law that accepting whole batches with probability ``prod exp(-strength *
    e_i)``, and drawing again otherwise, would give. A negative strength prefers large gradients: odds are multiplied by
    ``exp(|strength| * e_i)``, candidates are drawn at the largest rate that results, and that rate is charged.

    Attributes:
        strength: how much smaller the logarithm of the odds is where the metric is 1; -10 to 10.
        small_norm: norms up to this have metric 0. None takes the scaling rule's bound.
        large_norm: norms from here on have metric 1.
        moved_records: of so many other records, at most, the last digits of norms may change when one record is added: one, or
            all of a piece in an ordinary loop over a mean loss. It is charged (`acceptance`).

    Guarantee:
        A release costs what one of plain DP-SGD costs at the rate with which candidates are drawn: whether a record is kept
        depends on that record, public values and a coin of its own, so the coin is part of what the record contributes, which
        is never longer than the scaling rule says. There are no attempts, so none can show in the run time.
    """

    kind: ClassVar[str] = "thinning"
    thins: ClassVar[bool] = True

    strength: float = 1.0
    small_norm: float | None = None
    large_norm: float = 11.0
    moved_records: int = 1

    def __post_init__(self) -> None:
        validate.positive_integer(moved_records=self.moved_records)
        require_strength(strength=self.strength)
        validate.positive(large_norm=self.large_norm)
        if self.small_norm is not None:
            validate.non_negative(small_norm=self.small_norm)
            if self.small_norm > LARGEST_SMALL_NORM * self.large_norm:
                raise InputError(
                    f"small_norm={self.small_norm} is not allowed: it must be at most {LARGEST_SMALL_NORM} times "
                    f"large_norm={self.large_norm}, so that the metric does not rise too steeply."
                )

    @property
    def reference_noise(self) -> float:  # type: ignore[override]
        return math.inf

    @property
    def max_attempts(self) -> None:  # type: ignore[override]
        return None

    @property
    def acceptance(self) -> Acceptance:
        """What rounding can do: how the law of the other records' coins can change with one record more.

        Guarantee:
            Every batch is accepted. With the record among the candidates, what the others' coins showed is at most
            ``ratio_max`` times, and at least ``ratio_min`` times, as likely as without it, as if batches were accepted in this
            ratio (docs/accounting.md, section 13.3).
        """
        # Where small norms are still open, the metric may come to rise as steeply as it is allowed to.
        small = LARGEST_SMALL_NORM * self.large_norm if self.small_norm is None else self.small_norm
        steepness = self.large_norm / (self.large_norm - small)
        metric_error = 2 * NORM_ERROR * steepness + METRIC_GRID
        # The metric moves a probability by at most its strength, and a probability of being left out is at least 2^-8.
        change = abs(self.strength) * metric_error / (1 - LARGEST_SHARE) + 2.0**-40
        ratio = (1 + change) ** self.moved_records
        return Acceptance(ratio_min=1 / ratio, ratio_max=ratio, probability_min=1.0)

    def for_batches_of(self, expected_batch_size: float, *, small_norm: float) -> ThinningGate:
        """The gate with norms that do not count filled in, where they are open; the size of batches changes nothing."""
        if self.small_norm is not None:
            return self
        return replace(self, small_norm=min(small_norm, LARGEST_SMALL_NORM * self.large_norm))

    def candidate_rate(self, sample_rate: float) -> float:
        """The rate of candidates among whom records of metric 0 end up in a release with probability ``sample_rate``.

        But for `LARGEST_SHARE`. It is that rate unless the strength is negative, and the rate to account with.
        """
        validate.fraction(sample_rate=sample_rate)
        return sample_rate if self.strength >= 0 else rate_at(sample_rate, odds_factor=math.exp(-self.strength))

    def plain_rate(self, candidate_rate: float) -> float:
        """The inverse of `candidate_rate`."""
        validate.fraction(candidate_rate=candidate_rate)
        return candidate_rate if self.strength >= 0 else rate_at(candidate_rate, odds_factor=math.exp(self.strength))

    def measure(self, norms: Tensor) -> Tensor:
        """The metric of each record, in [0, 1], as `ClippingBiasGate.measure` makes it; 1 where a norm is NaN or infinite."""
        if self.small_norm is None:
            raise InputError("small_norm=None is not allowed here: give a number, usually the scaling rule's bound.")
        return rising_metric(norms, small_norm=self.small_norm, large_norm=self.large_norm)

    def keep_probability(self, norms: Tensor, *, sample_rate: float) -> Tensor:
        """With which probability each candidate is kept, where candidates are drawn at this rate.

        Guarantee:
            Multiples of ``2^-53`` in (0, `LARGEST_SHARE`], each a function of that record's norm alone, bit for bit. It is
            ``a / (1 - q + q a)`` times `LARGEST_SHARE`, with ``a = exp(-strength * e)``, or ``a = exp(-|strength| (1 - e))`` for a
            negative strength, but for straight lines between the values at multiples of 1/4096, rounded down. Where a norm is
            NaN or infinite, ``e = 1``.
        """
        import torch

        table = torch.tensor(_keep_table(self.strength, float(sample_rate)), dtype=torch.float64)
        place = self.measure(norms).mul_(TABLE_STEPS)
        left = place.floor().clamp_(max=TABLE_STEPS - 1)
        index = left.long()
        low, high = table[index], table[index + 1]
        kept = low + (high - low) * (place - left)
        return kept.clamp_(max=LARGEST_SHARE).mul_(2.0**53).floor_().mul_(2.0**-53)

    def first_reference(self) -> ReferenceState:
        return ReferenceState(value=0.0)

    def begin(self, reference: ReferenceState, noise: DecisionNoise, *, attempts_left: int | None = None) -> Attempt:
        return Attempt(limit=math.inf, count=1, measure=self.measure)

    def next_reference(self, reference: ReferenceState, raw_metric: float, noise: DecisionNoise) -> ReferenceState:
        return reference


@readable
@dataclass(frozen=True, kw_only=True)
class Tempered(ScalingRule):
    """Another rule's weight times the probability with which a `ThinningGate` would keep the record: its deterministic twin.

    What a gate does to a release on average, without the sampling noise of doing it by coins.

    Attributes:
        base: the rule whose weights are tempered. Its ``max_grad_norm`` may be left at 1.
        gate: the gate whose place this takes.
        sample_rate: the rate of candidates that the gate would have.

    Guarantee:
        Weights are never larger than the base rule's, so ``weight * norm <= max_grad_norm`` as it is there.
    """

    base: ScalingRule
    gate: ThinningGate
    sample_rate: float

    kind = "tempered"

    def __post_init__(self) -> None:
        super().__post_init__()
        validate.fraction(sample_rate=self.sample_rate)
        if self.base.max_grad_norm not in (1.0, self.max_grad_norm):
            raise InputError(
                f"base.max_grad_norm={self.base.max_grad_norm} contradicts max_grad_norm={self.max_grad_norm}: give the same "
                "number twice."
            )
        base = replace(self.base, max_grad_norm=self.max_grad_norm)
        object.__setattr__(self, "base", base)
        object.__setattr__(self, "gate", self.gate.for_batches_of(math.inf, small_norm=base.unclipped_norm))

    @property
    def unclipped_norm(self) -> float:
        return self.base.unclipped_norm

    def _weights(self, norms: Tensor) -> Tensor:
        kept = self.gate.keep_probability(norms, sample_rate=self.sample_rate) / LARGEST_SHARE
        return self.base._weights(norms) * kept.to(norms.device)


def require_strength(**strengths: float) -> None:
    """Refuse strengths beyond which nearly everybody, or nearly nobody, would be kept."""
    validate.finite(**strengths)
    for name, value in strengths.items():
        if abs(value) > LARGEST_STRENGTH:
            raise InputError(
                f"{name}={value} is not allowed: it must be from {-LARGEST_STRENGTH:g} to {LARGEST_STRENGTH:g}."
            )


def rate_at(sample_rate: float, *, odds_factor: float) -> float:
    """The probability whose odds are ``odds_factor`` times those of ``sample_rate``.

    >>> rate_at(0.5, odds_factor=3.0)
    0.75
    """
    return sample_rate * (odds_factor / (1 - sample_rate * (1 - odds_factor)))


@functools.lru_cache(maxsize=32)
def _keep_table(strength: float, sample_rate: float) -> tuple[float, ...]:
    """The probability of being kept at each step of the metric from 0 to 1."""
    most = min(
        0.0, strength
    )  # nobody is kept more often than records of metric 0 are, or, if this is negative, of metric 1
    factors = [math.exp(most - strength * step / TABLE_STEPS) for step in range(TABLE_STEPS + 1)]
    return tuple(LARGEST_SHARE * (factor / (1 - sample_rate * (1 - factor))) for factor in factors)
