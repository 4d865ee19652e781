"""From Renyi divergences to epsilon and delta, by dp-accounting."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import dp_accounting
import numpy as np

#: dp-accounting's annotation says a sequence; its own accountant passes arrays, as do we.
Values = Sequence[float] | np.ndarray


def epsilon_and_order(orders: Values, divergences: Values, *, delta: float) -> tuple[float, float]:
    """The smallest epsilon that the divergences prove at ``delta``, and the order at which they do."""
    found = dp_accounting.rdp.compute_epsilon(cast(Sequence[float], orders), cast(Sequence[float], divergences), delta)
    return float(found[0]), float(found[1])


def delta_and_order(orders: Values, divergences: Values, *, epsilon: float) -> tuple[float, float]:
    """The smallest delta that the divergences prove at ``epsilon``, and the order at which they do."""
    compute = dp_accounting.rdp.rdp_privacy_accountant.compute_delta
    found = compute(cast(Sequence[float], orders), cast(Sequence[float], divergences), epsilon)
    return float(found[0]), float(found[1])
