"""Events that only dp-accounting understands, as loss distributions on our grid."""

from __future__ import annotations

import math

import dp_accounting
import numpy as np

from sluice.accounting import dpa
from sluice.accounting.loss_distribution import Direction, LossDistribution

_MAX_POINTS = 1 << 16
_MAX_SLOW_POINTS = 1 << 12
_LARGEST_RANGE = 5000.0


def unsupported(event: dpa.DpEvent) -> dpa.PrivacyAccountant.CompositionErrorDetails | None:
    """Why dp-accounting has no loss distribution for the event; None if it has one."""
    return dp_accounting.pld.PLDAccountant()._maybe_compose(event, 1, False)


def has_no_effect(event: dpa.DpEvent) -> bool:
    return isinstance(event, dpa.PoissonSampledDpEvent) and event.sampling_probability == 0


def is_non_private(event: dpa.DpEvent) -> bool:
    """No noise at all, or so little that no epsilon below thousands could be given."""
    return not has_no_effect(event) and not loss_bound(event) <= _LARGEST_RANGE


def loss_bound(event: dpa.DpEvent) -> float:
    """The privacy loss stays within plus or minus this, but for a mass far below any delta of interest."""
    if isinstance(event, dpa.PoissonSampledDpEvent):
        return loss_bound(event.event)
    if isinstance(event, dpa.LaplaceDpEvent):
        return _inverse(event.noise_multiplier)
    if isinstance(event, dpa.DiscreteLaplaceDpEvent):
        # dp-accounting reads a parameter of 0 as "no noise", though the formula would say the opposite.
        return event.noise_parameter * event.sensitivity if event.noise_parameter > 0 else math.inf
    if isinstance(event, dpa.MixtureOfGaussiansDpEvent):
        return _gaussian_bound(max(abs(s) for s in event.sensitivities) * _inverse(event.standard_deviation))
    if isinstance(event, dpa.TruncatedSubsampledGaussianDpEvent | dpa.GaussianDpEvent):
        return _gaussian_bound(2 * _inverse(event.noise_multiplier))
    return math.inf


def smallest_spacing(event: dpa.DpEvent) -> float:
    """The finest grid on which the event keeps to a bounded number of points, and of seconds."""
    is_slow = not isinstance(event, dpa.LaplaceDpEvent | dpa.PoissonSampledDpEvent | dpa.DiscreteLaplaceDpEvent)
    return 2 * loss_bound(event) / (_MAX_SLOW_POINTS if is_slow else _MAX_POINTS)


def loss_distribution(event: dpa.DpEvent, direction: Direction, *, spacing: float) -> LossDistribution:
    """dp-accounting's own pessimistic distribution of one such event."""
    accountant = dp_accounting.pld.PLDAccountant(value_discretization_interval=spacing)
    accountant.compose(event)
    losses = accountant._pld
    dense = (losses._pmf_remove if direction == "remove" else losses._pmf_add).to_dense_pmf()
    return LossDistribution(
        spacing=spacing,
        first=int(dense._lower_loss),
        masses=np.maximum(np.asarray(dense._probs, dtype=float), 0.0),
        infinity=float(np.clip(dense._infinity_mass, 0.0, 1.0)),
    )


def _inverse(noise: float) -> float:
    return 1.0 / noise if noise > 0 else math.inf


def _gaussian_bound(shift: float) -> float:
    return shift * shift / 2 + 11 * shift
