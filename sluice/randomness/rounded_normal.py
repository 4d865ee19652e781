"""Standard normals, scaled and rounded to integers, without any floating-point bias.

The number returned is ``rint(scale * Z)`` for a *real* normal Z: the Box-Muller transform of two real uniforms whose
binary digits come from a keystream, as many digits as it takes. Double precision with a proven error bound settles
all but a few draws in a million; those whose rounding the bound leaves open are settled by interval arithmetic, on more
digits of the same two uniforms. Nothing is truncated: there is no largest value.

A kernel in C (`sluice.randomness.native`) or torch operations do the first part. Both give the same integers, because
there is only one right answer, and leave the keystream at the same place.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from sluice._base import validate
from sluice._base.errors import DataError, InputError
from sluice.randomness.keystream import Keystream
from sluice.randomness.native import kernels
from sluice.randomness.native.kernels import PAIRS_PER_BLOCK, OpenPair

# Bound on the error of one standard normal computed in double precision from the first 63 digits of each uniform,
# where the radius' uniform is in the range below and library functions are within 4 units in the last place
# (docs/noise.md derives it). The boundary test leaves everything within this distance to interval arithmetic.
ERROR_BOUND = 2.0**-44
SMALLEST_RADIUS_DIGITS = 2**45
LARGEST_RADIUS_DIGITS = 2**63 - 2**46

LARGEST_SCALE = 2.0**40
# An entry beyond this many grid steps is clamped, so that all sums are exact integers.
MOST_STEPS = 2.0**52
# Numbers of this size are integers: adding it, and taking it off again, rounds. Unlike `round` this makes no negative zero.
_WHOLE = 1.5 * 2.0**52


class Digits(Protocol):
    """A stream of independent uniform bytes."""

    def read_into(self, target: np.ndarray) -> None:
        """Overwrite a contiguous array with the next bytes."""
        ...


class Entries:
    """All entries of some float32 and float64 tensors as one vector, changed in place."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = tensors
        self._starts = [0, *accumulate(tensor.numel() for tensor in tensors)]
        self.count = self._starts[-1]
        self._vector = kernels.Vector(tensors, self._starts) if kernels.available(self.count) else None

    def add_rounded_normals(self, *, scale: float, step: float, digits: Digits) -> None:
        """Replace each entry x by ``step * (rint(x / step) + rint(scale * Z))``, Z independent real standard normals.

        ``step`` is a power of two, and ``rint(x / step)`` is clamped to ``2^52`` either way. If an entry is NaN or infinite, this
        ends by a DataError, and all entries are NaN.

        Guarantee:
            The law is exactly that, given uniform ``digits``, and library functions within 4 units in the last place
            where there is no compiled kernel (docs/noise.md, section 2).
        """
        validate.positive(scale=scale)
        if scale > LARGEST_SCALE:
            raise InputError(f"scale={scale} is not allowed: it must be at most 2^40; choose a coarser grid.")
        if self._vector is not None and isinstance(digits, Keystream):
            open_pairs = kernels.add_rounded_normals(self._vector, scale=scale, step=step, stream=digits)
        else:
            open_pairs = self._add_by_torch(scale=scale, step=step, digits=digits)
        if open_pairs is None:
            # Some have noise by now, and infinite ones would pass for large ones if they were given again.
            for tensor in self._tensors:
                tensor.detach().fill_(math.nan)
            raise DataError(
                "raw_sum holds NaN or infinite entries and cannot be released: the contribution of a record whose gradient "
                "is not finite must be set to zero before it is added; lower the learning rate if all of them are."
            )
        # Their entries are rounded to the grid already; that changes nothing when it is done again.
        for pair, radius_digits, angle_digits in open_pairs:
            settled = settle(radius_digits, angle_digits, scale=scale, digits=digits)
            for place, number in zip(self._places(pair), settled, strict=True):
                self._add(place, torch.tensor([number], dtype=torch.float64), step)

    def _add_by_torch(self, *, scale: float, step: float, digits: Digits) -> list[OpenPair] | None:
        ends = (end for each in self._tensors if each.numel() for end in torch.aminmax(each.detach()))
        if not all(map(math.isfinite, ends)):
            return None
        open_pairs: list[OpenPair] = []
        pairs = (self.count + 1) // 2
        workspace = _Workspace(min(PAIRS_PER_BLOCK, pairs))
        for first in range(0, pairs, PAIRS_PER_BLOCK):
            noise, left = workspace.draw(min(PAIRS_PER_BLOCK, pairs - first), scale, digits)
            self._add(2 * first, noise, step)
            open_pairs += [(first + pair, radius, angle) for pair, radius, angle in left]
        return open_pairs

    def _places(self, pair: int) -> tuple[int, int]:
        """The entries of a pair: a block holds the cosines of all its pairs, and then the sines."""
        first = pair - pair % PAIRS_PER_BLOCK
        cosine = first + pair
        return cosine, cosine + min(PAIRS_PER_BLOCK, (self.count + 1) // 2 - first)

    def _add(self, start: int, noise: Tensor, step: float) -> None:
        """Noise for the entries from one place on; what is beyond the last entry is dropped."""
        steps = torch.empty_like(noise)
        parts = [(part, steps[place : place + part.numel()]) for part, place in self._parts(start, noise.numel())]
        for part, copied in parts:
            copied.copy_(part)
        steps.mul_(1 / step).round_().clamp_(-MOST_STEPS, MOST_STEPS).add_(noise).mul_(step)
        for part, copied in parts:
            part.copy_(copied)

    def _parts(self, start: int, count: int) -> Iterator[tuple[Tensor, int]]:
        """The pieces of tensors that hold ``count`` entries from one place on, each with its own place among them."""
        index = bisect_right(self._starts, start) - 1
        while index < len(self._tensors) and self._starts[index] < start + count:
            first, last = self._starts[index], self._starts[index + 1]
            low, high = max(first, start), min(last, start + count)
            if low < high:
                yield self._tensors[index].detach().view(-1)[low - first : high - first], low - start
            index += 1


def rounded_normals(count: int, *, scale: float, digits: Digits) -> Tensor:
    """``count`` independent draws of ``rint(scale * Z)``, Z a real standard normal, as whole float64 numbers.

    Guarantee:
        The law is exactly that of a real normal rounded to the nearest integer: see `Entries.add_rounded_normals`.
    """
    result = torch.zeros(count, dtype=torch.float64)
    Entries([result]).add_rounded_normals(scale=scale, step=1.0, digits=digits)
    return result


class _Workspace:
    """Buffers that stay in the processor's cache while block after block is drawn."""

    def __init__(self, pairs: int) -> None:
        self.drawn = np.empty(2 * pairs, dtype=np.int64)
        self.values = torch.empty(6 * pairs, dtype=torch.float64)

    def draw(self, pairs: int, scale: float, digits: Digits) -> tuple[Tensor, list[OpenPair]]:
        """The rounded normals of a block, cosines first, and the pairs that are open; zeros stand in their places."""
        drawn = self.drawn[: 2 * pairs]
        digits.read_into(drawn)
        radius_digits, angle_digits = torch.from_numpy(drawn).view(2, pairs)
        radius_digits.bitwise_and_(2**63 - 1)

        radius, angle, *_ = self.values[: 6 * pairs].view(6, pairs)
        normals, rounded = self.values[2 * pairs : 6 * pairs].view(2, 2, pairs)
        radius.copy_(radius_digits).mul_(2.0**-63).log_().mul_(-2.0 * scale * scale).sqrt_()
        angle.copy_(angle_digits).mul_(math.pi * 2.0**-63)
        torch.cos(angle, out=normals[0])
        torch.sin(angle, out=normals[1])
        normals.mul_(radius)
        torch.add(normals, _WHOLE, out=rounded).sub_(_WHOLE)

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
            return rounded.view(-1), []
        is_open = (remainders.abs_() >= certain).any(dim=0)
        is_open |= (radius_digits < SMALLEST_RADIUS_DIGITS) | (radius_digits > LARGEST_RADIUS_DIGITS)
        rounded[:, is_open] = 0.0
        left = is_open.nonzero().flatten()
        digits_left = (radius_digits[left].tolist(), angle_digits[left].tolist())
        return rounded.view(-1), list(zip(left.tolist(), *digits_left, strict=True))


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
    from mpmath import libmp  # type: ignore[import-untyped]  # for a few draws in a million, so most runs need none of it

    precision = places + 64
    uniform = tuple(libmp.from_man_exp(number, -places) for number in (radius_digits, radius_digits + 1))
    turn = tuple(libmp.from_man_exp(number, -places) for number in (angle_digits, angle_digits + 1))
    minus_two, factor = ((number, number) for number in (libmp.from_int(-2), libmp.from_float(scale)))
    squared = libmp.mpi_mul(minus_two, libmp.mpi_log(uniform, precision), precision)
    radius = libmp.mpi_mul(libmp.mpi_sqrt(squared, precision), factor, precision)
    pi = (libmp.mpf_pi(precision, libmp.round_floor), libmp.mpf_pi(precision, libmp.round_ceiling))
    angle = libmp.mpi_mul(turn, pi, precision)
    waves = libmp.mpi_cos_sin(angle, precision)
    ends = [map(libmp.to_rational, libmp.mpi_mul(radius, wave, precision)) for wave in waves]
    return [(_round_half_up(*low), _round_half_up(*high)) for low, high in ends]


def _round_half_up(numerator: int, denominator: int) -> int:
    return (2 * numerator + denominator) // (2 * denominator)
