"""Workloads: which linear combinations of the noisy gradients training uses, so which errors count.

The iterate after step t is the start minus ``sum_s learning_rate_s * velocity_s`` and a velocity is
``sum_r momentum^(s-r) gradient_r``. As a matrix on the gradients this is ``prefix sums x diagonal of learning rates x
momentum``. With a constant learning rate it is lower-triangular Toeplitz.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sluice._base import validate
from sluice._base.codec import Encoded
from sluice._base.errors import InputError
from sluice.accounting.matrix.series import Series, multiply

# The quadratic form of a learning-rate schedule has this many squared entries: 128 MiB at most.
MAX_SCHEDULED_STEPS = 4096
MAX_STEPS = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Workload(Encoded):
    """The iterates of SGD as linear functions of its gradients.

    Attributes:
        steps: how many steps there are.
        momentum: the factor by which a velocity keeps its past, in [0, 1).
        learning_rates: one for each step, or None where it is constant. Only their ratios matter.
    """

    steps: int
    momentum: float = 0.0
    learning_rates: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        validate.positive_integer(steps=self.steps)
        if self.steps > MAX_STEPS:
            raise InputError(f"steps={self.steps} is not allowed: correlated noise is planned for {MAX_STEPS} at most.")
        validate.non_negative(momentum=self.momentum)
        if self.momentum >= 1:
            raise InputError(f"momentum={self.momentum!r} is not allowed: it must be in [0, 1).")
        if self.learning_rates is None:
            return
        if len(self.learning_rates) != self.steps:
            raise InputError(
                f"learning_rates has {len(self.learning_rates)} entries, which is not allowed: give one for each of "
                f"the {self.steps} steps."
            )
        for rate in self.learning_rates:
            validate.non_negative(learning_rates=rate)
        if not any(self.learning_rates):
            raise InputError("learning_rates are all zero, which is not allowed: such training does nothing.")
        if self.steps > MAX_SCHEDULED_STEPS:
            raise InputError(
                f"steps={self.steps} with learning_rates is not allowed: a schedule is supported up to "
                f"{MAX_SCHEDULED_STEPS} steps; leave it out, or take the workload 'prefix', to optimise for a constant "
                "learning rate."
            )

    @property
    def coefficients(self) -> Series:
        """The first column of the workload, for a constant learning rate of 1."""
        if self.learning_rates is not None:
            raise InputError("a workload with learning_rates has no coefficients: it is not Toeplitz.")
        return np.cumsum(self.velocity_coefficients)

    @property
    def velocity_coefficients(self) -> Series:
        """The first column of the momentum matrix."""
        return self.momentum ** np.arange(self.steps, dtype=float)

    def matrix(self) -> np.ndarray:
        """The whole matrix: for tests and small numbers of steps."""
        lags = np.subtract.outer(np.arange(self.steps), np.arange(self.steps))
        velocities = np.where(lags >= 0, self.momentum ** np.maximum(lags, 0).astype(float), 0.0)
        rates = np.ones(self.steps) if self.learning_rates is None else np.array(self.learning_rates)
        return np.cumsum(rates[:, None] * velocities, axis=0)

    def row_errors(self, inverse_coefficients: Series) -> np.ndarray:
        """The variance of each iterate, for noise ``C^-1 z`` with z of unit variance."""
        filtered = multiply(self.velocity_coefficients, inverse_coefficients)
        if self.learning_rates is None:
            return np.cumsum(np.cumsum(filtered) ** 2)
        rates, rows, errors = np.array(self.learning_rates), np.zeros(self.steps), np.empty(self.steps)
        for step in range(self.steps):
            rows[: step + 1] += rates[step] * filtered[step::-1]
            errors[step] = rows[: step + 1] @ rows[: step + 1]
        return errors

    def mean_form(self) -> np.ndarray:
        """The matrix Q for which the mean of ``row_errors`` is ``f' Q f``, f being the filtered velocities."""
        return _mean_form(self)


def prefix_sums(steps: int) -> Workload:
    """The sums of the first 1, 2, ... gradients: SGD with a constant learning rate."""
    return Workload(steps=steps)


def momentum_workload(steps: int, momentum: float, learning_rates: Sequence[float] | None = None) -> Workload:
    """SGD with momentum and, if given, a learning-rate schedule."""
    rates = None if learning_rates is None else tuple(float(rate) for rate in learning_rates)
    return Workload(steps=steps, momentum=momentum, learning_rates=rates)


@functools.lru_cache(maxsize=2)
def _mean_form(workload: Workload) -> np.ndarray:
    steps = workload.steps
    rates = np.ones(steps) if workload.learning_rates is None else np.array(workload.learning_rates)
    later = np.arange(steps)
    form = np.empty((steps, steps))
    for offset in range(steps):
        # Entry (s, s + offset) of the Gram matrix of the scaled prefix sums, summed from each place to the end.
        diagonal = rates[: steps - offset] * rates[offset:] * (steps - later[offset:])
        sums = np.cumsum(diagonal[::-1])[::-1] / steps
        form[later[: steps - offset], later[offset:]] = sums
        form[later[offset:], later[: steps - offset]] = sums
    form.setflags(write=False)
    return form
