"""Kernels in C for many small products that share their operands, whose norms are wanted and not always the results.

Torch has no operation for that. Where no compiler is found, where building fails, or with ``SLUICE_NATIVE=0``, everything
runs on torch operations instead; results are the same up to rounding. They run in torch's threads, because torch's OpenMP
library is the one that is already loaded (see `sluice._base.native`).
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import torch

from sluice._base.native import built_library

_FOLDER = Path(__file__).parent
_integer, _pointer = ctypes.c_int64, ctypes.c_void_p


@cache
def library() -> ctypes.CDLL | None:
    """The kernels, built now if they have not been built on this machine; None where that cannot be done."""
    return built_library(_FOLDER / "kernels.c", declare=_declare, works=_works)


def loaded_library() -> ctypes.CDLL:
    """The kernels, for a caller who knows that there are some."""
    found = library()
    if found is None:
        raise AssertionError("compiled kernels were called where there are none")
    return found


def _declare(loaded: ctypes.CDLL) -> None:
    loaded.correlate.restype = ctypes.c_int
    loaded.correlate.argtypes = [
        *[_integer] * 4,
        *(_pointer, _integer, _pointer, _pointer),
        *(_pointer, _integer, _integer),
        *(_pointer, _integer, _integer, _pointer, ctypes.c_int),
    ]
    loaded.add_rows.restype = None
    loaded.add_rows.argtypes = [_integer, _integer, *[_pointer] * 5, ctypes.c_int]
    for kernel in (loaded.lstm_forward, loaded.lstm_backward):
        kernel.restype, kernel.argtypes = ctypes.c_int, [_pointer]


def _works(loaded: ctypes.CDLL) -> bool:
    """Whether it gives the exact result for small integers; a broken compiler must not change anybody's norms."""
    inputs, outputs = torch.arange(2 * 3 * 7.0).view(2, 3, 7), torch.arange(2 * 3 * 17.0).view(2, 3, 17)
    windows, places = torch.arange(7), torch.arange(3) * 7
    found, squares = torch.empty(2, 7, 17), torch.empty(2)
    loaded.correlate(
        *(2, 3, 7, 17, inputs.data_ptr(), 21, windows.data_ptr(), places.data_ptr()),
        *(outputs.data_ptr(), 51, 17, found.data_ptr(), 7 * 17, 7, squares.data_ptr(), 1),
    )
    expected = torch.einsum("ntc,nto->nco", inputs, outputs)
    return bool((found == expected).all()) and torch.allclose(squares, expected.square().sum((1, 2)), rtol=1e-5)
