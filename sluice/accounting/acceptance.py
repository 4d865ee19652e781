"""How much one record can change the probability that an attempt is accepted."""

from __future__ import annotations

import math
from dataclasses import dataclass

import scipy

from sluice._base import validate
from sluice._base.errors import InputError

_LOG_SMALLEST = -600.0


@dataclass(frozen=True, kw_only=True)
class Acceptance:
    """Bounds that hold for every batch B and every record z.

    Guarantee:
        ``ratio_min <= P(accept | B + z) / P(accept | B) <= ratio_max`` and ``P(accept | B) >= probability_min``.
        An accountant reads these three numbers and nothing else of a gate (docs/accounting.md, section 2).
    """

    ratio_min: float
    ratio_max: float
    probability_min: float

    def __post_init__(self) -> None:
        validate.fraction(ratio_min=self.ratio_min, probability_min=self.probability_min)
        validate.positive(ratio_max=self.ratio_max)
        if self.ratio_max < 1:
            raise InputError(f"ratio_max={self.ratio_max} is not allowed: it must be >= 1.")

    @classmethod
    def one_sided(
        cls,
        *,
        threshold: float,
        clip_bound: float,
        metric_bound: float,
        noise_std: float,
        metric_error: float = 0.0,
    ) -> Acceptance:
        """Acceptance of ``clip(R - E, -K, K) + N(0, sv^2) > tau`` where a record raises E by at most M.

        The ratio of two Gaussian tails falls with the threshold, so it is smallest where the clipped
        difference reaches ``-K`` after the record is added; a record moves it by ``min(M, 2K)`` at most.

        Args:
            metric_error: by so much, either way, rounding may move what the *other* records add to E when one record
                is added. The ratio is then largest where the difference was ``-K`` before.
        """
        validate.finite(threshold=threshold)
        validate.positive(clip_bound=clip_bound, metric_bound=metric_bound, noise_std=noise_std)
        validate.non_negative(metric_error=metric_error)

        def log_tail(shift: float) -> float:
            return float(scipy.special.log_ndtr(-(threshold + clip_bound - min(shift, 2 * clip_bound)) / noise_std))

        log_lowest = log_tail(0.0)
        if log_lowest < _LOG_SMALLEST:
            raise InputError(
                f"noise_std={noise_std} is not allowed: with threshold={threshold} and clip_bound={clip_bound} the worst "
                "batch would practically never be accepted. Raise the gate's noise, or lower the threshold."
            )
        return cls(
            ratio_min=math.exp(log_lowest - log_tail(metric_bound + metric_error)),
            ratio_max=math.exp(log_tail(metric_error) - log_lowest),
            probability_min=math.exp(log_lowest),
        )

    def give_up_probability(self, max_attempts: int | None) -> float:
        """A bound on the probability that this many attempts in a row are rejected; None never gives up."""
        if max_attempts is None or self.probability_min == 1:
            return 0.0
        return math.exp(max_attempts * math.log1p(-self.probability_min))
