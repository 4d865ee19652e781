"""Norms from Gram matrices over positions, in double precision.

``|sum_t b_t (x) a_t|^2 = sum_{s,t} (a_s . a_t)(b_s . b_t)``. Where the terms nearly cancel, the sum keeps few correct
digits and could come out too small, which would break the sensitivity bound. In single precision that happens on ordinary
data: positions that look alike make the same rounding error, and errors that agree add up. In double precision they stay
below a known part of the value without any cancellation, ``(sum_t |a_t| |b_t|)^2``, which is added.

Whoever takes norms this way adds up terms, and not gradients: see `not_below_terms`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from sluice.gradients.contributions import not_below_terms

#: What rounding can do, relative to the value without cancellation: 500 units in the last place of a double. It moves a
#: norm by more than 1e-6 only if that is below 2e-4 of the sum of its terms' lengths.
_ROUNDING = 500 * 2.0**-53
#: Gram matrices are formed for as many samples as fit into this, so that they stay in the processor's cache.
_BLOCK_BYTES = 4 * 2**20


def gram(rows: Tensor) -> Tensor:
    """Inner products of all pairs of positions, ``[n, positions, positions]``, in float64."""
    exact = rows.double()
    return torch.bmm(exact, exact.transpose(1, 2))


def gram_norms(inputs: Callable[[slice], Tensor], outputs: Callable[[slice], Tensor], b: Tensor) -> Tensor:
    """Squared norms for each sample, in float64, never below those of the gradients that ``a`` and ``b`` stand for.

    Args:
        inputs: the inputs' Gram matrices ``[m, positions, positions]`` for some samples, in float64; may be overwritten.
        outputs: the same for the derivatives.
        b: derivatives ``[n, positions, out]``: how large a sample is.
    """
    n, positions, width = b.shape
    squares = b.new_empty(n, dtype=torch.float64)
    block = max(1, _BLOCK_BYTES // max(1, positions * max(positions, width) * 8))
    for start in range(0, n, block):
        rows = slice(start, min(start + block, n))
        first, second = inputs(rows), outputs(rows)
        lengths = first.diagonal(dim1=1, dim2=2) * second.diagonal(dim1=1, dim2=2)
        full = lengths.clamp(min=0).sqrt().sum(1)
        exact = first.mul_(second).flatten(1).sum(1).clamp(min=0) + _ROUNDING * full.square()
        squares[rows] = not_below_terms(exact, full)
    return squares
