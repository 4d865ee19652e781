"""What correlated noise costs: common ground of the accountants, and banded strategies under cyclic sampling.

Throughout, ``noise_multiplier`` is the standard deviation of z over ``max_grad_norm`` times the norm of a column of C.
"""

from __future__ import annotations

import numpy as np

from sluice._base import validate
from sluice._base.errors import InputError
from sluice._base.grids import RELEASE_GRID
from sluice.accounting.dpa import DpEvent, GaussianDpEvent, SelfComposedDpEvent
from sluice.accounting.events import plain_release
from sluice.accounting.matrix import series
from sluice.accounting.matrix.series import Series
from sluice.accounting.matrix.strategy import BandedToeplitz, Strategy

LOWEST_NOISE = 0.01
HIGHEST_NOISE = 1e6


def accounted_coefficients(strategy: Strategy, *, steps: int, noise_multiplier: float) -> Series:
    """How far one record moves each row of ``C G`` that follows its participation, in standard deviations of z.

    Guarantee:
        Nothing that :class:`sluice.randomness.correlated.CorrelatedRelease` releases moves farther. Rounding a row to the public
        grid may move it by ``2^-15`` of the noise on top, and :func:`sluice.randomness.noise.noisy_sum` raises its noise for that
        once; what this leaves open is added to each diagonal of the band here (docs/matrix.md, section 3).
    """
    validate.positive_integer(steps=steps)
    require_noise(noise_multiplier)
    column = np.abs(strategy.coefficients(steps))
    with np.errstate(over="ignore"):
        norm = float(np.linalg.norm(column))
    if not np.isfinite(norm):
        raise InputError(
            f"strategy with coefficients up to {column.max():.3g} is not allowed: their norm overflows, and noise relative to it "
            "hides nothing that can be computed; use coefficients of the order of 1."
        )
    share = RELEASE_GRID * noise_multiplier
    moved = (column + share * norm) / ((1 + share) * noise_multiplier * norm)
    if strategy.bands is not None:
        moved[strategy.bands :] = 0.0
    return np.asarray(moved)


def require_noise(noise_multiplier: float) -> None:
    """Refuse noise that hides nothing or everything, for which the accountants' numbers would overflow."""
    validate.positive(noise_multiplier=noise_multiplier)
    if not LOWEST_NOISE <= noise_multiplier <= HIGHEST_NOISE:
        raise InputError(
            f"noise_multiplier={noise_multiplier} is not allowed with correlated noise: it must be from "
            f"{LOWEST_NOISE:g} to {HIGHEST_NOISE:g}."
        )


def require_non_negative(strategy: Strategy, *, accountant: str) -> None:
    if not strategy.is_non_negative:
        raise InputError(
            f"strategy={strategy!r} is not allowed with {accountant}: it has negative coefficients, for which no "
            "dominating pair is proved; optimise the strategy again or set them to zero."
        )


def banded_event(
    strategy: Strategy,
    *,
    steps: int,
    groups: int,
    sample_rate: float,
    noise_multiplier: float,
    shown: int | None = None,
) -> DpEvent:
    """A banded strategy under :class:`sluice.randomness.grouped_sampling.CyclicPoisson`, as an event for any accountant.

    Args:
        strategy: a banded one.
        steps: for how many rows the noise was planned.
        groups: how many groups take turns; at least as many as the strategy has bands.
        sample_rate: the probability with which a record of the group in turn is in the batch.
        noise_multiplier: standard deviation of z over ``max_grad_norm * strategy.column_norm(steps)``.
        shown: how many of the rows are released; None for all.

    Guarantee:
        Under adding or removing one record the whole run is dominated by ``ceil(shown / groups)`` Poisson-sampled
        Gaussian releases, for adaptively chosen gradients and coefficients of any sign (docs/matrix.md, section 4).
    """
    validate.positive_integer(steps=steps, groups=groups)
    validate.fraction(sample_rate=sample_rate)
    if not isinstance(strategy, BandedToeplitz):
        raise InputError(
            f"strategy={strategy!r} is not allowed with cyclic Poisson sampling: it is not banded, so a record's next "
            "participation begins before the last one has left the released rows, and no amplification is proved; use "
            "a banded strategy, or balls-in-bins batches."
        )
    if strategy.bands > groups:
        raise InputError(
            f"groups={groups} is not allowed with a strategy of {strategy.bands} bands: two participations of a record "
            f"would share rows; use at least {strategy.bands} groups, or fewer bands."
        )
    shown = steps if shown is None else shown
    validate.positive_integer(shown=shown)
    if shown > steps:
        raise InputError(f"shown={shown} is not allowed: it must be at most steps={steps}.")
    # The grid is as fine as the noise for all steps makes it, so a shorter run shows the beginning of the same coefficients.
    moved = accounted_coefficients(strategy, steps=steps, noise_multiplier=noise_multiplier)[:shown]
    release = plain_release(sampling_probability=sample_rate, noise_multiplier=1.0 / float(np.linalg.norm(moved)))
    return SelfComposedDpEvent(release, -(-shown // groups))


def unamplified_event(
    strategy: Strategy, *, steps: int, participations: int, separation: int, noise_multiplier: float
) -> DpEvent:
    """Any strategy, any batches in which participations are limited and apart: one Gaussian release, no amplification.

    Guarantee:
        Holds for adaptively chosen gradients, if when a record takes part does not depend on which other records there
        are (docs/matrix.md, section 2).
    """
    strategy.sensitivity(steps=steps, participations=participations, separation=separation)
    moved = accounted_coefficients(strategy, steps=steps, noise_multiplier=noise_multiplier)
    worst = series.repeated(moved, count=participations, separation=separation)
    return GaussianDpEvent(1.0 / float(np.linalg.norm(worst)))
