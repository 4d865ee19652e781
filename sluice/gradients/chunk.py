"""A chunk of a batch whose backward pass has run: norms first, then, if wanted, a weighted sum."""

from __future__ import annotations

import warnings
from collections.abc import Mapping

import torch
from torch import Tensor

from sluice._base.errors import InputError
from sluice.gradients.capture import Recording
from sluice.gradients.combine import combined

#: Norms beyond this count as infinite: weights that make such gradients small would be too small for single precision.
_LARGEST = 1e30


class NonFiniteGradientWarning(UserWarning):
    """Some sample has a gradient that is not finite. Which one is not told: that would be about the data."""


class Chunk:
    """Per-sample gradients of some samples.

    Attributes:
        samples: which samples of the batch these are. The forward pass may have had more rows, which only fill it up to
            its fixed shape; they are not part of the chunk.

    Guarantee:
        A sample whose gradient is NaN or infinite, or longer than 1e30, has a non-finite entry in `norms`
        and adds exactly zero to every weighted sum, whatever its weight. No other sample's values depend on it.
    """

    def __init__(
        self,
        recording: Recording,
        *,
        samples: slice,
        names: Mapping[Tensor, str],
        kept_bytes: int,
        keep: bool,
        device: torch.device,
        warn: bool = True,
    ) -> None:
        self.samples = samples
        self._names = names
        self._keep = keep
        self._size: int = samples.stop - samples.start
        self._rows = recording.batch_size
        self._device = device
        self._warn = warn
        self._contributions = combined(recording.release(), batch_size=recording.batch_size, block_bytes=kept_bytes)
        self._norms: Tensor | None = None

    def __len__(self) -> int:
        return self._size

    @property
    def norms(self) -> Tensor:
        """The norm of each sample's gradient over all trainable parameters, ``[len(self)]``, in float32 or float64."""
        if self._norms is None:
            with torch.no_grad(), torch.autocast(self._device.type, enabled=False):
                self._norms = self._compute_norms()
        return self._norms

    def _compute_norms(self) -> Tensor:
        total = torch.zeros(self._rows, dtype=torch.float64, device=self._device)
        dtype = torch.float32
        for contribution in self._contributions:
            dtype = torch.promote_types(dtype, contribution.parameter.dtype)
            total += contribution.norms_squared(keep=self._keep)
        norms = total.sqrt_().masked_fill_(total > _LARGEST, torch.inf).to(dtype)
        broken = ~torch.isfinite(norms)
        if bool(broken.any()):
            # A row that fills up repeats the first sample, so it is broken with it.
            if self._warn:
                warnings.warn(
                    "A sample's gradient is not finite; such samples get weight zero.",
                    NonFiniteGradientWarning,
                    stacklevel=3,
                )
            for contribution in self._contributions:
                contribution.drop(broken)
        return norms[: self._size]

    def add_weighted_sum(self, weights: Tensor, *, into: Mapping[str, Tensor]) -> None:
        """Add ``sum_i weights[i] * gradient_i`` to the accumulators, in place.

        Args:
            weights: one finite number per sample of this chunk.
            into: parameter name to accumulator, as `PerSampleGradients.zeros` gives them.
        """
        if weights.shape != (self._size,):
            raise InputError(
                f"weights of shape {tuple(weights.shape)} are not allowed: the chunk has {self._size} samples."
            )
        broken = ~torch.isfinite(self.norms)
        weights = weights.detach().masked_fill(broken, 0)
        if self._rows > self._size:
            weights = torch.cat([weights, weights.new_zeros(self._rows - self._size)])
        if not bool(torch.isfinite(weights).all()):
            raise InputError(
                "weights hold NaN or infinity, which is not allowed: every weight must be a finite number."
            )
        with torch.no_grad(), torch.autocast(self._device.type, enabled=False):
            for contribution in self._contributions:
                target = into[self._names[contribution.parameter]]
                part = target if contribution.rows is None else target[contribution.rows]
                contribution.add_weighted_sum(weights, into=part)
