"""Norms from Gram matrices over positions, with a guard against cancellation.

``|sum_t b_t (x) a_t|^2 = sum_{s,t} (a_s . a_t)(b_s . b_t)``. Where the terms nearly cancel, the sum keeps few correct
digits and could come out too small, which would break the sensitivity bound. Its size without any cancellation,
``(sum_t |a_t| |b_t|)^2``, is read off the two diagonals; samples that fall far below it are formed explicitly.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from sluice.gradients.contributions import squared_norms

#: Terms of random signs leave a share of about 1 / positions of the value without cancellation, and a rounding error
#: that is smaller still by the precision. Samples with less than this part of that share are formed explicitly, which
#: keeps the error of norms near 1e-6.
_CANCELLED = 0.05
#: Gram matrices are formed for as many samples as fit into this, so that they stay in the processor's cache.
_BLOCK_BYTES = 4 * 2**20


def gram_norms(gram: Callable[[slice], Tensor], b: Tensor, per_sample: Callable[[slice], Tensor]) -> Tensor:
    """Squared norms for each sample.

    Args:
        gram: the input's Gram matrices ``[m, positions, positions]`` for some samples; may be overwritten.
        b: derivatives ``[n, positions, out]``.
        per_sample: the gradients themselves for some samples, for the rare ones that cancel.
    """
    n, positions = b.shape[:2]
    out = b.new_empty(n)
    block = max(1, _BLOCK_BYTES // max(1, positions * positions * b.element_size()))
    for start in range(0, n, block):
        rows = slice(start, min(start + block, n))
        part = b[rows]
        inputs, outputs = gram(rows), torch.bmm(part, part.transpose(1, 2))
        diagonals = inputs.diagonal(dim1=1, dim2=2) * outputs.diagonal(dim1=1, dim2=2)
        full = diagonals.clamp(min=0).sqrt().sum(1).square()
        squares = inputs.mul_(outputs).flatten(1).sum(1)
        for i in torch.nonzero(squares < _CANCELLED / positions * full).flatten().tolist():
            squares[i] = squared_norms(per_sample(slice(start + i, start + i + 1)))[0]
        out[rows] = squares
    return out
