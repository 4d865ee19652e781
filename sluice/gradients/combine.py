"""Adding up what several calls contribute to one parameter before any norm is taken."""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor

from sluice.gradients import tied
from sluice.gradients.contributions import Contribution, not_below_terms, squared_norms, sum_of_blocks, zero_rows
from sluice.gradients.positions import LinearContribution

#: Gradients that are not kept are formed for as many samples as fit into this, so that they are still in the
#: processor's cache when the next part is added to them.
_BLOCK_BYTES = 8 * 2**20


class SumContribution(Contribution):
    """Contributions of any kind to overlapping parts of one parameter (tied weights, a layer called twice).

    The gradient of the sum is not the sum of the norms, so per-sample gradients are formed and added, a few samples at
    a time; they are kept for a weighted sum if all of them fit into ``kept_bytes``. An embedding that is also the output
    layer has a cheaper way where it is large (`tied`).
    """

    def __init__(self, parts: list[Contribution], *, batch_size: int, kept_bytes: int) -> None:
        lender = next((part.lender for part in parts if part.lender is not None), None)
        super().__init__(parts[0].parameter, lender=lender)
        # Products are the fastest to write into memory that holds nothing yet.
        self._parts = sorted(parts, key=lambda part: not isinstance(part, LinearContribution))
        self._batch_size = batch_size
        self._kept_bytes = kept_bytes
        self._gradients: Tensor | None = None

    def norms_squared(self, *, keep: bool) -> Tensor:
        pair = tied.pair(self._parts)
        if pair is not None and pair.gram_is_cheaper:
            return pair.norms_squared()
        n, each = self._batch_size, self.parameter.numel()
        like = self._parts[0].per_sample(slice(0, 0))
        block = max(1, _BLOCK_BYTES // max(1, each * like.element_size()))
        keep = keep and n * each * like.element_size() <= self._kept_bytes
        buffer = self.memory((n if keep else min(n, block), *self.parameter.shape), like)
        squares = like.new_zeros(n, dtype=torch.float64)
        for start in range(0, n, block):
            samples = slice(start, min(start + block, n))
            formed = buffer[samples] if keep else buffer[: samples.stop - start]
            self._form(samples, into=formed)
            squares[samples] = squared_norms(formed)
        self._gradients = buffer if keep else None
        return not_below_terms(squares, self.term_lengths())  # also if kept: both ways to the same norm

    def term_lengths(self) -> Tensor:
        first, *others = (part.term_lengths() for part in self._parts)
        return sum(others, first)

    def _form(self, samples: slice, *, into: Tensor) -> None:
        whole = self._parts[0].rows is None
        if not whole:
            into.zero_()
        for i, part in enumerate(self._parts):
            covered = into if part.rows is None else into[:, part.rows]
            part.add_per_sample(samples, into=covered, fresh=whole and i == 0)

    def per_sample(self, samples: slice) -> Tensor:
        if self._gradients is not None:
            return self._gradients[samples]
        start, stop, _ = samples.indices(self._batch_size)
        total = self._parts[0].per_sample(slice(0, 0)).new_empty(stop - start, *self.parameter.shape)
        self._form(samples, into=total)
        return total

    def weighted_sum(self, weights: Tensor) -> Tensor:
        total = self._parts[0].per_sample(slice(0, 0)).new_zeros(self.parameter.shape)
        self.add_weighted_sum(weights, into=total)
        return total

    def add_weighted_sum(self, weights: Tensor, *, into: Tensor) -> None:
        if self._gradients is not None:
            flat, weights = self._gradients.flatten(1), weights.to(self._gradients.dtype)
            into += sum_of_blocks(len(flat), lambda rows: weights[rows] @ flat[rows]).view(into.shape)
            return
        for part in self._parts:
            part.add_weighted_sum(weights, into=into if part.rows is None else into[part.rows])

    def drop(self, samples: Tensor) -> None:
        for part in self._parts:
            part.drop(samples)
        if self._gradients is not None:
            self._gradients = zero_rows(self._gradients, samples)


def combined(contributions: list[Contribution], *, batch_size: int, kept_bytes: int) -> list[Contribution]:
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
            result.append(SumContribution(remaining, batch_size=batch_size, kept_bytes=kept_bytes))
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
