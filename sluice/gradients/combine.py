"""Adding up what several calls contribute to one parameter before any norm is taken."""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor

from sluice.gradients.contributions import Contribution, squared_norms


class SumContribution(Contribution):
    """Contributions of any kind to overlapping parts of one parameter (tied weights, a layer called twice).

    The gradient of the sum is not the sum of the norms, so per-sample gradients are formed and added, for as many
    samples at a time as fit into ``block_bytes``.
    """

    def __init__(self, parts: list[Contribution], *, batch_size: int, block_bytes: int) -> None:
        super().__init__(parts[0].parameter)
        self._parts = parts
        self._batch_size = batch_size
        self._block = max(1, block_bytes // max(1, self.parameter.numel() * 4))

    def norms_squared(self, *, keep: bool) -> Tensor:
        starts = range(0, self._batch_size, self._block)
        return torch.cat([squared_norms(self.per_sample(slice(i, i + self._block))) for i in starts])

    def per_sample(self, samples: slice) -> Tensor:
        total: Tensor | None = None
        for part in self._parts:
            gradients = part.per_sample(samples)
            if total is None:
                total = gradients.new_zeros(gradients.shape[0], *self.parameter.shape)
            total[:, part.rows if part.rows is not None else slice(None)] += gradients.view(
                gradients.shape[0], *part.shape
            )
        if total is None:
            raise AssertionError("a sum of no contributions")
        return total

    def weighted_sum(self, weights: Tensor) -> Tensor:
        total: Tensor | None = None
        for part in self._parts:
            value = part.weighted_sum(weights)
            if total is None:
                total = value.new_zeros(self.parameter.shape)
            total[part.rows if part.rows is not None else slice(None)] += value.view(part.shape)
        if total is None:
            raise AssertionError("a sum of no contributions")
        return total

    def drop(self, samples: Tensor) -> None:
        for part in self._parts:
            part.drop(samples)


def combined(contributions: list[Contribution], *, batch_size: int, block_bytes: int) -> list[Contribution]:
    """Contributions whose squared norms may simply be added: no two of them touch the same entry of a parameter."""
    by_parameter: dict[Tensor, list[Contribution]] = defaultdict(list)
    for contribution in contributions:
        by_parameter[contribution.parameter].append(contribution)
    result: list[Contribution] = []
    for parts in by_parameter.values():
        remaining = _merged(parts)
        if _disjoint(remaining):
            result.extend(remaining)
        else:
            result.append(SumContribution(remaining, batch_size=batch_size, block_bytes=block_bytes))
    return result


def _merged(parts: list[Contribution]) -> list[Contribution]:
    kept: list[Contribution] = []
    for part in parts:
        for i, earlier in enumerate(kept):
            together = earlier.merged(part) if earlier.rows == part.rows else None
            if together is not None:
                kept[i] = together
                break
        else:
            kept.append(part)
    return kept


def _disjoint(parts: list[Contribution]) -> bool:
    if len(parts) == 1:
        return True
    if any(part.rows is None for part in parts):
        return False
    covered = [i for part in parts for i in range(*part.rows.indices(part.parameter.shape[0]))]  # type: ignore[union-attr]
    return len(covered) == len(set(covered))
