"""Per-sample gradients of the weights of one direction of one recurrent layer.

Both weights share the pre-activation gradients ``d`` and the buffer ``[x | h]``, so their per-sample gradients
``[x | h]^T d`` are one batched product. A GRU's input and state each have no part in one block of ``d``: theirs are two.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from sluice.gradients.contributions import Contribution, Tap, not_below_terms, squared_norms, zero_rows
from sluice.gradients.layers.recurrent_cells import Cell
from sluice.gradients.layers.recurrent_memory import Borrowed, Lengths
from sluice.gradients.native import kernels
from sluice.gradients.options import GradientOptions
from sluice.gradients.positions import LinearContribution, product_lengths

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

    They are parts of ``[n, in + state, gates * hidden]`` in the cell's own order of samples and columns, formed by one
    product or by two: see ``_products``.
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
        self._products = self._needed_products()
        self._kept: list[Tensor] | None = None
        self._norms: dict[bool, Tensor] | None = None
        self._sums: tuple[Tensor, list[Tensor]] | None = None

    def rows(self, state: bool) -> slice:
        return slice(self._features, None) if state else slice(0, self._features)

    def columns(self, state: bool) -> Tensor:
        return self._cell.columns(self._order(state), self._hidden, self._inputs.device)

    def _order(self, state: bool) -> tuple[int, ...]:
        return self._cell.state_order if state else self._cell.input_order

    def _needed_products(self) -> list[tuple[slice, slice]]:
        """Rows and columns of the products that are formed: one for both weights if both use all columns."""
        if set(self._cell.input_order) == set(self._cell.state_order):
            return [(slice(None), slice(None))]
        used = [(min(self._order(part)), max(self._order(part)) + 1) for part in (False, True)]
        columns = [slice(first * self._hidden, end * self._hidden) for first, end in used]
        return [(self.rows(part), columns[part]) for part in (False, True)]

    def _part(self, formed: list[Tensor], state: bool) -> Tensor:
        """One weight's part of what the products gave, ``[..., rows, columns]``, in PyTorch's order, transposed."""
        if len(formed) == 1:
            return formed[0][..., self.rows(state), :].index_select(-1, self.columns(state))
        return formed[state].index_select(-1, self.columns(state) - self._products[state][1].start)

    @property
    def d(self) -> Tensor:
        """Pre-activation gradients, ``[time, n, gates * hidden]``."""
        if self._d is None:
            self._d = self._tap.gradient[self._direction]
        return self._d

    def _operands(self) -> list[tuple[Tensor, Tensor]]:
        """Inputs and pre-activation gradients of each product, ``[time, n, ...]``."""
        return [(self._inputs[..., rows], self.d[..., columns]) for rows, columns in self._products]

    def norms_squared(self, state: bool, *, keep: bool) -> Tensor:
        if self._norms is None:
            operands, n = self._operands(), self.d.shape[1]
            shapes = [(inputs.shape[2], d.shape[2]) for inputs, d in operands]
            size = self.d.element_size() * sum(rows * columns for rows, columns in shapes)
            if keep and n * size <= self._options.kept_bytes:
                name, memory = f"kept {self._direction}", self._borrowed.memory
                self._kept = [memory.buffer(f"{name} {i}", n, *shape) for i, shape in enumerate(shapes)]
            into: list[Tensor | None] = [*self._kept] if self._kept is not None else [None] * len(operands)
            compiled = self._options.compiled and kernels.available(self._inputs, self.d)
            norms = _compiled_norms if compiled else partial(_norms_in_pieces, max(1, _PIECE_BYTES // max(1, size)))
            split = self._features if len(operands) == 1 else None
            both = [
                squares
                for (inputs, d), kept in zip(operands, into, strict=True)
                for squares in norms(inputs.transpose(0, 1), d.transpose(0, 1), kept, split)
            ]
            if self._kept is None:
                both = [not_below_terms(both[part], self._term_lengths(part)) for part in (False, True)]
            self._norms = {part: pick(both[part], self._batch.to_original) for part in (False, True)}
        return self._norms[state]

    def term_lengths(self, state: bool) -> Tensor:
        return pick(self._term_lengths(state), self._batch.to_original)

    def _term_lengths(self, state: bool) -> Tensor:
        """In the cell's own order of samples."""
        product = self._products[state if len(self._products) > 1 else 0]
        return product_lengths(
            self._inputs[..., self.rows(state)].transpose(0, 1), self.d[..., product[1]].transpose(0, 1)
        )

    def per_sample(self, state: bool, samples: slice) -> Tensor:
        formed = self._kept or [torch.bmm(a.permute(1, 2, 0), d.transpose(0, 1)) for a, d in self._operands()]
        order = self._batch.to_original
        chosen = [each[samples] if order is None else each[order[samples]] for each in formed]
        return self._part(chosen, state).transpose(1, 2)

    def weighted_sum(self, state: bool, weights: Tensor) -> Tensor:
        if self._sums is None or self._sums[0] is not weights:
            self._sums = weights, self._fused_sums(pick(weights.to(self.d.dtype), self._batch.to_sorted))
        return self._part(self._sums[1], state).t()

    def _fused_sums(self, weights: Tensor) -> list[Tensor]:
        if self._kept is not None:
            return [(weights @ kept.flatten(1)).view(kept.shape[1:]) for kept in self._kept]
        by_sample = weights.view(1, -1, 1)
        sums = []
        for inputs, d in self._operands():
            few = inputs.shape[2] <= d.shape[2]
            inputs, d = (inputs * by_sample, d) if few else (inputs, d * by_sample)
            sums.append(inputs.flatten(0, 1).t() @ d.flatten(0, 1))
        return sums

    def drop(self, samples: Tensor) -> None:
        mask = pick(samples, self._batch.to_sorted)
        self._d = self.d.masked_fill(mask.view(1, -1, 1), 0)
        self._inputs = self._inputs.masked_fill(mask.view(1, -1, 1), 0)
        if self._kept is not None:
            self._kept = [zero_rows(kept, mask) for kept in self._kept]
        self._norms = self._sums = None

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


def _compiled_norms(inputs: Tensor, d: Tensor, into: Tensor | None, split: int | None) -> list[Tensor]:
    """Squared norms of ``inputs_i^T d_i``, those of its first rows apart from those of the others where it is split."""
    return list(kernels.products(inputs, d, into=into, split=split))


def _norms_in_pieces(piece: int, inputs: Tensor, d: Tensor, into: Tensor | None, split: int | None) -> list[Tensor]:
    """The same by torch operations, for some samples at a time."""
    n, shape = inputs.shape[0], (inputs.shape[2], d.shape[2])
    buffer = d.new_empty(min(piece, n), *shape) if into is None else into
    parts = [slice(None)] if split is None else [slice(0, split), slice(split, None)]
    squares = [d.new_empty(n, dtype=torch.float64) for _ in parts]
    for start in range(0, n, piece):
        samples = slice(start, min(start + piece, n))
        out = buffer[: samples.stop - start] if into is None else buffer[samples]
        torch.bmm(inputs[samples].transpose(1, 2), d[samples], out=out)
        for part, each in zip(parts, squares, strict=True):
            each[samples] = squared_norms(out[:, part])
    return squares


class FusedContribution(Contribution):
    """``weight_ih`` (``state=False``) or ``weight_hh`` (``state=True``), from what both share."""

    def __init__(self, parameter: Tensor, shared: FusedGradients, *, state: bool) -> None:
        super().__init__(parameter)
        self._shared = shared
        self._state = state

    def norms_squared(self, *, keep: bool) -> Tensor:
        return self._shared.norms_squared(self._state, keep=keep)

    def term_lengths(self) -> Tensor:
        return self._shared.term_lengths(self._state)

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
