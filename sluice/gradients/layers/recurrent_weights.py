"""Per-sample gradients of the weights of one direction of one recurrent layer.

Both weights share the pre-activation gradients ``d`` and the buffer ``[x | h]``, so their per-sample gradients
``[x | h]^T d`` are one batched product.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sluice.gradients.contributions import Contribution, Tap, squared_norms, zero_rows
from sluice.gradients.layers.recurrent_cells import Cell
from sluice.gradients.layers.recurrent_memory import Borrowed, Lengths
from sluice.gradients.native import kernels
from sluice.gradients.options import GradientOptions
from sluice.gradients.positions import LinearContribution

# Per-sample gradients that are not kept are formed in pieces that stay in a core's cache.
_PIECE_BYTES = 2**20


@dataclass(frozen=True, kw_only=True)
class SortedBatch:
    """A batch in the form in which recurrent layers run: time-major, longest sample first.

    ``to_sorted`` and ``to_original`` are the permutations of samples, None where the order is the same.
    """

    x: Tensor
    lengths: Lengths
    to_sorted: Tensor | None
    to_original: Tensor | None


def pick(tensor: Tensor, index: Tensor | None, axis: int = 0) -> Tensor:
    return tensor if index is None else tensor.index_select(axis, index)


class FusedGradients:
    """Per-sample gradients of ``weight_ih`` and ``weight_hh`` of one direction of one layer, transposed and fused.

    They are ``[n, in + state, gates * hidden]`` in the cell's own order of samples and columns.
    """

    def __init__(
        self, tap: Tap, direction: int, borrowed: Borrowed, cell: Cell, batch: SortedBatch, options: GradientOptions
    ) -> None:
        self._tap = tap
        self._borrowed = borrowed
        memory = borrowed.memory
        self._direction = direction
        self._inputs = memory.inputs[direction, :-1]
        self._cell = cell
        self._hidden = memory.hidden
        self._features = batch.x.shape[2]
        self._batch = batch
        self._options = options
        self._d: Tensor | None = None
        self._summed: Tensor | None = None
        self._kept: Tensor | None = None
        self._norms: dict[bool, Tensor] | None = None
        self._sum: tuple[Tensor, Tensor] | None = None

    def rows(self, state: bool) -> slice:
        return slice(self._features, None) if state else slice(0, self._features)

    def columns(self, state: bool) -> Tensor:
        order = self._cell.state_order if state else self._cell.input_order
        return self._cell.columns(order, self._hidden, self._inputs.device)

    @property
    def d(self) -> Tensor:
        """Pre-activation gradients, ``[time, n, gates * hidden]``."""
        if self._d is None:
            self._d = self._tap.gradient[self._direction]
        return self._d

    def _form(self, samples: slice, out: Tensor | None = None) -> Tensor:
        inputs, d = self._inputs[:, samples].permute(1, 2, 0), self.d[:, samples].transpose(0, 1)
        formed = torch.bmm(inputs, d) if out is None else torch.bmm(inputs, d, out=out)
        for state, block in self._unused:
            formed[:, self.rows(state), block * self._hidden : (block + 1) * self._hidden] = 0
        return formed

    @property
    def _unused(self) -> list[tuple[bool, int]]:
        """The GRU's new gate has one block for the input and one for the state; the other two are no one's."""
        orders = ((False, self._cell.input_order), (True, self._cell.state_order))
        return [(state, block) for state, order in orders for block in set(range(self._cell.gates)) - set(order)]

    def norms_squared(self, state: bool, *, keep: bool) -> Tensor:
        if self._norms is None:
            n, size = self.d.shape[1], self._inputs.shape[2] * self.d.shape[2] * self.d.element_size()
            if keep and n * size <= self._options.kept_bytes:
                shape = (n, self._inputs.shape[2], self.d.shape[2])
                self._kept = self._borrowed.memory.buffer(f"kept {self._direction}", *shape)
            if self._options.compiled and not self._unused and kernels.available(self._inputs, self.d):
                inputs, d = self._inputs.transpose(0, 1), self.d.transpose(0, 1)
                both = list(kernels.products(inputs, d, into=self._kept, split=self._features))
            elif self._kept is not None:
                self._form(slice(None), out=self._kept)
                both = [squared_norms(self._kept[:, self.rows(part)]) for part in (False, True)]
            else:
                both = self._norms_in_pieces(max(1, _PIECE_BYTES // max(1, size)))
            self._norms = {part: pick(both[part], self._batch.to_original) for part in (False, True)}
        return self._norms[state]

    def _norms_in_pieces(self, piece: int) -> list[Tensor]:
        n = self.d.shape[1]
        buffer = self.d.new_empty(min(piece, n), self._inputs.shape[2], self.d.shape[2])
        both = [self.d.new_empty(n, dtype=torch.float64) for _ in range(2)]
        for start in range(0, n, piece):
            samples = slice(start, min(start + piece, n))
            formed = self._form(samples, out=buffer[: samples.stop - start])
            for part in (False, True):
                both[part][samples] = squared_norms(formed[:, self.rows(part)])
        return both

    def per_sample(self, state: bool, samples: slice) -> Tensor:
        formed = self._form(slice(None)) if self._kept is None else self._kept
        order = self._batch.to_original
        chosen = formed[samples] if order is None else formed[order[samples]]
        return chosen[:, self.rows(state)].index_select(2, self.columns(state)).transpose(1, 2)

    def weighted_sum(self, state: bool, weights: Tensor) -> Tensor:
        if self._sum is None or self._sum[0] is not weights:
            self._sum = weights, self._fused_sum(pick(weights.to(self.d.dtype), self._batch.to_sorted))
        return self._sum[1][self.rows(state)].index_select(1, self.columns(state)).t()

    def _fused_sum(self, weights: Tensor) -> Tensor:
        if self._kept is not None:
            return (weights @ self._kept.flatten(1)).view(self._kept.shape[1:])
        inputs, d = self._inputs, self.d
        if inputs.shape[2] <= d.shape[2]:
            inputs = inputs * weights.view(1, -1, 1)
        else:
            d = d * weights.view(1, -1, 1)
        return inputs.flatten(0, 1).t() @ d.flatten(0, 1)

    def drop(self, samples: Tensor) -> None:
        mask = pick(samples, self._batch.to_sorted)
        self._d = self.d.masked_fill(mask.view(1, -1, 1), 0)
        self._inputs = self._inputs.masked_fill(mask.view(1, -1, 1), 0)
        if self._kept is not None:
            self._kept = zero_rows(self._kept, mask)
        self._norms = self._sum = None

    def bias_gradients(self, state: bool) -> Tensor:
        """Per-sample gradients of ``bias_ih`` or ``bias_hh``, in the batch's order of samples."""
        if self._summed is None:
            self._summed = pick(self._tap.gradient[self._direction].sum(0), self._batch.to_original)
        return self._summed.index_select(1, self.columns(state))

    def as_linear(self, parameter: Tensor, state: bool, strategy: str) -> LinearContribution:
        """The same gradients as those of an ordinary linear map over time."""
        columns, to_original, direction = self.columns(state), self._batch.to_original, self._direction
        return LinearContribution(
            parameter,
            self._tap,
            pick(self._inputs[..., self.rows(state)].transpose(0, 1), to_original),
            view=lambda d: pick(d[direction].transpose(0, 1), to_original).index_select(2, columns),
            strategy=strategy,
            options=self._options,
        ).holding(self._borrowed)


class FusedContribution(Contribution):
    """``weight_ih`` (``state=False``) or ``weight_hh`` (``state=True``), from what both share."""

    def __init__(self, parameter: Tensor, shared: FusedGradients, *, state: bool) -> None:
        super().__init__(parameter)
        self._shared = shared
        self._state = state

    def norms_squared(self, *, keep: bool) -> Tensor:
        return self._shared.norms_squared(self._state, keep=keep)

    def per_sample(self, samples: slice) -> Tensor:
        return self._shared.per_sample(self._state, samples)

    def weighted_sum(self, weights: Tensor) -> Tensor:
        return self._shared.weighted_sum(self._state, weights)

    def drop(self, samples: Tensor) -> None:
        self._shared.drop(samples)

    def merged(self, other: Contribution) -> Contribution | None:
        if isinstance(other, FusedContribution):
            other = other._shared.as_linear(other.parameter, other._state, "auto")
        return self._shared.as_linear(self.parameter, self._state, "auto").merged(other)
