"""The two linear maps of the scattering transform, each as a few dense matrix products.

The grids are small (36 or 40 points a side), and there a Fourier transform by matrix product is faster than an FFT:
it runs at the speed of the machine's matrix multiplication, pads, filters and subsamples on the way, and writes only
the points that are wanted. Samples lie in the *last* dimension, so every product is wide and every
filter acts on contiguous numbers.

Real signals are written in cosines and sines. A filter with a real spectrum then mixes, at each frequency, only the
four products of a row's cosine or sine with a column's; and subsampling by two only adds the frequencies that alias.
So one small matrix for each frequency of the coarse grid does the filtering, for all angles at once.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from sluice.features.filters import ANGLES, low_pass_kernel

Array = NDArray[np.float64]


class Workspace:
    """Buffers that are used again for every chunk, because fresh memory costs more than the arithmetic in it."""

    def __init__(self, like: Tensor) -> None:
        self._like = like
        self._buffers: dict[str, Tensor] = {}

    def take(self, name: str, *shape: int) -> Tensor:
        """An uninitialised tensor of this shape; it overwrites the last one taken under the same name."""
        size = math.prod(shape)
        if name not in self._buffers or self._buffers[name].numel() < size:
            self._buffers[name] = self._like.new_empty(size)
        return self._buffers[name][:size].view(shape)


class BandPass(nn.Module):
    """Convolve real signals with all angles of one wavelet scale, keep every ``step``-th point, take the modulus.

    Takes ``(rows, columns, samples)`` and gives ``(ANGLES, rows', columns', samples)`` in the workspace's buffer
    ``output``. ``padding`` is a matrix for the rows and one for the columns, applied to the signal first at no cost.
    """

    analyse_rows: Tensor
    analyse_columns: Tensor
    mix_cosines: Tensor
    mix_sines: Tensor
    synthesise_rows: Tensor
    synthesise_columns: Tensor

    def __init__(
        self, *, spectra: Array, step: int, padding: tuple[Array, Array] | None = None, dtype: torch.dtype
    ) -> None:
        super().__init__()
        _, height, width = spectra.shape
        self.step = step
        self.coarse = (height // step, width // step)
        self.frequencies = (height // step // 2 + 1, width // step // 2 + 1)
        analyse_rows, analyse_columns = _after(padding, _analysis(height, step), _analysis(width, step))
        cosines, sines = _mixing(spectra, step)
        matrices = {
            "analyse_rows": analyse_rows,
            "analyse_columns": analyse_columns,
            "mix_cosines": cosines,
            "mix_sines": sines,
            "synthesise_rows": _cosines_then_sines(height // step),
            "synthesise_columns": _cosine_sine_pairs(width // step),
        }
        for name, matrix in matrices.items():
            self.register_buffer(name, _tensor(matrix, dtype), persistent=False)

    def forward(self, signal: Tensor, workspace: Workspace, output: str) -> Tensor:
        rows, columns, samples = signal.shape
        row_frequencies, column_frequencies = self.frequencies
        coarse_rows, coarse_columns = self.coarse
        parts = 2 * self.step
        pairs = row_frequencies * column_frequencies

        by_row = workspace.take("by row", parts * row_frequencies, columns * samples)
        torch.mm(self.analyse_rows, signal.reshape(rows, -1), out=by_row)
        by_row = by_row.view(-1, columns, samples)
        analysed = workspace.take("analysed", by_row.shape[0], parts * column_frequencies, samples)
        torch.bmm(self.analyse_columns.expand(by_row.shape[0], -1, -1), by_row, out=analysed)
        grouped = workspace.take("grouped", row_frequencies, column_frequencies, parts, parts, samples)
        grouped.copy_(analysed.view(row_frequencies, parts, column_frequencies, parts, samples).transpose(1, 2))

        # Cosines of the rows come before their sines, so that both inverse transforms below read contiguous memory.
        mixed = workspace.take("mixed", coarse_rows * column_frequencies, 4 * ANGLES, samples)
        grouped = grouped.view(pairs, parts * parts, samples)
        torch.bmm(self.mix_cosines, grouped, out=mixed[:pairs])
        torch.bmm(self.mix_sines, grouped[column_frequencies:-column_frequencies], out=mixed[pairs:])
        mixed = mixed.view(coarse_rows, 2 * column_frequencies, -1)
        by_row = workspace.take("synthesised", coarse_rows, coarse_columns, mixed.shape[2])
        torch.bmm(self.synthesise_columns.expand(coarse_rows, -1, -1), mixed[:, :-1], out=by_row)
        waves = workspace.take("waves", coarse_rows, coarse_columns * mixed.shape[2])
        torch.mm(self.synthesise_rows, by_row.view(coarse_rows, -1), out=waves)

        real, imaginary = waves.view(coarse_rows, coarse_columns, 2, ANGLES, samples).permute(2, 3, 0, 1, 4)
        modulus = workspace.take(output, ANGLES, coarse_rows, coarse_columns, samples)
        return torch.mul(real, real, out=modulus).addcmul_(imaginary, imaginary).sqrt_()


class LowPass(nn.Module):
    """Average real signals with the Gaussian and keep the points of the output grid.

    Takes ``(signals, rows, columns, samples)`` and writes ``(signals, outputs, outputs', samples)``.
    """

    rows: Tensor
    columns: Tensor

    def __init__(
        self, *, padded: tuple[int, int], level: int, padding: tuple[Array, Array] | None = None, dtype: torch.dtype
    ) -> None:
        super().__init__()
        rows, columns = _after(padding, averages(padded[0], level), averages(padded[1], level))
        self.register_buffer("rows", _tensor(rows, dtype), persistent=False)
        self.register_buffer("columns", _tensor(columns, dtype), persistent=False)

    def forward(self, signals: Tensor, workspace: Workspace, *, into: Tensor) -> None:
        count, rows, columns, samples = signals.shape
        outputs = self.rows.shape[0]
        by_row = workspace.take("averaged rows", count, outputs, columns * samples)
        torch.bmm(self.rows.expand(count, -1, -1), signals.view(count, rows, -1), out=by_row)
        matrices = self.columns.expand(count * outputs, -1, -1)
        torch.bmm(matrices, by_row.view(-1, columns, samples), out=into.view(count * outputs, -1, samples))


def _after(padding: tuple[Array, Array] | None, rows: Array, columns: Array) -> tuple[Array, Array]:
    return (rows, columns) if padding is None else (rows @ padding[0], columns @ padding[1])


def _tensor(matrix: Array, dtype: torch.dtype) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(matrix)).to(dtype)


def reflection(length: int, padded: int) -> Array:
    """The matrix that extends ``length`` points to ``padded`` by reflection without repeating the border."""
    before = (padded - length) // 2
    return np.pad(np.eye(length), ((before, padded - length - before), (0, 0)), mode="reflect")


def averages(padded: int, level: int) -> Array:
    """One row for each output point: the low-pass centred there. The outermost points are padding and are left out."""
    kernel = low_pass_kernel(padded, level=level)
    stride = 4 >> level
    centres = np.arange(stride, len(kernel) - stride, stride)
    rows: Array = kernel[(centres[:, None] - np.arange(len(kernel))) % len(kernel)]
    return rows


def _aliases(length: int, step: int) -> NDArray[np.int64]:
    """The frequencies of the fine grid that the coarse grid sees as 0, 1, ...: ``(coarse frequencies, step)``."""
    coarse = length // step
    seen = np.arange(coarse // 2 + 1)
    return seen[:, None] if step == 1 else np.stack([seen, coarse - seen], axis=1)


def _analysis(length: int, step: int) -> Array:
    """Rows are ordered by (coarse frequency, alias, cosine or sine)."""
    phase = 2 * np.pi / length * _aliases(length, step)[:, :, None] * np.arange(length)
    return np.stack([np.cos(phase), np.sin(phase)], axis=2).reshape(-1, length)


def _cosines_then_sines(points: int) -> Array:
    """Synthesis of one axis from all cosines, then the sines that are not zero: an invertible square matrix."""
    phase = 2 * np.pi / points * np.arange(points)[:, None] * np.arange(points // 2 + 1)
    return np.concatenate([np.cos(phase), np.sin(phase[:, 1:-1])], axis=1)


def _cosine_sine_pairs(points: int) -> Array:
    """Synthesis of one axis from (cosine, sine) at each frequency; the last sine, which is zero, is left out."""
    phase = 2 * np.pi / points * np.arange(points)[:, None] * np.arange(points // 2 + 1)
    return np.stack([np.cos(phase), np.sin(phase)], axis=2).reshape(points, -1)[:, :-1]


def _mixing(spectra: Array, step: int) -> tuple[Array, Array]:
    """From the analysis at each coarse pair of frequencies to what synthesis needs there.

    Two stacks of matrices, for the output's cosines and sines along the rows. Each is
    (row frequency * column frequency, (column cosine or sine, real or imaginary, angle), inputs), and the inputs are
    (row alias, row cosine or sine, column alias, column cosine or sine).
    """
    _, height, width = spectra.shape
    row_signed, row_in, row_out = _exponentials(height, step)
    column_signed, column_in, column_out = _exponentials(width, step)
    chosen = spectra[:, row_signed[:, :, :, None, None, None], column_signed[None, None, None]] / (height * width)
    # t angle; f, g frequencies; a, b aliases; s, r signs; p, q the input's bases; u, v the output's bases.
    mixing = np.einsum(
        "tfasgbr,fasp,gbrq,fasu,gbrv->ufgvtapbq", chosen, row_in, column_in, row_out, column_out, optimize=True
    )
    cosines, sines = np.stack([mixing.real, mixing.imag], axis=4)
    inputs = (2 * step) ** 2
    return cosines.reshape(-1, 4 * ANGLES, inputs), sines[1:-1].reshape(-1, 4 * ANGLES, inputs)


def _exponentials(length: int, step: int) -> tuple[NDArray[np.int64], NDArray[np.complex128], NDArray[np.complex128]]:
    """For each (coarse frequency, alias, sign): the signed frequency, and its exponentials in cosines and sines.

    The input's exponential turns by -frequency, the output's by the frequency as the coarse grid sees it. Frequencies
    that are their own negative are halved, and an alias that is the frequency itself is left out, so that the
    sum over aliases and signs meets every frequency of the fine grid exactly once.
    """
    frequency = _aliases(length, step)
    sign = np.array([1, -1])
    signed = frequency[:, :, None] * sign
    weight = np.where((2 * frequency) % length == 0, 0.5, 1.0)
    seen_sign = np.ones(frequency.shape)
    if step == 2:
        seen_sign[:, 1] = -1
        weight[frequency[:, 0] == frequency[:, 1], 1] = 0.0
    ones = np.ones(signed.shape)
    analysis = np.stack([ones, -1j * ones * sign], axis=-1) * weight[:, :, None, None]
    synthesis = np.stack([ones, 1j * seen_sign[:, :, None] * sign], axis=-1)
    return signed % length, analysis, synthesis
