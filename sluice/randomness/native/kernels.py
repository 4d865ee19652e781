"""Rounded normals in C, added to tensors in one pass; everything that C would not check is checked here.

Keystream, Box-Muller transform, rounding and addition go over a few hundred pairs at a time, so nothing but the tensors
themselves passes through memory. Where there are no kernels (no compiler, ``SLUICE_NATIVE=0``), torch operations give
the same integers: both round the same real numbers.
"""

from __future__ import annotations

import ctypes
import hashlib
import math
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from sluice._base.native import built_library, required
from sluice.randomness.keystream import LONGEST, Keystream

# As in `sluice.randomness.rounded_normal`, for this kernel's own logarithm, sine and cosine (docs/noise.md derives it).
ERROR_BOUND = 2.0**-46
SMALLEST_RADIUS_DIGITS = 2**45
LARGEST_RADIUS_DIGITS = 2**63 - 2**32

#: A pair that is not settled: its number, and the digits of its radius and its angle.
OpenPair = tuple[int, int, int]

#: Pairs whose radii, and then angles, lie together in the stream.
PAIRS_PER_BLOCK = 32768
BYTES_PER_PAIR = 16

_KNOWN_ANSWER = "3305e36e61c48cfdfc3b3bd80e68bb8c53f5c1145ab23f26c65c07f60e1c2179"
_pointer = ctypes.c_void_p


def workable(tensor: Tensor) -> bool:
    """Whether noise can be added to the memory of a tensor."""
    return tensor.dtype in (torch.float32, torch.float64) and tensor.is_cpu and tensor.is_contiguous()


class Vector(ctypes.Structure):
    """All entries of some tensors, one after the other; ``starts`` has the first one of each, and the number of all."""

    _fields_ = (("tensors", ctypes.c_int64), ("starts", _pointer), ("data", _pointer), ("is_double", _pointer))

    def __init__(self, tensors: Sequence[Tensor], starts: Sequence[int]) -> None:
        if not all(map(workable, tensors)):
            raise AssertionError("tensors of the wrong type, device or strides were given to a compiled kernel")
        self.entries = starts[-1]
        # Kept for as long as C may read them.
        self._kept = (
            tensors,
            np.array(starts, dtype=np.int64),
            np.array([tensor.data_ptr() for tensor in tensors], dtype=np.uint64),
            np.array([tensor.dtype is torch.float64 for tensor in tensors], dtype=np.uint8),
        )
        super().__init__(len(tensors), *(array.ctypes.data for array in self._kept[1:]))


class _Draw(ctypes.Structure):
    _fields_ = (
        ("key", ctypes.c_uint8 * 32),
        ("nonce", ctypes.c_uint8 * 12),
        ("threads", ctypes.c_int32),
        ("block", ctypes.c_int64),
        ("scale", ctypes.c_double),
        ("step", ctypes.c_double),
        ("certain", ctypes.c_double),
        ("smallest", ctypes.c_int64),
        ("largest", ctypes.c_int64),
        ("room", ctypes.c_int64),
        ("open", _pointer),
    )


@cache
def library() -> ctypes.CDLL | None:
    """The kernels, built now if they have not been built on this machine; None where that cannot be done."""
    return built_library(Path(__file__).parent / "noise.c", declare=_declare, works=_works)


def available(entries: int) -> bool:
    """Whether there is a kernel for this many entries."""
    return (entries + 1) // 2 * BYTES_PER_PAIR < LONGEST and library() is not None


def add_rounded_normals(vector: Vector, *, scale: float, step: float, stream: Keystream) -> list[OpenPair] | None:
    """Replace each entry x by ``step * (rint(x / step) + rint(scale * Z))``, and list the pairs that are left open.

    The entries of open pairs are rounded to the grid and have no noise yet. None if an entry was NaN or infinite: then what
    is in the tensors now is of no use.
    """
    return _add_rounded_normals(required(library()), vector, scale=scale, step=step, stream=stream)


def _add_rounded_normals(
    loaded: ctypes.CDLL, vector: Vector, *, scale: float, step: float, stream: Keystream
) -> list[OpenPair] | None:
    pairs = (vector.entries + 1) // 2
    key, nonce = stream.hand_over(pairs * BYTES_PER_PAIR)
    expected = pairs * (4 * ERROR_BOUND * scale + 2.0**-17)
    # More than this many have a probability below 2^-100.
    found = np.empty((2 * math.ceil(expected) + 100, 3), dtype=np.int64)
    listed = loaded.add_rounded_normals(
        vector,
        _Draw(
            key=(ctypes.c_uint8 * 32).from_buffer_copy(key),
            nonce=(ctypes.c_uint8 * 12).from_buffer_copy(nonce),
            threads=torch.get_num_threads(),
            block=PAIRS_PER_BLOCK,
            scale=scale,
            step=step,
            certain=0.5 - ERROR_BOUND * scale,
            smallest=SMALLEST_RADIUS_DIGITS,
            largest=LARGEST_RADIUS_DIGITS,
            room=len(found),
            open=found.ctypes.data,
        ),
    )
    if listed < 0:
        return None
    if listed > len(found):
        raise AssertionError(f"{listed} of {pairs} pairs of normals are not settled, which cannot be")
    return sorted(map(tuple, found[:listed].tolist()))


def _declare(loaded: ctypes.CDLL) -> None:
    loaded.add_rounded_normals.restype = ctypes.c_int64
    loaded.add_rounded_normals.argtypes = [ctypes.POINTER(Vector), ctypes.POINTER(_Draw)]


def known_question() -> tuple[list[Tensor], Keystream]:
    """What a kernel must give the known answer to: two tensors, together longer than a block, and a stream."""
    tensors = [torch.zeros(2 * PAIRS_PER_BLOCK + 1, dtype=torch.float64), torch.arange(-1000.0, 1000.0) / 64]
    return tensors, Keystream(key=bytes(range(32)), number=1)


def answer(tensors: Sequence[Tensor]) -> str:
    return hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in tensors)).hexdigest()


def _works(loaded: ctypes.CDLL) -> bool:
    """Whether it gives a known answer, to the last bit; a broken compiler must not change anybody's noise."""
    tensors, stream = known_question()
    starts = [0, tensors[0].numel(), tensors[0].numel() + tensors[1].numel()]
    open_pairs = _add_rounded_normals(loaded, Vector(tensors, starts), scale=2.0**20, step=2.0**-15, stream=stream)
    return open_pairs == [] and answer(tensors) == _KNOWN_ANSWER
