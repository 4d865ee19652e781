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


def epsilon_and_order(orders: Values, divergences: Values, *, delta: float) -> tuple[float, float]:
    """The smallest epsilon that the divergences prove at ``delta``, and the order at which they do."""
    tried = _promising(np.asarray(orders), np.asarray(divergences), delta)
    compute = dp_accounting.rdp.compute_epsilon
    found = compute(
        cast(Sequence[float], np.asarray(orders)[tried]), cast(Sequence[float], np.asarray(divergences)[tried]), delta
    )
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
    promising: np.ndarray = (rough <= smallest + _CLOSE * (1 + abs(smallest))) | proves_zero
    return promising


def delta_and_order(orders: Values, divergences: Values, *, epsilon: float) -> tuple[float, float]:
    """The smallest delta that the divergences prove at ``epsilon``, and the order at which they do."""
    compute = dp_accounting.rdp.rdp_privacy_accountant.compute_delta
    found = compute(cast(Sequence[float], orders), cast(Sequence[float], divergences), epsilon)
    return float(found[0]), float(found[1])
