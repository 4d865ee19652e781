"""Numbers as people read them."""

from __future__ import annotations

import math


def rounded_up(value: float | str) -> str:
    """Four digits, rounded away from zero, so that a printed epsilon never promises more than the computed one."""
    if isinstance(value, str) or value == 0 or not math.isfinite(value):
        return str(value)
    digits = 3 - math.floor(math.log10(abs(value)))
    scaled = abs(value) * 10.0**digits
    nearest = round(scaled)
    whole = nearest if math.isclose(scaled, nearest, rel_tol=1e-12) else math.ceil(scaled)
    return f"{math.copysign(whole / 10.0**digits, value):.4g}"
