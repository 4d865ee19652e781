"""Arithmetic with the coefficients of lower-triangular Toeplitz matrices: a matrix is its first column.

Products of such matrices are convolutions of their first columns, cut off after n entries.
"""

from __future__ import annotations

import numpy as np
import scipy

Series = np.ndarray


def multiply(left: Series, right: Series) -> Series:
    """The first column of the product of two matrices of the same size."""
    size = len(left)
    length = scipy.fft.next_fast_len(2 * size, real=True)
    product = scipy.fft.irfft(scipy.fft.rfft(left, length) * scipy.fft.rfft(right, length), length)
    return np.asarray(product[:size])


def transposed_multiply(left: Series, right: Series) -> Series:
    """The product of the transposed left matrix with a vector."""
    return multiply(left, right[::-1])[::-1]


def inverse(series: Series) -> Series:
    """The first column of the inverse, by Newton's iteration; the first entry must not be zero."""
    size = len(series)
    result = np.array([1.0 / series[0]])
    while len(result) < size:
        length = min(2 * len(result), size)
        known = np.zeros(length)
        known[: len(result)] = result
        residue = multiply(series[:length], known)
        residue[0] -= 1.0
        result = known - multiply(known, residue)
    # One more step at full length removes what rounding errors the shorter ones left.
    residue = multiply(series, result)
    residue[0] -= 1.0
    return np.asarray(result - multiply(result, residue))


def repeated(series: Series, *, count: int, separation: int) -> Series:
    """The sum of ``count`` columns of the matrix that are ``separation`` apart, beginning with the first."""
    result = np.zeros_like(series)
    for start in range(0, min(count * separation, len(series)), separation):
        result[start:] += series[: len(series) - start]
    return result


def transposed_repeated(vector: Series, *, count: int, separation: int) -> Series:
    """The transpose of :func:`repeated`, for gradients."""
    result = np.zeros_like(vector)
    for start in range(0, min(count * separation, len(vector)), separation):
        result[: len(vector) - start] += vector[start:]
    return result
