"""DP-SGD with a bound for each layer, a bound that follows a quantile, or noise and bounds by a schedule."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import ClassVar

from sluice._base import validate
from sluice._base.codec import ADDED_IF_GIVEN
from sluice._base.errors import InputError
from sluice.accounting.calibration import calibrate
from sluice.accounting.dpa import DpEvent
from sluice.accounting.events import plain_release
from sluice.accounting.gate_calibration import HIGHEST_NOISE, LOWEST_NOISE
from sluice.accounting.search import smallest_reaching
from sluice.mechanism.clipping import CONSTANT, Clipping, QuantileClipping, Schedule
from sluice.mechanism.poisson_release import PoissonRelease
from sluice.mechanism.stages import MOST_RELEASES, Stages

_SLACK = 4e-4


@dataclass(frozen=True, kw_only=True)
class ClippedRelease(PoissonRelease):
    """What a run promises that clips in another way than `SelectiveRelease`. Every batch is released.

    Attributes:
        sample_rate: probability with which each record is in a batch, independently.
        expected_batch_size: the public constant that sums are divided by.
        clipping: how gradients are clipped.
        noise_multiplier: that of a release as a whole, before the schedule's factor. Where a count is published beside the
            sum, the sum has more noise, so that both together are one Gaussian release with this multiplier. None leaves it
            open.
        noise_schedule: factors of the noise multiplier, release by release; None for a constant one.
        releases: how many updates are released at most.
        prior_releases: noise multipliers of Gaussian releases made before from the same records.
        stages: how a run without a planned end is charged.
    """

    kind: ClassVar[str] = "clipped release"

    sample_rate: float
    expected_batch_size: float
    clipping: Clipping
    noise_multiplier: float | None = None
    noise_schedule: Schedule | None = field(default=None, metadata=ADDED_IF_GIVEN)
    releases: int
    prior_releases: tuple[float, ...] = ()
    stages: Stages | None = field(default=None, metadata=ADDED_IF_GIVEN)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.noise_multiplier is None:
            return
        validate.positive(noise_multiplier=self.noise_multiplier)
        largest = self.noise_multiplier * max(self._schedule.factors)
        if 2 * self.clipping.count_noise <= largest:
            raise InputError(
                f"noise={self.clipping.count_noise:g} on the count is not allowed: with noise_multiplier={largest:.4g} it must "
                f"be above {largest / 2:.4g}, or the count alone would cost more than a release may."
            )

    @property
    def _schedule(self) -> Schedule:
        return self.noise_schedule or CONSTANT

    @property
    def provable(self) -> bool:
        return True

    def noise_at(self, turn: int) -> float:
        """The noise multiplier of a release as a whole; turns are counted from 0."""
        return self.sigma * self._schedule.at(turn)

    def gradient_noise_at(self, turn: int) -> float:
        """That of its sum of gradients alone, over what one record adds to it at most.

        Guarantee:
            Sum and count together are one Gaussian release with the multiplier `noise_at` says (docs/accounting.md,
            section 12.4).
        """
        whole, count = self.noise_at(turn), 2 * self.clipping.count_noise
        return whole / math.sqrt(1 - (whole / count) ** 2)

    def event_after(self, releases: int) -> DpEvent:
        """The event of a run that made this many releases, prior releases included: each with the noise that it has."""
        self._require_releases(releases)
        return self._composed(
            (plain_release(sampling_probability=rate, noise_multiplier=noise_multiplier), count)
            for noise_multiplier, rate, count in self.history(releases)
        )

    def history(self, releases: int) -> list[tuple[float, float, int]]:
        """``(noise_multiplier, sample_rate, count)`` of each stretch of equal releases."""
        return [(self.sigma * factor, self.sample_rate, count) for factor, count in self._schedule.counts(releases)]

    def calibrate(self, *, epsilon: float, delta: float, accountant: str = "pld") -> ClippedRelease:
        """This mechanism with the noise multiplier, before factors, that spends at most ``epsilon`` at ``delta``.

        Guarantee:
            The accountant was asked for the very mechanism that is returned.
        """
        if self.noise_multiplier is not None:
            raise InputError(f"noise_multiplier={self.noise_multiplier} is not allowed in calibrate: leave it None.")
        start = calibrate(
            sample_rate=self.sample_rate,
            releases=self.releases,
            target_epsilon=epsilon,
            target_delta=delta,
            prior_releases=self.prior_releases,
            accountant=accountant,
        ).noise_multiplier
        if self.noise_schedule is None:
            return replace(self, noise_multiplier=start)
        # A count's noise is judged once the multiplier is found.
        judged = replace(self, clipping=_without_count(self.clipping))

        def spent(sigma: float) -> float:
            return replace(judged, noise_multiplier=sigma).epsilon_after(
                self.releases, delta=delta, accountant=accountant
            )

        found = smallest_reaching(
            spent, target=epsilon, guess=start, slack=_SLACK, lowest=LOWEST_NOISE, highest=HIGHEST_NOISE
        )
        if found is None:
            raise InputError(f"epsilon={epsilon} cannot be reached by any noise: raise it, or lower the releases.")
        return replace(self, noise_multiplier=found.x)

    def lasting(self, *, epsilon: float, delta: float, accountant: str = "pld") -> ClippedRelease:
        """This mechanism with the most releases whose epsilon at ``delta`` is at most ``epsilon``.

        Guarantee:
            The accountant was asked for the very mechanism that is returned, and for one with one release more.
        """
        validate.positive(epsilon=epsilon)
        endless = self.with_releases(MOST_RELEASES)
        count = largest_count(
            lambda releases: endless.epsilon_after(releases, delta=delta, accountant=accountant) <= epsilon
        )
        if count == 0:
            raise InputError(f"epsilon={epsilon} is not enough for a single release: raise it, or the noise.")
        return self.with_releases(count)

    def with_releases(self, releases: int) -> ClippedRelease:
        return replace(self, releases=releases)

    def open_ended(self, *, first_stage: int) -> ClippedRelease:
        """This mechanism without a planned end, charged by stages of which the first has this many releases."""
        return replace(self, releases=MOST_RELEASES, stages=Stages(first=first_stage))

    def theorem(self, accountant: str) -> str:
        by = {"rdp": "Renyi divergence", "pld": "privacy-loss distributions"}[accountant]
        staged = "" if self.stages is None else "; charged by stages, section 12.1"
        return (
            "Bound for the Poisson-sampled Gaussian mechanism with noise by release, composed adaptively: "
            f"docs/accounting.md, sections 12.2 to 12.4 ({by}){staged}"
        )

    @property
    def releases_metric(self) -> bool:
        return math.isfinite(self.clipping.count_noise)

    @property
    def summary(self) -> tuple[tuple[str, str], ...]:
        noise = f"{self.sigma:.4g}"
        if self.noise_schedule is not None:
            noise += f", times {len(self.noise_schedule.factors)} factors by a schedule"
        rows = [
            ("sample rate", f"{self.sample_rate:.4g} ({self.expected_batch_size:g} records on average)"),
            ("noise multiplier", noise),
            ("clipping", self.clipping.summary),
        ]
        if isinstance(self.clipping, QuantileClipping):
            rows.append(("count of clipped records", f"published with noise {self.clipping.noise:g}"))
        return tuple(rows)


def largest_count(fits: Callable[[int], bool]) -> int:
    """The largest number that fits, of those that all smaller ones fit; 0 if 1 does not."""
    if not fits(1):
        return 0
    low, high = 1, 2
    while high <= MOST_RELEASES and fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return min(low, MOST_RELEASES)


def _without_count(clipping: Clipping) -> Clipping:
    return replace(clipping, noise=HIGHEST_NOISE * 1e3) if isinstance(clipping, QuantileClipping) else clipping


__all__ = ["ClippedRelease"]
