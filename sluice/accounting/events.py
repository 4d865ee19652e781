"""The event of selective release, beside dp-accounting's own events."""

from __future__ import annotations

import math

import attr

from sluice._base import validate
from sluice._base.codec import ADDED, Encoded
from sluice.accounting.acceptance import Acceptance
from sluice.accounting.dpa import DpEvent, GaussianDpEvent, PoissonSampledDpEvent


@attr.s(frozen=True, kw_only=True, auto_attribs=True)
class SelectiveReleaseDpEvent(Encoded, DpEvent):
    """One release of the loop below, under adding or removing one record ``z``.

    Example::

        repeat (at most max_attempts times, if that is given)
            B      <- Poisson sample: every record independently with probability sampling_probability
            accept <- coin whose bias a(B) depends on B and on what was published before, nothing else
        until accept
        publish  f(B) + N(0, (noise_multiplier * |f|)^2 I)  and  e(B) + N(0, (reference_noise_multiplier * |e|)^2)

    where ``f`` and ``e`` are sums over the records of B and ``|f|``, ``|e|`` bound what one record adds to them
    (Euclidean norm). Nothing of a rejected attempt is published or kept. For every B and z::

        acceptance.ratio_min <= a(B + z) / a(B) <= acceptance.ratio_max,    a(B) >= acceptance.probability_min.

    Attributes:
        sampling_probability: q, in (0, 1].
        noise_multiplier: sigma, of the released sum.
        acceptance: how much one record can change the acceptance of any batch.
        reference_noise_multiplier: sr, of the metric released from the same batch; infinite where none is released.
        max_attempts: after this many rejections in a row nothing more is published but the fact that it stopped.
            None is "never give up", which costs nothing.
    """

    sampling_probability: float
    noise_multiplier: float
    acceptance: Acceptance
    reference_noise_multiplier: float = attr.ib(default=math.inf, metadata=ADDED)
    max_attempts: int | None = attr.ib(default=None, metadata=ADDED)

    def __attrs_post_init__(self) -> None:
        validate.fraction(sampling_probability=self.sampling_probability)
        validate.positive(noise_multiplier=self.noise_multiplier)
        validate.positive_or_infinite(reference_noise_multiplier=self.reference_noise_multiplier)
        if self.max_attempts is not None:
            validate.positive_integer(max_attempts=self.max_attempts)

    @property
    def effective_noise_multiplier(self) -> float:
        """Sum and metric together are one Gaussian release with this multiplier."""
        ratio = self.noise_multiplier / self.reference_noise_multiplier
        return self.noise_multiplier / math.hypot(1.0, ratio)

    @property
    def give_up_probability(self) -> float:
        """A bound on the probability that one release runs out of attempts."""
        return self.acceptance.give_up_probability(self.max_attempts)


#: Acceptance that no record can change: a release without a gate.
UNGATED = Acceptance(ratio_min=1.0, ratio_max=1.0, probability_min=1.0)


def plain_release(*, sampling_probability: float, noise_multiplier: float) -> DpEvent:
    """dp-accounting's event of one step of plain DP-SGD."""
    validate.fraction(sampling_probability=sampling_probability)
    validate.positive(noise_multiplier=noise_multiplier)
    return PoissonSampledDpEvent(sampling_probability, GaussianDpEvent(noise_multiplier))


def as_release(event: DpEvent) -> SelectiveReleaseDpEvent | None:
    """A selective release as it is, and a plain or Poisson-sampled Gaussian as the release without a gate it is."""
    if isinstance(event, SelectiveReleaseDpEvent):
        return event
    rate, inner = 1.0, event
    if isinstance(event, PoissonSampledDpEvent):
        rate, inner = event.sampling_probability, event.event
    if not isinstance(inner, GaussianDpEvent):
        return None
    is_ordinary = 0 < rate <= 1 and inner.noise_multiplier > 0 and math.isfinite(inner.noise_multiplier)
    if not is_ordinary:
        return None
    return SelectiveReleaseDpEvent(
        sampling_probability=float(rate), noise_multiplier=float(inner.noise_multiplier), acceptance=UNGATED
    )
