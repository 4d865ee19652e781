"""What mechanisms share that release noisy sums over Poisson samples, with one noise multiplier that may be left open."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from sluice._base import validate
from sluice._base.errors import InputError
from sluice.accounting.dpa import ComposedDpEvent, DpEvent, GaussianDpEvent, SelfComposedDpEvent
from sluice.mechanism.base import Mechanism


class PoissonRelease(Mechanism):
    """A mechanism that samples each record alike and independently, and adds Gaussian noise to what it releases.

    Attributes:
        sample_rate: probability with which each record is in a batch.
        expected_batch_size: the public constant that sums are divided by.
        noise_multiplier: standard deviation of the noise over the sensitivity; None leaves it open.
    """

    sample_rate: float
    expected_batch_size: float
    noise_multiplier: float | None

    def __post_init__(self) -> None:
        validate.fraction(sample_rate=self.sample_rate)
        validate.positive(expected_batch_size=self.expected_batch_size)
        validate.positive_integer(releases=self.releases)
        for multiplier in self.prior_releases:
            validate.positive(prior_releases=multiplier)

    @property
    def sigma(self) -> float:
        """The noise multiplier, which must have been given or chosen."""
        if self.noise_multiplier is None:
            raise InputError(
                "noise_multiplier=None is not allowed here: give a number, or calibrate the mechanism first."
            )
        return self.noise_multiplier

    def require_complete(self) -> None:
        _ = self.sigma

    @property
    def sampling(self) -> dict[str, Any]:
        return {"kind": "Poisson", "rate": self.sample_rate}

    @property
    def prior_events(self) -> list[DpEvent]:
        """The events of the releases that were made before training."""
        return [GaussianDpEvent(multiplier) for multiplier in self.prior_releases]

    def _composed(self, stretches: Iterable[tuple[DpEvent, int]]) -> DpEvent:
        """The event of prior releases and of each ``(event, count)`` of equal releases, which is not empty."""
        return ComposedDpEvent(
            [*self.prior_events, *(SelfComposedDpEvent(release, count) for release, count in stretches)]
        )


__all__ = ["PoissonRelease"]
