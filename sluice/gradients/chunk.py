"""A chunk of a batch whose backward pass has run: norms first, then, if wanted, a weighted sum."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, MutableMapping, Sequence

import torch
from torch import Tensor

from sluice._base.errors import InputError
from sluice.gradients.capture import Recording
from sluice.gradients.combine import combined
from sluice.gradients.contributions import full_precision

#: Norms beyond this count as infinite: weights that make such gradients small would be too small for single precision.
_LARGEST = 1e30


class NonFiniteGradientWarning(UserWarning):
    """Some sample has a gradient that is not finite. Which one is not told: that would be about the data."""


class Chunk:
    """Per-sample gradients of some samples.

    Args:
        recordings: forward passes of the same samples in the same rows; gradients are added up before norms are taken.

    Attributes:
        samples: which samples of the batch these are. The forward pass may have had more rows, which only fill it up to
            its fixed shape; they are not part of the chunk.

    Guarantee:
        A sample whose gradient is NaN or infinite, or longer than 1e30, has a non-finite entry in `norms`
        and adds exactly zero to every weighted sum, whatever its weight. No other sample's values depend on it.
    """

    def __init__(
        self,
        *recordings: Recording,
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
        self._rows = recordings[0].batch_size
        self._device = device
        self._warn = warn
        contributions = [each for recording in recordings for each in recording.release()]
        self._contributions = combined(contributions, batch_size=self._rows, kept_bytes=kept_bytes)
        self._norms: Tensor | None = None
        self._broken: Tensor | None = None
        self._squares: list[Tensor] = []

    def __len__(self) -> int:
        return self._size

    @property
    def norms(self) -> Tensor:
        """The norm of each sample's gradient over all trainable parameters, ``[len(self)]``, in float32 or float64."""
        if self._norms is None:
            with torch.no_grad(), full_precision(self._device):
                self._norms = self._compute_norms()
        return self._norms

    def _compute_norms(self) -> Tensor:
        dtype = torch.float32
        for contribution in self._contributions:
            dtype = torch.promote_types(dtype, contribution.parameter.dtype)
            squares = contribution.norms_squared(keep=self._keep)
            self._squares.append(squares.double().clone())  # it may be a buffer that the next contribution uses again
        norms = self._total_of(self._squares).sqrt_()
        if norms.numel() == 0 or float(norms.amax()) <= _LARGEST:
            return norms.to(dtype)[: self._size]
        norms = norms.masked_fill_(norms > _LARGEST, torch.inf).to(dtype)
        self._broken = ~torch.isfinite(norms)
        # A row that fills up repeats the first sample, so it is broken with it.
        if self._warn:
            warnings.warn(
                "A sample's gradient is not finite; such samples get weight zero.",
                NonFiniteGradientWarning,
                stacklevel=3,
            )
        for contribution in self._contributions:
            contribution.drop(self._broken)
        return norms[: self._size]

    def _total_of(self, squares: Sequence[Tensor]) -> Tensor:
        """The sum of some of the contributions' squares, in new memory."""
        if not squares:
            return torch.zeros(self._rows, dtype=torch.float64, device=self._device)
        first, *others = squares
        total = first + others[0] if others else first.clone()
        for each in others[1:]:
            total += each
        return total

    def _broken_rows(self) -> Tensor | None:
        """Which rows have a gradient that is not finite; None where all are."""
        _ = self.norms
        return self._broken

    def norms_by_layer(self) -> dict[str, Tensor]:
        """The norm of each sample's gradient over the parameters of one layer, ``[len(self)]``, by the layer's name.

        A layer is a module that holds trainable parameters itself; the model's own name is "". Their squares add up to
        those of `norms`. A sample whose gradient is not finite in one layer counts as infinite in all of them.
        """
        broken, size = self._broken_rows(), self._size
        of_layer: dict[str, list[Tensor]] = {layer_of(name): [] for name in self._names.values()}
        for contribution, squares in zip(self._contributions, self._squares, strict=True):
            of_layer[layer_of(self._names[contribution.parameter])].append(squares)
        norms = {layer: self._total_of(squares)[:size].sqrt_() for layer, squares in of_layer.items()}
        if broken is not None:
            norms = {layer: each.masked_fill(broken[:size], torch.inf) for layer, each in norms.items()}
        return {layer: each.to(self.norms.dtype) for layer, each in norms.items()}

    def add_weighted_sum(self, weights: Tensor | Mapping[str, Tensor], *, into: MutableMapping[str, Tensor]) -> None:
        """Add ``sum_i weights[i] * gradient_i`` to the accumulators, in place.

        Args:
            weights: one finite number per sample of this chunk; or such weights for each layer, by the names that
                `norms_by_layer` has.
            into: parameter name to accumulator, as `PerSampleGradients.zeros` gives them. One that is missing counts as
                zero, and is put there if the chunk has something to add: the first sum need not be added to zeros.
        """
        layers = {layer_of(name) for name in self._names.values()}
        if isinstance(weights, Tensor):
            by_layer = dict.fromkeys(layers, self._usable(weights))
        elif set(weights) != layers:
            raise InputError(
                f"weights for the layers {sorted(weights)} are not allowed: give them for {sorted(layers)}, as norms_by_layer "
                "does."
            )
        else:
            by_layer = {layer: self._usable(each) for layer, each in weights.items()}
        with torch.no_grad(), full_precision(self._device):
            for contribution in self._contributions:
                name = self._names[contribution.parameter]
                layer_weights = by_layer[layer_of(name)]
                if name not in into and contribution.rows is None:
                    into[name] = as_accumulator(contribution.weighted_sum(layer_weights), contribution.parameter)
                    continue
                target = into.get(name)
                if target is None:
                    target = into[name] = empty_accumulator(contribution.parameter)
                part = target if contribution.rows is None else target[contribution.rows]
                contribution.add_weighted_sum(layer_weights, into=part)

    def _usable(self, weights: Tensor) -> Tensor:
        """The weights of all rows: zero for samples whose gradient is not finite, and for rows that only fill up."""
        if weights.shape != (self._size,):
            raise InputError(
                f"weights of shape {tuple(weights.shape)} are not allowed: the chunk has {self._size} samples."
            )
        weights, broken = weights.detach(), self._broken_rows()
        if broken is not None:
            weights = weights.masked_fill(broken[: self._size], 0)
        if len(weights) and not all(math.isfinite(end) for end in torch.aminmax(weights)):
            raise InputError(
                "weights hold NaN or infinity, which is not allowed: every weight must be a finite number."
            )
        if self._rows > self._size:
            weights = torch.cat([weights, weights.new_zeros(self._rows - self._size)])
        return weights


def empty_accumulator(parameter: Tensor) -> Tensor:
    """A sum of no gradients of a parameter, at least float32."""
    dtype = torch.promote_types(parameter.dtype, torch.float32)
    return torch.zeros(parameter.shape, dtype=dtype, device=parameter.device)


def as_accumulator(gradient: Tensor, parameter: Tensor) -> Tensor:
    """A sum of gradients of a parameter, as more can be added to it."""
    dtype = torch.promote_types(parameter.dtype, torch.float32)
    return gradient.to(dtype).reshape(parameter.shape).contiguous()


def layer_of(parameter: str) -> str:
    """The name of the module that holds a parameter."""
    return parameter.rpartition(".")[0]
