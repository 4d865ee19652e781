"""The scattering transform of images: wavelet moduli of order 0, 1 and 2, averaged over 4x4 pixels.

It has no parameters and is computed for each image alone, so it costs no privacy.
"""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor, nn

from sluice._base import validate
from sluice._base.errors import InputError
from sluice.features.batches import single_threads
from sluice.features.filters import ANGLES, SCALES, wavelet_spectra
from sluice.features.native.kernels import NativeScattering, library, workable
from sluice.features.spectral import BandPass, LowPass, Workspace, reflection

COEFFICIENTS = 1 + SCALES * ANGLES + ANGLES * ANGLES
"""Output channels for each input channel: 1 of order 0, 16 of order 1 and 64 of order 2."""

_CELL: int = 2**SCALES

# Every chunk is filled up to one shape, a multiple of this many planes. Matrix products then treat every plane alike,
# whatever its place and however many others there are; with a ragged end, the last planes would be rounded differently.
_LANES = 48

_PLANES_WORTH_A_THREAD = 32


class Scattering(nn.Module):
    """Scattering coefficients at two scales and eight angles, up to order two.

    ``(..., height, width)`` becomes ``(..., 81, height // 4, width // 4)``, and with a channel dimension,
    ``(samples, channels, height, width)`` becomes ``(samples, channels * 81, height // 4, width // 4)``. The channels
    are in the order: the average; 8 angles at scale 0, 8 at scale 1; then the 64 pairs (angle at scale 0, angle at
    scale 1), the second angle counting fastest.

    It runs in C where that can be built (float32, on the processor) unless ``in_c`` is False, else by matrix products, on as many threads as PyTorch is
    set to use. In C a thread needs about 2 MB beyond input and output; matrix products take ``chunk_size`` planes at a time,
    each about 0.3 MB (28x28 pixels). No gradient is recorded.

    Guarantee:
        Each image's coefficients depend on that image alone: bit for bit in C; by matrix products bit for bit where the
        machine's product treats all columns alike, otherwise to within rounding (1e-6). A NaN in one image does not reach
        another. So it costs no privacy, and adjacent data sets stay adjacent.
    """

    def __init__(
        self,
        *,
        height: int,
        width: int,
        chunk_size: int = 96,
        dtype: torch.dtype = torch.float32,
        in_c: bool = True,
    ) -> None:
        super().__init__()
        validate.positive_integer(height=height, width=width, chunk_size=chunk_size)
        if min(height, width) < _CELL:
            raise InputError(
                f"height={height}, width={width} is not allowed: each must be at least {_CELL} pixels. "
                "Enlarge or pad the images first."
            )
        if dtype not in (torch.float32, torch.float64):
            raise InputError(f"dtype={dtype} is not allowed: it must be torch.float32 or torch.float64.")
        self.height, self.width, self.chunk_size = height, width, chunk_size
        padded = _padded(height), _padded(width)
        padding = reflection(height, padded[0]), reflection(width, padded[1])
        fine, coarse = (wavelet_spectra(*padded, scale=scale) for scale in range(SCALES))
        self.fine_waves = BandPass(spectra=fine, step=1, padding=padding, dtype=dtype)
        self.coarse_waves = BandPass(spectra=coarse, step=2, padding=padding, dtype=dtype)
        self.waves_of_waves = BandPass(spectra=coarse, step=2, dtype=dtype)
        self.average_image = LowPass(padded=padded, level=0, padding=padding, dtype=dtype)
        self.average_fine = LowPass(padded=padded, level=0, dtype=dtype)
        self.average_coarse = LowPass(padded=padded, level=1, dtype=dtype)
        self._in_c = NativeScattering(size=(height, width), fine=fine, coarse=coarse) if in_c else None

    @property
    def output_size(self) -> tuple[int, int]:
        return self.height // _CELL, self.width // _CELL

    @torch.no_grad()
    def forward(self, images: Tensor) -> Tensor:
        dtype = self.average_image.rows.dtype
        if images.dtype != dtype:
            raise InputError(
                f"images.dtype={images.dtype} is not allowed: it must be {dtype}. "
                f"Convert them first, for 8-bit images by images.to({dtype}) / 255."
            )
        if images.dim() < 2 or images.shape[-2:] != (self.height, self.width):
            raise InputError(
                f"images.shape={tuple(images.shape)} is not allowed: the last two dimensions must be "
                f"({self.height}, {self.width}), the size for which this transform was made."
            )
        planes = images.reshape(math.prod(images.shape[:-2]), self.height, self.width)
        coefficients = planes.new_empty(planes.shape[0], COEFFICIENTS, *self.output_size)
        if planes.shape[0] > 0:
            if self._in_c is not None and workable(coefficients) and library() is not None:
                self._by_kernel(self._in_c, planes.contiguous(), coefficients)
            else:
                self._by_products(planes, coefficients)
        return coefficients.view(_output_shape(images.shape, self.output_size))

    def _by_kernel(self, kernel: NativeScattering, planes: Tensor, coefficients: Tensor) -> None:
        threads = min(torch.get_num_threads(), -(-len(planes) // _PLANES_WORTH_A_THREAD))
        if threads == 1:
            kernel(planes, into=coefficients)
            return
        with ThreadPoolExecutor(threads) as workers:
            shares = zip(planes.tensor_split(threads), coefficients.tensor_split(threads), strict=True)
            for done in [workers.submit(kernel, part, into=into) for part, into in shares]:
                done.result()

    def _by_products(self, planes: Tensor, coefficients: Tensor) -> None:
        chunks = list(zip(planes.split(self.chunk_size), coefficients.split(self.chunk_size), strict=True))
        threads = torch.get_num_threads() if planes.device.type == "cpu" else 1
        if threads == 1:
            self._transform_all(chunks)
            return
        with single_threads(threads) as workers:
            for done in [workers.submit(self._transform_all, chunks[worker::threads]) for worker in range(threads)]:
                done.result()

    @torch.no_grad()
    def _transform_all(self, chunks: list[tuple[Tensor, Tensor]]) -> None:
        workspace = Workspace(self.average_image.rows)
        for planes, coefficients in chunks:
            self._transform(planes, workspace, into=coefficients)

    def _transform(self, planes: Tensor, workspace: Workspace, *, into: Tensor) -> None:
        samples = -(-self.chunk_size // _LANES) * _LANES
        image = planes.new_zeros(self.height, self.width, samples)
        image[:, :, : planes.shape[0]] = planes.permute(1, 2, 0)
        coefficients = workspace.take("coefficients", COEFFICIENTS, *self.output_size, samples)
        order_0, fine_order_1, coarse_order_1, order_2 = coefficients.split([1, ANGLES, ANGLES, ANGLES * ANGLES])
        self.average_image(image[None], workspace, into=order_0)
        self.average_coarse(self.coarse_waves(image, workspace, "coarse"), workspace, into=coarse_order_1)
        fine = self.fine_waves(image, workspace, "fine")
        self.average_fine(fine, workspace, into=fine_order_1)
        for wave, pairs in zip(fine, order_2.split(ANGLES), strict=True):
            self.average_coarse(self.waves_of_waves(wave, workspace, "coarse"), workspace, into=pairs)
        into.view(planes.shape[0], -1).copy_(coefficients.view(-1, samples).t()[: planes.shape[0]])


def _padded(length: int) -> int:
    """Room for a cell on either side, and a whole number of cells."""
    return (length // _CELL + 2) * _CELL


def _output_shape(shape: torch.Size, output_size: tuple[int, int]) -> tuple[int, ...]:
    if len(shape) == 4:
        return (shape[0], shape[1] * COEFFICIENTS, *output_size)
    return (*shape[:-2], COEFFICIENTS, *output_size)
