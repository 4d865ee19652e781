"""Norms from Gram matrices over positions, in double precision.

``|sum_t b_t (x) a_t|^2 = sum_{s,t} (a_s . a_t)(b_s . b_t)``. Where the terms nearly cancel, the sum keeps few correct
digits and could come out too small, which would break the sensitivity bound. In single precision that happens on ordinary
data: positions that look alike make the same rounding error, and errors that agree add up. In double precision they stay
below a known part of the value without any cancellation, ``(sum_t |a_t| |b_t|)^2``, which is added.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

#: What rounding can do, relative to the value without cancellation: 500 units in the last place of a double. It moves a
#: norm by more than 1e-6 only if that is below 2e-4 of the sum of its terms' lengths.
_ROUNDING = 500 * 2.0**-53
#: Gram matrices are formed for as many samples as fit into this, so that they stay in the processor's cache.
_BLOCK_BYTES = 4 * 2**20


def gram_norms(gram: Callable[[slice], Tensor], b: Tensor) -> Tensor:
    """Squared norms for each sample, in float64, never below those of the gradients that ``a`` and ``b`` stand for.

    Args:
        gram: the input's Gram matrices ``[m, positions, positions]`` for some samples, in float64; may be overwritten.
        b: derivatives ``[n, positions, out]``.
    """
    n, positions = b.shape[:2]
    squares = b.new_empty(n, dtype=torch.float64)
    block = max(1, _BLOCK_BYTES // max(1, positions * positions * 8))
    for start in range(0, n, block):
        rows = slice(start, min(start + block, n))
        part = b[rows].double()
        inputs, outputs = gram(rows), torch.bmm(part, part.transpose(1, 2))
        lengths = inputs.diagonal(dim1=1, dim2=2) * outputs.diagonal(dim1=1, dim2=2)
        full = lengths.clamp(min=0).sqrt().sum(1).square()
        squares[rows] = inputs.mul_(outputs).flatten(1).sum(1).clamp(min=0) + _ROUNDING * full
    return squares
