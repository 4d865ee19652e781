"""Small rules for reading and writing frozen descriptions as strict JSON: nothing unknown, nothing missing."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from sluice._base.errors import InputError


def require_keys(data: object, *, what: str, required: Sequence[str], optional: Sequence[str] = ()) -> None:
    """Refuse anything but an object with all required keys and no unknown one."""
    if not isinstance(data, Mapping):
        raise InputError(f"{what}={data!r} is not allowed: it must be a JSON object.")
    missing = [key for key in required if key not in data]
    unknown = [str(key) for key in data if key not in required and key not in optional]
    if missing:
        raise InputError(f"{what} lacks {', '.join(missing)}: these keys are needed: {', '.join(required)}.")
    if unknown:
        allowed = ", ".join([*required, *optional])
        raise InputError(f"{what} has unknown keys {', '.join(unknown)}: allowed are {allowed}.")


def encode_float(value: float) -> float | str:
    """JSON has no infinity: it is written as the string "inf"."""
    return value if math.isfinite(value) else str(value)


def decode_float(value: Any) -> Any:
    """The inverse of ``encode_float``; any other value passes, for the validators of its owner to judge."""
    return math.inf if value == "inf" else value
