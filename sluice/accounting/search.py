"""Finding where a decreasing curve reaches its target, on the safe side, with few evaluations."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

_MAX_EVALUATIONS = 80
_FLOOR = 1e-3


@dataclass(frozen=True, kw_only=True)
class Reached:
    """A point where the curve is at most its target, and how steeply it falls there (in logarithms)."""

    x: float
    slope: float


def smallest_reaching(
    curve: Callable[[float], float],
    *,
    target: float,
    guess: float,
    slack: float,
    lowest: float,
    highest: float,
    slope: float = 1.5,
) -> Reached | None:
    """The smallest x, nearly, with ``curve(x) <= target``, for a curve that falls with x; None if none does.

    Guarantee:
        The curve was evaluated at the very x that is returned and was at most the target there. It was either within
        ``slack`` of it, relatively, or x lies within ``slack`` of a point where the curve exceeds the target.
    """
    least, most = math.log(lowest), math.log(highest)
    x = min(max(math.log(guess), least), most)
    aim, longest = -0.5 * slack, 0.7
    low: tuple[float, float] | None = None
    high: tuple[float, float] | None = None
    pull_low = pull_high = 1.0
    reached_last: bool | None = None
    widths = [math.inf, math.inf]
    for _ in range(_MAX_EVALUATIONS):
        value = math.log(max(curve(math.exp(x)) / target, _FLOOR))
        again, reached_last = reached_last == (value <= 0), value <= 0
        if value <= 0:
            high, pull_high, pull_low = (x, value), 1.0, 0.5 * pull_low if again else pull_low
        else:
            low, pull_low, pull_high = (x, value), 1.0, 0.5 * pull_high if again else pull_high
        if low and high:
            slope = min(max((low[1] - high[1]) / (high[0] - low[0]), 0.2), 40.0)
        if high and (x == least or high[1] >= -slack or (low and high[0] - low[0] <= slack)):
            return Reached(x=math.exp(high[0]), slope=slope)
        if not high and x == most:
            return None
        if low and high:
            # The Illinois variant of regula falsi: an end that stays put loses weight. It halves where that stalls.
            width = high[0] - low[0]
            above, below = pull_low * (low[1] - aim), pull_high * max(aim - high[1], 0.1 * slack)
            share = above / (above + below) if width <= 0.5 * widths[0] else 0.5
            widths = [widths[1], width]
            x = low[0] + width * min(max(share, 0.02), 0.98)
        else:
            move = min(max((value - aim) / slope, -longest), longest)
            x, longest = min(max(x + move, least), most), 2 * longest
    return Reached(x=math.exp(high[0]), slope=slope) if high else None
