"""Gradients of something computed from parameters alone, brought back to the parameters."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sluice.gradients.contributions import Contribution, squared_norms, sum_of_blocks, zero_rows
from sluice.mechanism.rounding_error import CHUNK_ROWS

#: Gradients are brought back for as many samples as fit into this.
_BLOCK_BYTES = 16 * 2**20


@dataclass(frozen=True, kw_only=True)
class Root:
    """A parameter, and the leaf that stands for it in the graph of what is computed from parameters."""

    parameter: Tensor
    name: str
    leaf: Tensor


@dataclass(frozen=True, kw_only=True)
class Value:
    """A tensor computed from parameters alone.

    Attributes:
        tensor: has autograd's graph back to the leaves of ``roots``.
        scale: if bringing any gradient back changes its norm by one factor only (views, transposes, distinct rows), that
            factor; else None.
    """

    tensor: Tensor
    roots: tuple[Root, ...]
    scale: float | None

    @property
    def is_parameter(self) -> bool:
        return self.tensor is self.roots[0].leaf

    @property
    def plain(self) -> Tensor:
        return self.tensor.detach()

    @property
    def names(self) -> set[str]:
        return {root.name for root in self.roots}

    def derived(self, tensor: Tensor) -> Value:
        """The same numbers in another arrangement."""
        return Value(tensor=tensor, roots=self.roots, scale=self.scale)


class PulledBack(Contribution):
    """What a contribution to a `Value` is for one of the parameters it was computed from.

    The way back is linear and the same for all samples, but only where it changes lengths by one factor may a weighted sum be
    brought back as one gradient. Elsewhere it can take away nearly all of a sample's gradient (a mean that is taken off,
    say), and what the norm does not show would round others away in the sum.

    Args:
        inner: per-sample gradients of the value; its ``parameter`` is the value's tensor.
        batch_size: number of samples.
    """

    def __init__(self, root: Root, inner: Contribution, value: Value, *, batch_size: int) -> None:
        super().__init__(root.parameter)
        self._root = root
        self._inner = inner
        self._value = value
        self._batch_size = batch_size
        # Short floats would round a sum on the way back otherwise than the gradients whose norms were taken.
        exact = {value.tensor.dtype, root.parameter.dtype} <= {torch.float32, torch.float64}
        self._scale = value.scale if exact else None
        self._gradients: Tensor | None = None

    def norms_squared(self, *, keep: bool) -> Tensor:
        if self._scale is not None:
            return self._inner.norms_squared(keep=keep).double() * self._scale**2
        blocks = self._blocks()
        if keep and len(blocks) == 1:
            self._gradients = self.per_sample(blocks[0])
        return torch.cat([squared_norms(self.per_sample(rows)) for rows in blocks])

    def per_sample(self, samples: slice) -> Tensor:
        if self._gradients is not None:
            return self._gradients[samples]
        gradients = self._inner.per_sample(samples)
        if gradients.shape[0] == 0:
            return gradients.new_zeros(0, *self.parameter.shape)
        return self._back(gradients.reshape(gradients.shape[0], *self._value.tensor.shape), batched=True)

    def weighted_sum(self, weights: Tensor) -> Tensor:
        if self._scale is not None:
            total = sum_of_blocks(len(weights), lambda rows: self._inner.weighted_sum(_only(weights, rows)))
            return self._back(total.reshape(self._value.tensor.shape), batched=False)
        parts = []
        for rows in self._blocks():
            gradients = self.per_sample(rows)
            parts.append(torch.tensordot(weights[rows].to(gradients.dtype), gradients, dims=1))
        return torch.stack(parts).sum(0)

    def term_lengths(self) -> Tensor:
        return self._inner.term_lengths() * self._scale if self._scale is not None else super().term_lengths()

    def drop(self, samples: Tensor) -> None:
        self._inner.drop(samples)
        if self._gradients is not None:
            self._gradients = zero_rows(self._gradients, samples)

    def merged(self, other: Contribution) -> Contribution | None:
        if not isinstance(other, PulledBack) or other._value.tensor is not self._value.tensor:
            return None
        if len(self._value.roots) > 1:
            return None  # the contributions inside are shared with those to the other parameters
        inner = self._inner.merged(other._inner)
        return None if inner is None else PulledBack(self._root, inner, self._value, batch_size=self._batch_size)

    def _back(self, gradients: Tensor, *, batched: bool) -> Tensor:
        value, leaf = self._value.tensor, self._root.leaf
        with torch.enable_grad():
            (found,) = torch.autograd.grad(
                value,
                leaf,
                gradients.to(value.dtype),
                retain_graph=True,
                allow_unused=True,
                is_grads_batched=batched,
            )
        if found is None:
            shape = (gradients.shape[0], *leaf.shape) if batched else leaf.shape
            found = torch.zeros(shape, dtype=leaf.dtype, device=leaf.device)
        result: Tensor = found.detach()
        return result.float() if result.dtype in (torch.bfloat16, torch.float16) else result

    def _blocks(self) -> list[slice]:
        each = 4 * max(self._root.parameter.numel(), self._value.tensor.numel())
        block = max(1, min(CHUNK_ROWS, _BLOCK_BYTES // max(1, each)))
        return [slice(i, min(i + block, self._batch_size)) for i in range(0, self._batch_size, block)]


def _only(weights: Tensor, rows: slice) -> Tensor:
    """The weights of some samples, and zero for all others."""
    if len(range(*rows.indices(len(weights)))) == len(weights):
        return weights
    chosen = torch.zeros_like(weights)
    chosen[rows] = weights[rows]
    return chosen
