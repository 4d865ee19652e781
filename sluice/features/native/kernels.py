"""The scattering transform in C, called with tensors. Everything that C would not check is checked here.

It does about half the arithmetic of the products in `sluice.features.spectral`, and keeps a few planes in the cache from
their pixels to their coefficients. Where there are no kernels (no compiler, ``SLUICE_NATIVE=0``) those products are used;
both agree to rounding.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sluice._base.native import built_library
from sluice.features.filters import ANGLES, SCALES, wavelet_spectra
from sluice.features.spectral import averages, reflection

Array = NDArray[np.float64]

_COEFFICIENTS = 1 + SCALES * ANGLES + ANGLES * ANGLES
_integer, _pointer = ctypes.c_int64, ctypes.c_void_p


class _Axis(ctypes.Structure):
    _fields_ = (("points", _integer), ("cosines", _pointer), ("sines", _pointer))


class _Transform(ctypes.Structure):
    _fields_ = (
        *((name, _integer) for name in ("height", "width", "out_height", "out_width")),
        *((name, _Axis) for name in ("rows", "columns", "coarse_rows", "coarse_columns")),
        *((name, _pointer) for name in ("row_places", "column_places", "fine", "coarse")),
        *((name, _pointer) for name in ("fine_row_averages", "fine_column_averages")),
        *((name, _pointer) for name in ("coarse_row_averages", "coarse_column_averages")),
    )


@dataclass(frozen=True)
class _Cosines:
    points: int
    cosines: NDArray[np.float32]
    sines: NDArray[np.float32]

    @classmethod
    def of(cls, points: int) -> _Cosines:
        half = points // 2
        # Frequency times point is taken modulo the period first: cosines of large angles would be less exact.
        turns = np.outer(np.arange(half + 1), np.arange(half + 1)) % points * (2 * np.pi / points)
        return cls(points, _single(np.cos(turns)), _single(np.sin(turns[1:-1, 1:-1])))

    def for_c(self) -> _Axis:
        return _Axis(self.points, self.cosines.ctypes.data, self.sines.ctypes.data)


class NativeScattering:
    """Tables of the transform of planes of one size, and the call.

    Guarantee:
        Planes are worked on side by side, one in each lane of a vector, and no operation mixes lanes. So a plane's
        coefficients are a function of that plane alone, bit for bit, and of nothing else.
    """

    def __init__(self, *, size: tuple[int, int], fine: Array, coarse: Array) -> None:
        """The wavelets' spectra, at both scales, are on the padded grid."""
        padded: tuple[int, int] = fine.shape[1:]
        self._size = size
        self._axes = [_Cosines.of(length // step) for step in (1, 2) for length in padded]
        self._tables: dict[str, NDArray[Any]] = {
            "row_places": _places(size[0], padded[0]),
            "column_places": _places(size[1], padded[1]),
            "fine": _parities(fine, step=1),
            "coarse": _parities(coarse, step=2),
            "fine_row_averages": _single(averages(padded[0], 0)),
            "fine_column_averages": _single(averages(padded[1], 0)),
            "coarse_row_averages": _single(averages(padded[0], 1)),
            "coarse_column_averages": _single(averages(padded[1], 1)),
        }

    def __call__(self, planes: Tensor, *, into: Tensor) -> None:
        """Write the coefficients of ``(count, height, width)`` planes to ``(count, 81, height // 4, width // 4)``."""
        found = library()
        if found is None or not workable(planes) or not workable(into) or planes.shape[1:] != self._size:
            raise AssertionError("tensors of the wrong shape, type or strides were given to a compiled kernel")
        self._run(found, planes, into)

    def _run(self, loaded: ctypes.CDLL, planes: Tensor, into: Tensor) -> None:
        outputs = self._tables["fine_row_averages"].shape[0], self._tables["fine_column_averages"].shape[0]
        if into.shape != (len(planes), _COEFFICIENTS, *outputs):
            raise AssertionError("a tensor of the wrong shape was given to a compiled kernel")
        pointers = {name: table.ctypes.data for name, table in self._tables.items()}
        axes = [axis.for_c() for axis in self._axes]
        transform = _Transform(*self._size, *outputs, *axes, **pointers)
        if loaded.scattering(ctypes.byref(transform), len(planes), planes.data_ptr(), into.data_ptr()):
            raise MemoryError("a compiled kernel could not get the memory it works in")


@cache
def library() -> ctypes.CDLL | None:
    """The kernel, built now if it has not been built on this machine; None where that cannot be done."""
    return built_library(Path(__file__).parent / "scattering.c", declare=_declare, works=_works)


def workable(tensor: Tensor) -> bool:
    """Whether the kernel can read or write this memory."""
    return tensor.dtype is torch.float32 and tensor.device.type == "cpu" and tensor.is_contiguous()


def _declare(loaded: ctypes.CDLL) -> None:
    loaded.scattering.restype = ctypes.c_int
    loaded.scattering.argtypes = [_pointer, _integer, _pointer, _pointer]


def _works(loaded: ctypes.CDLL) -> bool:
    """Whether it agrees with plain Fourier transforms; a broken compiler must not change anybody's features."""
    size, padded = (5, 9), (12, 16)
    planes = torch.linspace(-1, 1, 3 * 45).square().view(3, *size)
    found = torch.empty(3, _COEFFICIENTS, 1, 2)
    fine, coarse = (wavelet_spectra(*padded, scale=scale) for scale in range(SCALES))
    NativeScattering(size=size, fine=fine, coarse=coarse)._run(loaded, planes, found)
    rows, columns = reflection(size[0], padded[0]), reflection(size[1], padded[1])
    image = (rows @ planes.double().numpy() @ columns.T)[:, None]
    first = _moduli(image, fine)
    levels = [
        (image, 0),
        (first, 0),
        (_moduli(image, coarse)[..., ::2, ::2], 1),
        (_moduli(first, coarse)[..., ::2, ::2], 1),
    ]
    expected = [averages(padded[0], level) @ each @ averages(padded[1], level).T for each, level in levels]
    return bool(np.allclose(found.numpy(), np.concatenate(expected, axis=1), rtol=1e-4, atol=1e-6))


def _moduli(signals: Array, spectra: Array) -> Array:
    waves = np.fft.ifft2(np.fft.fft2(signals)[:, :, None] * spectra)
    moduli: Array = np.abs(waves).reshape(len(signals), -1, *signals.shape[2:])
    return moduli


def _places(length: int, padded: int) -> NDArray[np.int64]:
    places: NDArray[np.int64] = np.ascontiguousarray(reflection(length, padded).argmax(axis=1).astype(np.int64))
    return places


def _parities(spectra: Array, *, step: int) -> NDArray[np.float32]:
    """The parts of each spectrum that are even or odd in either frequency, ``(ANGLES, rows, columns, 4)``: ee, oo, oe, eo.

    They are scaled for a sum over frequencies from 0 to half the points, each of which, but for the ends, stands for two.
    """
    _, height, width = spectra.shape
    rows, columns = np.arange(height // 2 + 1), np.arange(width // 2 + 1)
    both = spectra[:, rows[:, None], columns] + spectra[:, -rows[:, None], -columns]
    odd = spectra[:, rows[:, None], columns] - spectra[:, -rows[:, None], -columns]
    mirrored = spectra[:, rows[:, None], -columns] + spectra[:, -rows[:, None], columns]
    turned = spectra[:, rows[:, None], -columns] - spectra[:, -rows[:, None], columns]
    parts = np.stack([both + mirrored, both - mirrored, odd + turned, odd - turned], axis=-1) / 4
    if step == 2:  # above half of them, frequencies look like lower ones that turn the other way
        row_sign, column_sign = np.where(rows > height // 4, -1, 1)[:, None], np.where(columns > width // 4, -1, 1)
        parts[..., 1] *= row_sign * column_sign
        parts[..., 2] *= row_sign
        parts[..., 3] *= column_sign
    weight = np.outer(_multiplicity(rows), _multiplicity(columns)) / (height * width)
    return _single(parts * weight[:, :, None])


def _multiplicity(frequencies: NDArray[np.int64]) -> Array:
    return np.where((frequencies == 0) | (frequencies == frequencies[-1]), 1.0, 2.0)


def _single(table: Any) -> NDArray[np.float32]:
    return np.ascontiguousarray(table, dtype=np.float32)
