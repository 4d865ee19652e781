"""Responses of patch dictionaries and products of rows in C, called with tensors. What C would not check is checked here."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from sluice._base.native import built_library, required
from sluice.features.patch_blocks import PatchBlock
from sluice.features.patch_dictionary import CENTRE, SPREAD, VARIANCE_FLOOR, Dictionary

ROWS = 6
"""Products are of a multiple of so many rows."""

_PANEL, _SUMS = 32, 8
_integer, _pointer, _real = ctypes.c_int64, ctypes.c_void_p, ctypes.c_float
_INTEGERS = ("pixels", "size", "patches", "cells", "even", "odd", "width", "pairs", "panels")
_TABLES = ("places", "starts", "ends", "mirrors", "factors", "whitening", "dictionary")
_REALS = ("threshold", "floor", "centre", "scale", "variance_floor")


class _Block(ctypes.Structure):
    _fields_ = (
        *((name, _integer) for name in _INTEGERS),
        *((name, _pointer) for name in _TABLES),
        *((name, _real) for name in _REALS),
    )


class NativeDictionary:
    """The tables of a dictionary, and the call.

    Guarantee:
        Each image is worked on alone, in the same order of operations: its responses are a function of that image, bit
        for bit, and of nothing else.
    """

    def __init__(self, dictionary: Dictionary) -> None:
        layout, block = dictionary.layout, dictionary.layout.block
        size, coordinates = dictionary.whitening.shape
        starts = [_filled(each, ROWS) for each in layout.starts]
        ends = torch.tensor([0, *(len(each) for each in starts)]).cumsum(0)
        self.shape = layout.channels, layout.height, layout.width
        self.block = block
        whitening = torch.zeros(size, -(-coordinates // _SUMS) * _SUMS)
        whitening[:, :coordinates] = dictionary.whitening
        self._tables = {
            "places": layout.places,
            "starts": torch.cat(starts),
            "ends": ends,
            "mirrors": layout.mirrored_cells.contiguous(),
            "factors": torch.tensor([0.5 / len(each) for each in layout.starts]),
            "whitening": whitening,
            "dictionary": packed(dictionary.atoms.T),
        }
        integers = {
            "pixels": layout.channels * layout.height * layout.width,
            "size": size,
            "patches": int(ends[-1]),
            "cells": block.cells,
            "even": dictionary.even,
            "odd": coordinates - dictionary.even,
            "width": whitening.shape[1],
            "pairs": block.pairs,
            "panels": -(-block.pairs // _PANEL),
        }
        reals = {
            "threshold": block.threshold,
            "floor": dictionary.floor,
            "centre": CENTRE,
            "scale": 1 / SPREAD,
            "variance_floor": VARIANCE_FLOOR if block.contrast else -1.0,
        }
        self._struct = _Block(**integers, **reals, **{name: table.data_ptr() for name, table in self._tables.items()})

    def __call__(self, prepared: Tensor, *, into: Tensor) -> None:
        """Write square roots of mean responses to ``(n, cells * 2 * pairs)``."""
        self._run(required(library()), prepared, into)

    def _run(self, loaded: ctypes.CDLL, prepared: Tensor, into: Tensor) -> None:
        shapes = prepared.shape[1:] == self.shape and into.shape == (len(prepared), self.block.responses)
        if not shapes or not _workable(prepared) or not _workable(into):
            raise AssertionError("tensors of the wrong shape, type or strides were given to a compiled kernel")
        if loaded.patch_responses(ctypes.byref(self._struct), len(prepared), prepared.data_ptr(), into.data_ptr()):
            raise MemoryError("a compiled kernel could not get the memory it works in")


def packed(matrix: Tensor) -> Tensor:
    """A matrix as `product` reads it, some columns at a time: ``(columns / 32, rows, 32)``, filled up with 0."""
    rows, columns = matrix.shape
    filled = matrix.new_zeros(rows, -(-columns // _PANEL) * _PANEL, dtype=torch.float32)
    filled[:, :columns] = matrix
    return filled.view(rows, -1, _PANEL).transpose(0, 1).contiguous()


def product(rows: Tensor, matrix: Tensor, *, into: Tensor) -> None:
    """``into = rows @ matrix`` for a packed matrix. Row i of the result is a function of row i, bit for bit."""
    panels, size, panel = matrix.shape
    shapes = rows.shape == (len(into), size) and into.shape[1] == panels * panel and len(rows) % ROWS == 0
    strides = rows.stride(1) == into.stride(1) == 1 and matrix.is_contiguous()
    kinds = all(each.dtype is torch.float32 and each.device.type == "cpu" for each in (rows, matrix, into))
    if not shapes or not strides or not kinds or panel != _PANEL:
        raise AssertionError("tensors of the wrong shape, type or strides were given to a compiled kernel")
    required(library()).patch_product(
        len(rows),
        size,
        panels * panel,
        rows.data_ptr(),
        rows.stride(0),
        matrix.data_ptr(),
        into.data_ptr(),
        into.stride(0),
    )


@cache
def library() -> ctypes.CDLL | None:
    """The kernels, built now if they have not been built on this machine; None where that cannot be done."""
    return built_library(Path(__file__).parent / "patches.c", declare=_declare, works=_works)


def _declare(loaded: ctypes.CDLL) -> None:
    loaded.patch_responses.restype = ctypes.c_int
    loaded.patch_responses.argtypes = [_pointer, _integer, _pointer, _pointer]
    loaded.patch_product.restype = None
    loaded.patch_product.argtypes = [
        *(_integer, _integer, _integer),
        *(_pointer, _integer, _pointer, _pointer, _integer),
    ]


def _works(loaded: ctypes.CDLL) -> bool:
    """Whether it agrees with matrix products; a broken compiler must not change anybody's features."""
    images = torch.linspace(0, 9, 2 * 3 * 9 * 10, dtype=torch.float64).sin().abs().view(2, 3, 9, 10)
    for contrast in (True, False):
        block = PatchBlock(
            name="check", patch=3, pairs=7, coordinates=10, components=4, padding=1, grid=2, contrast=contrast
        )
        layout = block.layout((3, 9, 10))
        dictionary = Dictionary.fit(layout, block.prepare(images).float(), torch.Generator().manual_seed(0))
        found = torch.empty(2, block.responses)
        NativeDictionary(dictionary)._run(loaded, block.prepare(images).float(), found)
        expected = dictionary.responses(block.prepare(images)).flatten(1)
        if not torch.allclose(found.double().square(), expected.square(), rtol=1e-4, atol=1e-6):
            return False
    return True


def _filled(values: Tensor, multiple: int) -> Tensor:
    missing = -len(values) % multiple
    return torch.cat([values, values.new_full((missing,), -1)])


def _workable(tensor: Tensor) -> bool:
    return tensor.dtype is torch.float32 and tensor.device.type == "cpu" and tensor.is_contiguous()


__all__ = ["ROWS", "NativeDictionary", "library", "packed", "product"]
