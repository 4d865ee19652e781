"""The matrix mechanism: noise correlated over steps, so that the sums that training uses are known better.

A strategy says how noise is correlated, batches say who takes part when, and an accountant fits a pair of the two:
``banded_event`` for cyclic Poisson batches, ``monte_carlo_epsilon`` for balls in bins, ``conditional_epsilon`` for plain
Poisson batches (docs/matrix.md).
"""

from __future__ import annotations

from sluice.accounting.matrix.accounting import accounted_coefficients, banded_event, unamplified_event
from sluice.accounting.matrix.conditional import ConditionalEpsilon, conditional_epsilon
from sluice.accounting.matrix.monte_carlo import (
    MonteCarloDelta,
    calibrate_balls_in_bins,
    monte_carlo_delta,
    monte_carlo_epsilon,
)
from sluice.accounting.matrix.optimise import optimise_banded, optimise_blt
from sluice.accounting.matrix.strategy import (
    BandedToeplitz,
    BufferedLinearToeplitz,
    Strategy,
    StrategyError,
    identity,
)
from sluice.accounting.matrix.workload import Workload, momentum_workload, prefix_sums

__all__ = [
    "BandedToeplitz",
    "BufferedLinearToeplitz",
    "ConditionalEpsilon",
    "MonteCarloDelta",
    "Strategy",
    "StrategyError",
    "Workload",
    "accounted_coefficients",
    "banded_event",
    "calibrate_balls_in_bins",
    "conditional_epsilon",
    "identity",
    "momentum_workload",
    "monte_carlo_delta",
    "monte_carlo_epsilon",
    "optimise_banded",
    "optimise_blt",
    "prefix_sums",
    "unamplified_event",
]
