"""From Renyi divergences to epsilon and delta, by dp-accounting."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import cast

import dp_accounting
import numpy as np

#: dp-accounting's annotation says a sequence; its own accountant passes arrays, as do we.
Values = Sequence[float] | np.ndarray


#: Far more than logarithms of numpy and of Python can differ by, relatively.
_CLOSE = 1e-9


#: The smallest divergence of which dp-accounting can take the logarithm that it needs.
_SMALLEST = 2.0**-52


def proved(divergences: Values) -> np.ndarray:
    """The divergences, infinite where a calculation failed: what is not a number proves nothing."""
    values = np.asarray(divergences, dtype=float)
    return np.where(np.isnan(values), np.inf, values)


def at_least_zero(epsilon: float) -> float:
    """An epsilon that a calculation gave: infinite where it is not a number, which Python's ``max`` would take for 0."""
    return math.inf if math.isnan(epsilon) else max(0.0, epsilon)


def at_most_one(delta: float) -> float:
    """A delta that a calculation gave: 1 where it is not a number, or negative, which no sum of masses is."""
    return min(1.0, delta) if delta >= 0 else 1.0


def epsilon_and_order(orders: Values, divergences: Values, *, delta: float) -> tuple[float, float]:
    """The smallest epsilon that the divergences prove at ``delta``, and the order at which they do."""
    orders, divergences = np.asarray(orders), proved(divergences)
    tried = _promising(orders, divergences, delta)
    compute = dp_accounting.rdp.compute_epsilon
    found = compute(cast(Sequence[float], orders[tried]), cast(Sequence[float], divergences[tried]), delta)
    return float(found[0]), float(found[1])


def _promising(orders: np.ndarray, divergences: np.ndarray, delta: float) -> np.ndarray:
    """The orders at which epsilon may be smallest: dp-accounting takes them one by one, which most are not worth."""
    every = np.ones(len(orders), dtype=bool)
    if delta <= 0:
        return every
    with np.errstate(divide="ignore", invalid="ignore"):
        rough = divergences + np.log1p(-1 / orders) - np.log(delta * orders) / (orders - 1)
    smallest = float(np.min(rough, where=orders > 1.01, initial=np.inf))
    if not math.isfinite(smallest):
        return every
    proves_zero = np.expm1(-divergences) > -(delta**2) - _CLOSE
    # No epsilon is below 0: all orders that prove that much are equally good.
    promising: np.ndarray = (rough <= max(smallest, 0.0) + _CLOSE * (1 + abs(smallest))) | proves_zero
    return promising


def delta_and_order(orders: Values, divergences: Values, *, epsilon: float) -> tuple[float, float]:
    """The smallest delta that the divergences prove at ``epsilon``, and the order at which they do."""
    compute = dp_accounting.rdp.rdp_privacy_accountant.compute_delta
    divergences = proved(divergences)
    divergences = np.where((divergences > 0) & (divergences < _SMALLEST), _SMALLEST, divergences)
    found = compute(cast(Sequence[float], orders), cast(Sequence[float], divergences), epsilon)
    return float(found[0]), float(found[1])
