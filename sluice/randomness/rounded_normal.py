"""Standard normals, scaled and rounded to integers, without any floating-point bias.

The number returned is ``rint(scale * Z)`` for a *real* normal Z: the Box-Muller transform of two real uniforms whose
binary digits come from a keystream, as many digits as it takes. Double precision with a proven error bound settles
all but a few draws in a hundred thousand; those whose rounding the bound leaves open are settled by interval
arithmetic, on more digits of the same two uniforms. Nothing is truncated: there is no largest value.
"""

from __future__ import annotations

import math
from typing import Protocol

import numpy as np
import torch
from mpmath import libmp  # type: ignore[import-untyped]
from torch import Tensor

from sluice._base import validate
from sluice._base.errors import InputError

# Bound on the error of one standard normal computed in double precision from the first 63 digits of each uniform,
# where the radius' uniform is in the range below and library functions are within 4 units in the last place
# (docs/noise.md derives it). The boundary test leaves everything within this distance to interval arithmetic.
ERROR_BOUND = 2.0**-44
SMALLEST_RADIUS_DIGITS = 2**45
LARGEST_RADIUS_DIGITS = 2**63 - 2**46

LARGEST_SCALE = 2.0**40
PAIRS_PER_BLOCK = 32768


class Digits(Protocol):
    """A stream of independent uniform bytes."""

    def read_into(self, target: np.ndarray) -> None:
        """Overwrite a contiguous array with the next bytes."""
        ...


def rounded_normals(count: int, *, scale: float, digits: Digits) -> Tensor:
    """``count`` independent draws of ``rint(scale * Z)``, Z a real standard normal, as whole float64 numbers.

    Guarantee:
        The law is exactly that of a real normal rounded to the nearest integer, given uniform ``digits`` and
        library functions within 4 units in the last place (docs/noise.md, section 2).
    """
    validate.positive(scale=scale)
    if scale > LARGEST_SCALE:
        raise InputError(f"scale={scale} is not allowed: it must be at most 2^40; choose a coarser grid.")
    result = torch.empty(count + count % 2, dtype=torch.float64)
    workspace = _Workspace(min(PAIRS_PER_BLOCK, result.numel() // 2))
    for start in range(0, count, 2 * PAIRS_PER_BLOCK):
        workspace.fill(result[start : start + 2 * PAIRS_PER_BLOCK], scale, digits)
    return result[:count]


class _Workspace:
    """Buffers that stay in the processor's cache while block after block is drawn."""

    def __init__(self, pairs: int) -> None:
        self.drawn = np.empty(2 * pairs, dtype=np.int64)
        self.values = torch.empty(4 * pairs, dtype=torch.float64)

    def fill(self, block: Tensor, scale: float, digits: Digits) -> None:
        pairs = block.numel() // 2
        drawn = self.drawn[: 2 * pairs]
        digits.read_into(drawn)
        radius_digits, angle_digits = torch.from_numpy(drawn).view(2, pairs)
        radius_digits.bitwise_and_(2**63 - 1)

        radius, angle, *_ = self.values[: 4 * pairs].view(4, pairs)
        normals = self.values[2 * pairs : 4 * pairs].view(2, pairs)
        radius.copy_(radius_digits).mul_(2.0**-63).log_().mul_(-2.0 * scale * scale).sqrt_()
        angle.copy_(angle_digits).mul_(math.pi * 2.0**-63)
        torch.cos(angle, out=normals[0])
        torch.sin(angle, out=normals[1])
        normals.mul_(radius)
        rounded = block.view(2, pairs)
        torch.round(normals, out=rounded)

        remainders = normals.sub_(rounded)
        certain = 0.5 - ERROR_BOUND * scale
        lowest, highest = remainders.aminmax()
        fewest, most = radius_digits.aminmax()
        if (
            lowest > -certain
            and highest < certain
            and fewest >= SMALLEST_RADIUS_DIGITS
            and most <= LARGEST_RADIUS_DIGITS
        ):
            return
        is_open = (remainders.abs_() >= certain).any(dim=0)
        is_open |= (radius_digits < SMALLEST_RADIUS_DIGITS) | (radius_digits > LARGEST_RADIUS_DIGITS)
        for pair in is_open.nonzero().flatten().tolist():
            settled = settle(int(radius_digits[pair]), int(angle_digits[pair]), scale=scale, digits=digits)
            rounded[0, pair], rounded[1, pair] = settled


def settle(radius_digits: int, angle_digits: int, *, scale: float, digits: Digits) -> tuple[int, int]:
    """The rounded pair of the uniforms that begin with these 63 digits, read on until the rounding is certain.

    The radius' uniform begins with ``radius_digits / 2^63``, the angle is ``pi`` times one that begins with
    ``angle_digits / 2^63`` in [-1, 1).
    """
    places = 63
    more = np.empty(2, dtype=np.uint64)
    while True:
        if radius_digits > 0:
            (cosine_low, cosine_high), (sine_low, sine_high) = _enclosures(radius_digits, angle_digits, places, scale)
            if cosine_low == cosine_high and sine_low == sine_high:
                return cosine_low, sine_low
        digits.read_into(more)
        radius_digits = (radius_digits << 64) | int(more[0])
        angle_digits = (angle_digits << 64) | int(more[1])
        places += 64


def _enclosures(radius_digits: int, angle_digits: int, places: int, scale: float) -> list[tuple[int, int]]:
    """The integers nearest to both ends of an interval that encloses each of the two scaled normals."""
    precision = places + 64
    uniform = tuple(libmp.from_man_exp(number, -places) for number in (radius_digits, radius_digits + 1))
    turn = tuple(libmp.from_man_exp(number, -places) for number in (angle_digits, angle_digits + 1))
    minus_two, factor = ((number, number) for number in (libmp.from_int(-2), libmp.from_float(scale)))
    squared = libmp.mpi_mul(minus_two, libmp.mpi_log(uniform, precision), precision)
    radius = libmp.mpi_mul(libmp.mpi_sqrt(squared, precision), factor, precision)
    pi = (libmp.mpf_pi(precision, libmp.round_floor), libmp.mpf_pi(precision, libmp.round_ceiling))
    angle = libmp.mpi_mul(turn, pi, precision)
    return [_nearest(libmp.mpi_mul(radius, wave, precision)) for wave in libmp.mpi_cos_sin(angle, precision)]


def _nearest(interval: tuple[object, object]) -> tuple[int, int]:
    low, high = (libmp.to_rational(end) for end in interval)
    return _round_half_up(*low), _round_half_up(*high)


def _round_half_up(numerator: int, denominator: int) -> int:
    return (2 * numerator + denominator) // (2 * denominator)
