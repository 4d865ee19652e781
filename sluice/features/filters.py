"""Morlet wavelets and the Gaussian low-pass of the scattering transform, on a periodic grid.

The constants are those that scattering software agrees on, so that features can be compared between packages:
a wavelet of scale j has width 0.8 * 2^j along its wave and 1 / SLANT times that across it, and oscillates at
3/4 * pi / 2^j; the low-pass has width 0.8 * 2^(SCALES - 1).
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

ANGLES = 8
SCALES = 2
BASE_WIDTH = 0.8
BASE_FREQUENCY = 0.75 * math.pi
SLANT = 4.0 / ANGLES

# Scattering software normalises by 2 * 3.1415 * width^2. The rounded constant is kept because it moves every
# coefficient by 3e-5, which is more than the agreement that is promised.
_ROUNDED_PI = 3.1415

# Wavelets are summed over this many periods on either side: on the smallest grid the next one would add under 1e-12.
_PERIODS = 2


def wavelet_spectra(height: int, width: int, *, scale: int) -> NDArray[np.float64]:
    """The Fourier transforms (they are real) of one scale's wavelets at all angles: ``(ANGLES, height, width)``."""
    angles = [(ANGLES // 2 - 1 - index) * math.pi / ANGLES for index in range(ANGLES)]
    return np.stack([_morlet_spectrum(height, width, scale=scale, angle=angle) for angle in angles])


def low_pass_kernel(length: int, *, level: int) -> NDArray[np.float64]:
    """One axis of the low-pass, which is separable, on the grid of ``length / 2^level`` points.

    On a coarser grid only the band that the grid can carry is kept, so that nothing aliases into it.
    """
    width = BASE_WIDTH * 2 ** (SCALES - 1)
    kernel = np.zeros(length)
    for period in range(-_PERIODS, _PERIODS + 1):
        kernel += np.exp(-((np.arange(length) + period * length) ** 2) / (2 * width**2))
    spectrum = np.fft.fft(kernel / (math.sqrt(2 * _ROUNDED_PI) * width)).real
    points = length >> level
    carried = np.fft.fftfreq(points, d=1 / points).astype(int)
    return np.fft.ifft(spectrum[carried]).real


def _morlet_spectrum(height: int, width: int, *, scale: int, angle: float) -> NDArray[np.float64]:
    frequency = BASE_FREQUENCY / 2**scale
    envelope, wave = np.zeros((height, width)), np.zeros((height, width), dtype=np.complex128)
    for row_period in range(-_PERIODS, _PERIODS + 1):
        for column_period in range(-_PERIODS, _PERIODS + 1):
            rows = np.arange(height)[:, None] + row_period * height
            columns = np.arange(width)[None, :] + column_period * width
            along = math.cos(angle) * rows + math.sin(angle) * columns
            across = math.cos(angle) * columns - math.sin(angle) * rows
            gaussian = np.exp(-(along**2 + (SLANT * across) ** 2) / (2 * (BASE_WIDTH * 2**scale) ** 2))
            envelope += gaussian
            wave += gaussian * np.exp(1j * frequency * along)
    # Subtracting a multiple of the envelope gives the wavelet a mean of exactly zero.
    wavelet = wave - wave.sum() / envelope.sum() * envelope
    spectrum: NDArray[np.float64] = np.fft.fft2(wavelet).real * SLANT / (2 * _ROUNDED_PI * (BASE_WIDTH * 2**scale) ** 2)
    return spectrum
