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

from sluice._base.native import built_library, required

_FOLDER = Path(__file__).parent
_integer, _pointer = ctypes.c_int64, ctypes.c_void_p
_TAKE_A_STRUCT = (
    *("add_rows", "correlate_groups", "lstm_forward", "lstm_backward", "gru_forward", "gru_backward"),
    *("rows_norm_backward", "group_norm_backward", "group_norm_backward_channels_last"),
)


@cache
def library() -> ctypes.CDLL | None:
    """The kernels, built now if they have not been built on this machine; None where that cannot be done."""
    return built_library(_FOLDER / "kernels.c", declare=_declare, works=_works)


def loaded_library() -> ctypes.CDLL:
    """The kernels, for a caller who knows that there are some."""
    return required(library())


def _declare(loaded: ctypes.CDLL) -> None:
    loaded.correlate.restype = ctypes.c_int
    loaded.correlate.argtypes = [
        *[_integer] * 6,
        *(_pointer, _integer, _pointer, _pointer),
        *(_pointer, _integer, _integer),
        *(_pointer, _integer, _integer, _pointer, ctypes.c_int),
    ]
    for kernel in (loaded.bag_forward, loaded.add_bags, loaded.row_norms, loaded.pad_lists, loaded.count_entries):
        kernel.restype = ctypes.c_int
    loaded.bag_forward.argtypes = [
        *(_pointer, _integer, _integer, _pointer, _integer, _integer),
        *(_pointer, _pointer, _pointer, _pointer, ctypes.c_int),
    ]
    loaded.add_bags.argtypes = [_pointer] * 4
    loaded.count_entries.argtypes = [_integer, _integer, _pointer, ctypes.c_int, _integer, _pointer]
    loaded.list_entries.restype = None
    loaded.pad_lists.argtypes = [*[_integer] * 4, *[_pointer] * 4]
    loaded.list_entries.argtypes = [_integer, _integer, _pointer, ctypes.c_int, _integer, *[_pointer] * 2]
    loaded.row_norms.argtypes = [*[_integer] * 3, *[_pointer] * 4, ctypes.c_int]
    loaded.gather_rows.restype = ctypes.c_int
    loaded.gather_rows.argtypes = [*[_integer] * 3, _pointer, ctypes.c_int, _pointer, _pointer, ctypes.c_int]
    for kernel in (loaded.narrow_forward, loaded.narrow_sum):
        kernel.restype = None
    stored = (_pointer, ctypes.c_int, _integer)
    loaded.narrow_forward.argtypes = [*[_integer] * 3, *stored, *[_pointer] * 4, ctypes.c_int]
    loaded.narrow_sum.argtypes = [*[_integer] * 4, *stored, _pointer, _pointer, ctypes.c_int]
    loaded.reads_half.restype, loaded.reads_half.argtypes = ctypes.c_int, []
    for name in _TAKE_A_STRUCT:
        kernel = getattr(loaded, name)
        kernel.restype, kernel.argtypes = ctypes.c_int, [_pointer]


def _works(loaded: ctypes.CDLL) -> bool:
    """Whether it gives the exact result for small integers; a broken compiler must not change anybody's norms."""
    inputs, outputs = torch.arange(2 * 3 * 7.0).view(2, 3, 7), torch.arange(2 * 3 * 17.0).view(2, 3, 17)
    windows, places = torch.arange(7), torch.arange(3) * 7
    found, squares = torch.empty(2, 7, 17), torch.empty(2)
    loaded.correlate(
        *(2, 3, 7, 17, 1, 0, inputs.data_ptr(), 21, windows.data_ptr(), places.data_ptr()),
        *(outputs.data_ptr(), 51, 17, found.data_ptr(), 7 * 17, 7, squares.data_ptr(), 1),
    )
    expected = torch.einsum("ntc,nto->nco", inputs, outputs)
    return bool((found == expected).all()) and torch.allclose(squares, expected.square().sum((1, 2)), rtol=1e-5)
