"""The shared primitive: a linear map applied at many positions of each sample.

Its per-sample gradient is ``sum_t b[i, t] (x) a[i, t]``. The squared norm is either that of this matrix, formed
explicitly, or ``sum_{s,t} (a_s . a_t)(b_s . b_t)`` from two Gram matrices over positions, whichever costs less; the
weighted sum is one matrix product over all samples and positions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Self

import torch
from torch import Tensor

from sluice.gradients import costs
from sluice.gradients.contributions import (
    Contribution,
    Tap,
    not_below_terms,
    row_lengths,
    squared_norms,
    squared_norms_of_products,
    sum_of_blocks,
    weighted,
    working,
    zero_rows,
)
from sluice.gradients.gram import gram, gram_norms
from sluice.gradients.native import kernels
from sluice.gradients.options import GradientOptions
from sluice.gradients.workspace import Lender

#: Gradients that are not kept are formed for as many samples as fit into this.
_BLOCK_BYTES = 8 * 2**20


def gram_is_cheaper(positions: int, outputs: int, inputs: int) -> bool:
    """The cost model, in multiply-adds for each sample: 3 T^2 (in + out) against T in out (docs/gradients.md)."""
    return costs.DOUBLE * positions * (inputs + outputs) < inputs * outputs


def product_lengths(a: Tensor, b: Tensor) -> Tensor:
    """``sum_t |a_t| |b_t|`` of each sample, ``[n]``, in float64; both are ``[n, positions, any]``."""
    lengths: Tensor = row_lengths(a) * row_lengths(b)
    return lengths.sum(1)


class LinearContribution(Contribution):
    """The weight of a linear map over positions.

    Args:
        parameter: weight of shape ``[out, in]`` (or whose ``rows`` have that shape).
        tap: the map's output (or anything from which ``view`` can take it).
        a: the map's input, ``[n, positions, in]``; any strides.
        view: brings the tap's gradient to ``[n, positions, out]``; any strides.
        strategy: "auto", "gram" or "explicit".
        options: performance only.
        lender: gives memory to gradients that are kept; None for new memory.
    """

    def __init__(
        self,
        parameter: Tensor,
        tap: Tap,
        a: Tensor,
        *,
        view: Callable[[Tensor], Tensor] = lambda gradient: gradient,
        rows: slice | None = None,
        strategy: str = "auto",
        options: GradientOptions = GradientOptions(),
        lender: Lender | None = None,
    ) -> None:
        super().__init__(parameter, rows=rows, lender=lender)
        self._options = options
        self._holds: list[object] = []
        self._pairs: list[tuple[Tap, Tensor, Callable[[Tensor], Tensor]]] = [(tap, a, view)]
        self._strategy = strategy
        self._gradients: Tensor | None = None
        self._ready: tuple[Tensor, Tensor] | None = None

    def holding(self, loan: object) -> Self:
        """Keep the loan from which the input or the tap's gradient has its memory."""
        self._holds.append(loan)
        return self

    def inputs_and_derivatives(self) -> tuple[Tensor, Tensor]:
        """``[n, positions, in]`` and ``[n, positions, out]``."""
        if self._ready is None:
            inputs = [working(a) for _, a, _ in self._pairs]
            gradients = [view(tap.gradient) for tap, _, view in self._pairs]
            dtype = torch.promote_types(inputs[0].dtype, gradients[0].dtype)
            a = inputs[0] if len(inputs) == 1 else torch.cat(inputs, 1)
            b = gradients[0] if len(gradients) == 1 else torch.cat(gradients, 1)
            self._ready = a.to(dtype), b.to(dtype)
        return self._ready

    def norms_squared(self, *, keep: bool) -> Tensor:
        a, b = self.inputs_and_derivatives()
        positions, inputs, outputs = a.shape[1], a.shape[2], b.shape[2]
        if positions == 1:
            return squared_norms_of_products(a, b)
        cheaper = gram_is_cheaper(positions, outputs, inputs)
        if self._strategy == "gram" or (self._strategy == "auto" and cheaper):
            return gram_norms(lambda rows: gram(a[rows]), lambda rows: gram(b[rows]), b)
        n, bytes_each = a.shape[0], inputs * outputs * a.element_size()
        formed = self.memory((n, inputs, outputs), a) if keep and n * bytes_each <= self._options.kept_bytes else None
        self._gradients = None if formed is None else formed.transpose(1, 2)
        squares = self._explicit_norms(a, b, formed, block=max(1, _BLOCK_BYTES // bytes_each))
        return squares if formed is not None else not_below_terms(squares, self.term_lengths())

    def _explicit_norms(self, a: Tensor, b: Tensor, formed: Tensor | None, *, block: int) -> Tensor:
        if self._options.compiled and kernels.available(a, b):
            return kernels.products(a, b, into=formed)[0]
        if formed is not None:
            return squared_norms(torch.bmm(a.transpose(1, 2), b, out=formed))
        starts = range(0, a.shape[0], block)
        return torch.cat([squared_norms(self.per_sample(slice(i, i + block))) for i in starts])

    def term_lengths(self) -> Tensor:
        return product_lengths(*self.inputs_and_derivatives())

    def per_sample(self, samples: slice) -> Tensor:
        a, b = self.inputs_and_derivatives()
        return torch.bmm(b[samples].transpose(1, 2), a[samples])

    def add_per_sample(self, samples: slice, *, into: Tensor, fresh: bool) -> None:
        a, b = self.inputs_and_derivatives()
        if fresh and self._options.compiled and kernels.available(a, b, into):
            kernels.products(b[samples], a[samples], into=into)
        else:
            super().add_per_sample(samples, into=into, fresh=fresh)

    def weighted_sum(self, weights: Tensor) -> Tensor:
        if self._gradients is not None:
            formed = self._gradients
            return sum_of_blocks(len(formed), lambda rows: weighted(formed[rows], weights[rows]))
        a, b = self.inputs_and_derivatives()
        scaled = b * weights.to(b.dtype).view(-1, 1, 1)

        def part(rows: slice) -> Tensor:
            return scaled[rows].reshape(-1, b.shape[2]).t() @ a[rows].reshape(-1, a.shape[2])

        return sum_of_blocks(len(a), part)

    def drop(self, samples: Tensor) -> None:
        a, b = self.inputs_and_derivatives()
        self._ready = zero_rows(a, samples), zero_rows(b, samples)
        if self._gradients is not None:
            self._gradients = zero_rows(self._gradients, samples)

    def merged(self, other: Contribution) -> Contribution | None:
        if not isinstance(other, LinearContribution):
            return None
        self._pairs.extend(other._pairs)
        self._holds.extend(other._holds)
        return self
