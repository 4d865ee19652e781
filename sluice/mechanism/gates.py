"""Gates: the public rule that decides whether an attempt is released or forgotten.

A gate is a frozen description: everything in it is public, and everything sensitive is an argument of a call. What
the accountant needs of it is its ``acceptance``: how much one record can change the probability of acceptance, for
any batch. Its noise is drawn before any data is touched, so an attempt that no batch could pass costs nothing.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import TYPE_CHECKING, ClassVar

import scipy

from sluice._base import validate
from sluice._base.codec import ADDED, Encoded, readable
from sluice._base.errors import InputError
from sluice._base.grids import bernoulli_threshold, power_of_two_below
from sluice.accounting.acceptance import Acceptance
from sluice.mechanism.attempt import RAREST_USEFUL_ATTEMPT, Attempt, DecisionNoise, ReferenceState, first_above
from sluice.mechanism.rounding_error import NORM_ERROR, largest_batch

if TYPE_CHECKING:
    from torch import Tensor

# Gate noise is a real normal rounded to a grid of about this many standard deviations.
DECISION_GRID = 2.0**-32

# The metric of a record is rounded down to a multiple of about this many metric bounds, a power of two. Sums of up to
# 2^26 records are then exact in double precision, whatever their order, so one record moves them by what it says.
METRIC_GRID = 2.0**-26


# Up to this part of `large_norm` the metric may stay at 0.
LARGEST_SMALL_NORM = 0.9


class Gate(Encoded, ABC):
    """What any gate has to state and do.

    Attributes:
        thins: whether it decides on each record by itself, by `keep_probability`, and not on batches.
        max_attempts: give up on a release after this many attempts; None never gives up.
        reference_noise: noise multiplier of the reference published with each release, infinite where none is,
            None where calibration has yet to choose it.
    """

    tag: ClassVar[str | None] = "gate"
    thins: ClassVar[bool] = False

    max_attempts: int | None
    reference_noise: float | None

    @property
    @abstractmethod
    def acceptance(self) -> Acceptance:
        """How one record can change the acceptance probability of any batch, under any public reference."""

    @property
    def provable(self) -> bool:
        """Whether ``acceptance`` covers what the gate does. If not, every epsilon of the run is only "claimed"."""
        return True

    @abstractmethod
    def measure(self, norms: Tensor) -> Tensor:
        """What each record adds to the metric of its batch, float64 and never negative, from its gradient norm."""

    def for_batches_of(self, expected_batch_size: float, *, small_norm: float) -> Gate:
        """The gate with what it leaves open filled in, from the batches' expected size and the scaling rule's bound."""
        return self

    def candidate_rate(self, sample_rate: float) -> float:
        """At which rate to draw records, and to account, where a release is to have ``sample_rate`` of them."""
        return sample_rate

    def keep_probability(self, norms: Tensor, *, sample_rate: float) -> Tensor:
        """With which probability each record of an accepted batch counts, by a coin of its own: here all of them do."""
        return norms.detach().cpu().double().fill_(1.0)

    @abstractmethod
    def first_reference(self) -> ReferenceState:
        """The public constant that the first release is compared with."""

    @abstractmethod
    def begin(self, reference: ReferenceState, noise: DecisionNoise, *, attempts_left: int | None = None) -> Attempt:
        """Draw gate noise until some batch could be accepted, and give that attempt, before any data is touched.

        Guarantee:
            Sampling a batch for the attempt, adding its norms, and calling ``begin`` again unless it is ``accepted``
            gives the same law of accepted batches and of attempts as drawing a batch and noise for every attempt.
            Attempts that cannot be accepted are skipped and are in ``count``, never beyond ``attempts_left``.
        """

    @abstractmethod
    def next_reference(self, reference: ReferenceState, raw_metric: float, noise: DecisionNoise) -> ReferenceState:
        """The reference after a release, from the metric of the accepted batch. Rejected attempts never get here."""

    def give_up_delta(self, *, releases: int) -> float:
        """What giving up adds to delta: the probability that any of the releases uses up its attempts."""
        validate.positive_integer(releases=releases)
        return min(1.0, releases * self.acceptance.give_up_probability(self.max_attempts) * (1 + 1e-9))

    def attempts_for(self, *, releases: int, delta: float) -> int:
        """The smallest ``max_attempts`` at which giving up adds at most ``delta``."""
        validate.positive_integer(releases=releases)
        validate.open_fraction(delta=delta)
        if self.acceptance.probability_min == 1:
            return 1
        needed = (math.log(delta / releases) - 2e-9) / math.log1p(-self.acceptance.probability_min)
        return max(1, math.ceil(needed))


@readable
@dataclass(frozen=True, kw_only=True)
class ClippingBiasGate(Gate):
    """Accept when few gradients of the batch are large, compared with a public reference.

    Record i adds ``e_i`` in ``[0, metric_bound]`` to the metric ``E`` of its batch: 0 where its gradient norm is
    at most ``small_norm``, rising evenly from there to ``metric_bound`` at ``large_norm``, and ``metric_bound`` above. The
    attempt is released when ``clip(R - E, -K, K) + N(0, sv^2) > tau``.

    The metric is continuous, unlike the paper's, which jumps at ``small_norm``: norms are rounded, and a jump would turn
    a difference in the last digit into one of ``metric_bound * small_norm / large_norm`` for every record there.

    Attributes (the DPSR-CG paper's symbols in brackets):
        beta: threshold in units of the metric bound [tau = beta * C_e].
        clip_range: clip of the difference, in units of the metric bound [K = clip_range * C_e].
        gate_noise: noise of the decision [sv = 4 * sigma_e * C_e]. None lets calibration choose it.
        reference_noise: noise multiplier of the published reference, std = reference_noise * C_e. None lets
            calibration choose it.
        small_norm: norms up to this do not count [S_g]. None takes the scaling rule's bound.
        large_norm: norms from here on count fully [S_e].
        metric_bound: the most that one record adds [C_e].
        reference_decay: weight of the past in the running average of published references, which is the
            reference of the next release (post-processing of public values, so it is free).
        initial_reference: the public constant the first release is compared with.
        max_attempts: give up on a release after this many attempts; its probability is charged to delta.
        hidden_reference: compare with the un-noised metric of the last accepted batch, and measure with the jump, as the
            paper does. No per-release bound covers that, so every epsilon of such a run is only "claimed".
        metric_error: rounding may move the metric of all other records by this many metric bounds, either way, when one
            record is added; it is charged (docs/noise.md, section 6).
    """

    kind: ClassVar[str] = "clipping-bias"

    beta: float = 3.0
    clip_range: float = 2.0
    gate_noise: float | None = None
    reference_noise: float | None = None
    small_norm: float | None = None
    large_norm: float = 11.0
    metric_bound: float = 1.0
    reference_decay: float = 0.9
    initial_reference: float = 0.0
    max_attempts: int | None = None
    hidden_reference: bool = False
    metric_error: float = field(default=0.0, metadata=ADDED)

    def __post_init__(self) -> None:
        validate.non_negative(metric_error=self.metric_error)
        validate.finite(beta=self.beta, initial_reference=self.initial_reference)
        validate.positive(clip_range=self.clip_range, large_norm=self.large_norm, metric_bound=self.metric_bound)
        if self.gate_noise is not None:
            validate.positive(gate_noise=self.gate_noise)
        if self.reference_noise is not None:
            validate.positive_or_infinite(reference_noise=self.reference_noise)
        if self.small_norm is not None:
            validate.non_negative(small_norm=self.small_norm)
            if self.small_norm > self.large_norm:
                raise InputError(
                    f"small_norm={self.small_norm} is not allowed: it must be at most large_norm={self.large_norm}."
                )
        if not 0 <= self.reference_decay < 1:
            raise InputError(f"reference_decay={self.reference_decay} is not allowed: it must be in [0, 1).")
        if self.max_attempts is not None:
            validate.positive_integer(max_attempts=self.max_attempts)

    def for_batches_of(self, expected_batch_size: float, *, small_norm: float) -> ClippingBiasGate:
        """The gate for batches of this expected size: norms that do not count, and what rounding is charged, filled in.

        Args:
            small_norm: taken where the gate leaves its own open.
        """
        small = min(small_norm, LARGEST_SMALL_NORM * self.large_norm) if self.small_norm is None else self.small_norm
        filled = replace(self, small_norm=small)
        if self.hidden_reference:
            return filled
        steepness = self.large_norm / filled._rise
        # Twice: with and without the record that is added, each norm has an error of its own.
        error = 2 * NORM_ERROR * steepness * largest_batch(expected_batch_size)
        return replace(filled, metric_error=error)

    @property
    def _rise(self) -> float:
        """From which norm to which the metric rises: so far apart that it does not rise too steeply."""
        if self.small_norm is None:
            raise InputError("small_norm=None is not allowed here: give a number, usually the scaling rule's bound.")
        if self.small_norm > LARGEST_SMALL_NORM * self.large_norm:
            raise InputError(
                f"small_norm={self.small_norm} is not allowed: it must be at most {LARGEST_SMALL_NORM} times "
                f"large_norm={self.large_norm}, so that the metric does not rise too steeply."
            )
        return self.large_norm - self.small_norm

    @property
    def threshold(self) -> float:
        return self.beta * self.metric_bound

    @property
    def clip_bound(self) -> float:
        return self.clip_range * self.metric_bound

    @property
    def noise_std(self) -> float:
        if self.gate_noise is None:
            raise InputError("gate_noise=None is not allowed here: give a number, or calibrate the gate first.")
        return 4.0 * self.gate_noise * self.metric_bound

    @property
    def acceptance(self) -> Acceptance:
        """How one record can change the acceptance probability of any batch (docs/accounting.md, section 2).

        Guarantee:
            It holds for the gate as it is computed. The decision is exact but its noise lies on a grid, so that a
            tail begins half a step earlier or later: as if the clip bound were half a step wider and a record moved
            the metric by one step more (docs/noise.md, section 4).
        """
        step = self._noise_step
        error = self.metric_error * self.metric_bound
        return Acceptance.one_sided(
            threshold=self.threshold,
            clip_bound=self.clip_bound + step / 2,
            metric_bound=self.metric_bound + step,
            noise_std=self.noise_std,
            metric_error=error + step if error else 0.0,
        )

    @property
    def provable(self) -> bool:
        return not self.hidden_reference

    @property
    def _noise_step(self) -> float:
        return power_of_two_below(self.noise_std * DECISION_GRID)

    def with_noise(self, *, gate_noise: float, reference_noise: float) -> ClippingBiasGate:
        return replace(self, gate_noise=gate_noise, reference_noise=reference_noise)

    def measure(self, norms: Tensor) -> Tensor:
        """What each record adds to the metric of its batch.

        Guarantee:
            Every value is in ``[0, metric_bound]`` and a function of that record's norm alone, and sums of them are
            exact.

            | norm | value, rounded down to the metric's grid |
            |---|---|
            | up to ``small_norm``, 0 or negative | 0 |
            | between | ``metric_bound * (norm - small_norm) / (large_norm - small_norm)`` |
            | from ``large_norm`` on | ``metric_bound`` |
            | NaN, infinite | ``metric_bound`` |
        """
        if self.small_norm is None:
            raise InputError("small_norm=None is not allowed here: give a number, usually the scaling rule's bound.")
        if not self.hidden_reference:
            _ = self._rise  # refuses a metric that rises too steeply
            return rising_metric(
                norms, small_norm=self.small_norm, large_norm=self.large_norm, metric_bound=self.metric_bound
            )
        norms = norms.detach().cpu().double()
        rising = (norms / self.large_norm).masked_fill(norms <= self.small_norm, 0.0)
        return _on_grid(rising, norms, metric_bound=self.metric_bound)

    def first_reference(self) -> ReferenceState:
        return ReferenceState(value=self.initial_reference)

    def begin(self, reference: ReferenceState, noise: DecisionNoise, *, attempts_left: int | None = None) -> Attempt:
        # The metric is never negative, so no batch has a larger difference than the empty one.
        largest_difference = min(max(reference.value, -self.clip_bound), self.clip_bound)
        rejected_up_to = _float_below(Fraction(self.threshold) - Fraction(largest_difference))
        step, std = self._noise_step, self.noise_std
        value, count = first_above(
            rejected_up_to,
            draw=lambda draws: noise.rounded_normal(draws, scale=std / step).mul_(step),
            probability=float(scipy.special.ndtr(-rejected_up_to / std)),
            attempts_left=attempts_left,
        )
        limit = -math.inf if value is None else self.limit(reference, value)
        return Attempt(limit=limit, count=count, measure=self.measure)

    def limit(self, reference: ReferenceState, decision_noise: float) -> float:
        """The float below which the metric must stay, so that comparing with it is the exact decision."""
        gap = Fraction(self.threshold) - Fraction(decision_noise)
        if gap >= Fraction(self.clip_bound):
            return -math.inf
        if gap < -Fraction(self.clip_bound):
            return math.inf
        return _float_above(Fraction(reference.value) - gap)

    def decide_plainly(self, reference: ReferenceState, raw_metric: float, decision_noise: float) -> bool:
        """The definition: ``clip(R - E, -K, K) + v > tau`` in exact arithmetic. Slow; others are held to it."""
        bound = Fraction(self.clip_bound)
        difference = Fraction(reference.value) - Fraction(raw_metric)
        return min(max(difference, -bound), bound) + Fraction(decision_noise) > Fraction(self.threshold)

    def next_reference(self, reference: ReferenceState, raw_metric: float, noise: DecisionNoise) -> ReferenceState:
        """The running average with ``E + N(0, (reference_noise * metric_bound)^2)``, which is published.

        Guarantee:
            One Gaussian release of sensitivity ``metric_bound`` with noise multiplier ``reference_noise``, charged
            with the gradients'; the average is post-processing. With infinite noise nothing is published and the
            initial reference stays. A hidden reference is the metric itself: no guarantee, and ``public`` is false.
        """
        if self.hidden_reference:
            return ReferenceState(value=raw_metric, public=False)
        if self.reference_noise is None:
            raise InputError("reference_noise=None is not allowed here: give a number, or calibrate the gate first.")
        if math.isinf(self.reference_noise):
            return reference
        published = noise.noisy_number(
            raw_metric,
            noise_multiplier=self.reference_noise,
            sensitivity=self.metric_bound,
            sum_error=self.metric_error * self.metric_bound / 2,
        )
        return reference.averaged_with(published, decay=self.reference_decay)


@readable
@dataclass(frozen=True, kw_only=True)
class CoinGate(Gate):
    """Accept at random, whatever the batch: the control that shows whether selection helps.

    Guarantee:
        Acceptance is independent of the data, so an accepted batch is an ordinary Poisson sample and each release
        costs what it costs without a gate.
    """

    kind: ClassVar[str] = "coin"

    probability: float
    max_attempts: int | None = None

    def __post_init__(self) -> None:
        validate.fraction(probability=self.probability)
        if self.probability < RAREST_USEFUL_ATTEMPT:
            raise InputError(
                f"probability={self.probability} is not allowed: it must be at least {RAREST_USEFUL_ATTEMPT}."
            )
        if self.max_attempts is not None:
            validate.positive_integer(max_attempts=self.max_attempts)

    @property
    def reference_noise(self) -> float:  # type: ignore[override]
        return math.inf

    @property
    def acceptance(self) -> Acceptance:
        exact = bernoulli_threshold(self.probability) / 2**64
        return Acceptance(ratio_min=1.0, ratio_max=1.0, probability_min=exact)

    def measure(self, norms: Tensor) -> Tensor:
        return norms.new_zeros(norms.shape).double()

    def first_reference(self) -> ReferenceState:
        return ReferenceState(value=0.0)

    def begin(self, reference: ReferenceState, noise: DecisionNoise, *, attempts_left: int | None = None) -> Attempt:
        value, count = first_above(
            0.0,
            draw=lambda draws: noise.bernoulli(draws, self.probability).double(),
            probability=self.probability,
            attempts_left=attempts_left,
        )
        return Attempt(limit=-math.inf if value is None else math.inf, count=count, measure=self.measure)

    def next_reference(self, reference: ReferenceState, raw_metric: float, noise: DecisionNoise) -> ReferenceState:
        return reference


def rising_metric(norms: Tensor, *, small_norm: float, large_norm: float, metric_bound: float = 1.0) -> Tensor:
    """0 up to ``small_norm``, rising evenly to ``metric_bound`` at ``large_norm``; `ClippingBiasGate.measure` says more."""
    norms = norms.detach().cpu().double()
    return _on_grid((norms - small_norm) / (large_norm - small_norm), norms, metric_bound=metric_bound)


def _on_grid(rising: Tensor, norms: Tensor, *, metric_bound: float) -> Tensor:
    values = (rising.clamp(0.0, 1.0) * metric_bound).masked_fill(~norms.isfinite(), metric_bound)
    unit = power_of_two_below(metric_bound * METRIC_GRID)
    return values.div_(unit).floor_().mul_(unit)


def _float_below(value: Fraction) -> float:
    """The largest float that is at most ``value``: a float exceeds the one exactly if it exceeds the other."""
    nearest = float(value)
    return nearest if Fraction(nearest) <= value else math.nextafter(nearest, -math.inf)


def _float_above(value: Fraction) -> float:
    """The smallest float that is at least ``value``: a float is below the one exactly if it is below the other."""
    nearest = float(value)
    return nearest if Fraction(nearest) >= value else math.nextafter(nearest, math.inf)
