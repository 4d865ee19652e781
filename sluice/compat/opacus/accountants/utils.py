"""The noise that a budget needs."""

from __future__ import annotations

import math

from sluice._base import validate
from sluice._base.errors import InputError
from sluice.accounting.calibration import calibrate
from sluice.compat.opacus.accountants import known_accountant


def get_noise_multiplier(
    *,
    target_epsilon: float,
    target_delta: float,
    sample_rate: float,
    epochs: int | None = None,
    steps: int | None = None,
    accountant: str = "prv",
    epsilon_tolerance: float = 0.01,
) -> float:
    """The smallest noise multiplier, nearly, at which so many steps spend at most the target.

    Args:
        epochs, steps: one of the two. An epoch has ``ceil(1 / sample_rate)`` steps.
        accountant: "prv" or "rdp". Opacus's own default is "rdp" here and "prv" elsewhere.
        epsilon_tolerance: accepted for Opacus's sake; the result is always closer to the target than this.
    """
    validate.positive(epsilon_tolerance=epsilon_tolerance)
    validate.fraction(sample_rate=sample_rate)
    if (epochs is None) == (steps is None):
        raise InputError(f"epochs={epochs}, steps={steps} is not allowed: give exactly one of the two.")
    if epochs is not None:
        validate.positive_integer(epochs=epochs)
        steps = epochs * math.ceil(1 / sample_rate)
    validate.positive_integer(steps=steps)
    assert steps is not None
    found = calibrate(
        target_epsilon=target_epsilon,
        target_delta=target_delta,
        releases=steps,
        sample_rate=sample_rate,
        accountant=known_accountant(accountant),
    )
    return found.noise_multiplier
