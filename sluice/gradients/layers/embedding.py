"""nn.Embedding and nn.EmbeddingBag, without ever forming a gradient as large as the table for each sample."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sluice._base.errors import UnsupportedModuleError
from sluice.gradients.contributions import Contribution, Tap, squared_norms, zero_rows
from sluice.gradients.native import kernels
from sluice.gradients.rules import Call, Rule, register


@dataclass(frozen=True, kw_only=True)
class Lookups:
    """Which rows of the table each sample used; one entry for each use.

    Attributes:
        tokens: row of the table.
        samples: who used it.
        factors: what the row was multiplied by; None for one.
        batch_size: number of samples.
    """

    tokens: Tensor
    samples: Tensor
    factors: Tensor | None
    batch_size: int

    def without(self, padding: int | None) -> tuple[Lookups, Tensor | None]:
        """The lookups that have a gradient, and where they were (None if that is everywhere)."""
        if padding is None:
            return self, None
        kept = (self.tokens != padding).nonzero().squeeze(1)
        if kept.shape[0] == self.tokens.shape[0]:
            return self, None
        factors = None if self.factors is None else self.factors[kept]
        chosen = Lookups(
            tokens=self.tokens[kept], samples=self.samples[kept], factors=factors, batch_size=self.batch_size
        )
        return chosen, kept

    def distinct(self, table_rows: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Distinct (sample, token) pairs: their samples, their tokens, their counts, and the pair of each lookup."""
        keys, pair, counts = torch.unique(
            self.samples * table_rows + self.tokens, return_inverse=True, return_counts=True
        )
        return keys // table_rows, keys % table_rows, counts, pair

    def repeated(self, table_rows: int) -> tuple[Tensor, Tensor, Tensor]:
        """Lookups of rows that their sample uses more than once: which they are, and which use the same row.

        Returns (lookups, group of each, sample of each group).
        """
        keys, order = torch.sort(self.samples * table_rows + self.tokens)
        same = keys[1:] == keys[:-1]
        # A lookup is repeated if it equals the one before it or the one after it.
        inside = torch.zeros_like(keys, dtype=torch.bool)
        inside[1:] |= same
        inside[:-1] |= same
        places = inside.nonzero().squeeze(1)
        groups, members = torch.unique_consecutive(keys[places], return_inverse=True)
        return order[places], members, groups // table_rows


class RowContribution(Contribution):
    """A table of which each sample uses a few rows; each use has its own gradient.

    Args:
        view: brings the tap's gradient to one row for each lookup, ``[lookups, width]``.
        by_frequency: divide a row's gradient by the number of times that the sample used it
            (``scale_grad_by_freq``, for a batch of one).
        compiled: whether the kernel in C may be used.
    """

    def __init__(
        self,
        parameter: Tensor,
        tap: Tap,
        lookups: Lookups,
        view: Callable[[Tensor], Tensor],
        *,
        by_frequency: bool = False,
        compiled: bool = False,
    ) -> None:
        super().__init__(parameter)
        self._compiled = compiled
        self._pieces = [(tap, lookups, view)]
        self._by_frequency = by_frequency
        self._uses: tuple[Lookups, Tensor] | None = None
        self._dropped: Tensor | None = None

    def lookups_and_rows(self) -> tuple[Lookups, Tensor]:
        """All lookups, and the gradient of each."""
        if self._uses is None:
            parts = [_scaled(lookups, view(tap.gradient)) for tap, lookups, view in self._pieces]
            lookups, rows = self._pieces[0][1], parts[0]
            if len(parts) > 1:
                each = [piece[1] for piece in self._pieces]
                lookups = Lookups(
                    tokens=torch.cat([part.tokens for part in each]),
                    samples=torch.cat([part.samples for part in each]),
                    factors=None,
                    batch_size=lookups.batch_size,
                )
                rows = torch.cat(parts)
            if self._by_frequency:
                places, members, groups = lookups.repeated(self.parameter.shape[0])
                counts = torch.bincount(members, minlength=groups.shape[0])
                rows = rows.index_copy(0, places, rows[places] / counts[members].unsqueeze(1))
            if self._dropped is not None:
                rows = zero_rows(rows, self._dropped[lookups.samples])
            self._uses = lookups, rows
        return self._uses

    def norms_squared(self, *, keep: bool) -> Tensor:
        lookups, rows = self.lookups_and_rows()
        squares = squared_norms(rows)
        places, members, owners = lookups.repeated(self.parameter.shape[0])
        total = squares.new_zeros(lookups.batch_size)
        if places.shape[0]:
            squares[places] = 0
            sums = rows.new_zeros(owners.shape[0], rows.shape[1]).index_add_(0, members, rows[places])
            total.index_add_(0, owners, squared_norms(sums))
        return total.index_add_(0, lookups.samples, squares)

    def per_sample(self, samples: slice) -> Tensor:
        lookups, rows = self.lookups_and_rows()
        start, stop, _ = samples.indices(lookups.batch_size)
        gradients = rows.new_empty(stop - start, *self.parameter.shape)
        self.add_per_sample(samples, into=gradients, fresh=True)
        return gradients

    def add_per_sample(self, samples: slice, *, into: Tensor, fresh: bool) -> None:
        """Only rows that were used are touched."""
        lookups, rows = self.lookups_and_rows()
        start, stop, _ = samples.indices(lookups.batch_size)
        inside = ((lookups.samples >= start) & (lookups.samples < stop)).nonzero().squeeze(1)
        if fresh:
            into.zero_()
        where = (lookups.samples[inside] - start) * into.shape[1] + lookups.tokens[inside]
        into.view(-1, into.shape[2]).index_add_(0, where, rows[inside].to(into.dtype))

    def weighted_sum(self, weights: Tensor) -> Tensor:
        _, rows = self.lookups_and_rows()
        total = rows.new_zeros(self.parameter.shape)
        self.add_weighted_sum(weights, into=total)
        return total

    def add_weighted_sum(self, weights: Tensor, *, into: Tensor) -> None:
        """Only rows that were used are touched: a large table costs no more than a small one."""
        lookups, rows = self.lookups_and_rows()
        weights = weights.to(rows.dtype)
        if self._compiled and kernels.available(rows, into):
            kernels.add_rows(rows, lookups.tokens, lookups.samples, weights, into=into)
            return
        scaled = rows * weights[lookups.samples].unsqueeze(1)
        into.index_add_(0, lookups.tokens, scaled.to(into.dtype))

    def drop(self, samples: Tensor) -> None:
        self._dropped = samples
        if self._uses is not None:
            lookups, rows = self._uses
            self._uses = lookups, zero_rows(rows, samples[lookups.samples])

    def merged(self, other: Contribution) -> Contribution | None:
        if not isinstance(other, RowContribution) or self._by_frequency or other._by_frequency:
            return None
        self._pieces.extend(other._pieces)
        return self


def _scaled(lookups: Lookups, rows: Tensor) -> Tensor:
    return rows if lookups.factors is None else rows * lookups.factors.to(rows.dtype).unsqueeze(1)


class LargestContribution(Contribution):
    """``EmbeddingBag(mode="max")``: each entry of a sample's output comes from one row, ``winners[i, e]``.

    No two entries of an output share an entry of the table, so a gradient's norm is the output's.
    """

    def __init__(self, parameter: Tensor, tap: Tap, winners: Tensor, used: Tensor) -> None:
        super().__init__(parameter)
        self._tap = tap
        self._winners = winners
        self._used = used
        self._dropped: Tensor | None = None

    def _gradient(self) -> Tensor:
        unused = ~self._used if self._dropped is None else ~self._used | self._dropped
        return zero_rows(self._tap.gradient, unused)

    def norms_squared(self, *, keep: bool) -> Tensor:
        return squared_norms(self._gradient())

    def per_sample(self, samples: slice) -> Tensor:
        gradient = self._gradient()[samples].unsqueeze(1)
        table = gradient.new_zeros(gradient.shape[0], *self.parameter.shape)
        return table.scatter_(1, self._winners[samples].unsqueeze(1), gradient)

    def weighted_sum(self, weights: Tensor) -> Tensor:
        gradient = self._gradient()
        total = gradient.new_zeros(self.parameter.shape)
        return total.scatter_add_(0, self._winners, gradient * weights.to(gradient.dtype).unsqueeze(1))

    def drop(self, samples: Tensor) -> None:
        self._dropped = samples


class EmbeddingRule(Rule):
    def record(self, module: nn.Embedding, call: Call) -> Tensor:
        output: Tensor = call.output
        if not call.trainable(module.weight):
            return output
        z, tap = call.tap(output)
        indices = call.save(call.argument(0, "input")).movedim(call.batch_axis, 0)
        width = module.embedding_dim
        flat = indices.reshape(call.batch_size, -1)
        owners = torch.arange(call.batch_size, device=flat.device).repeat_interleave(flat.shape[1])
        lookups = Lookups(tokens=flat.reshape(-1).long(), samples=owners, factors=None, batch_size=call.batch_size)
        lookups, kept = lookups.without(module.padding_idx)

        def rows(gradient: Tensor) -> Tensor:
            moved = gradient.movedim(call.batch_axis, 0).reshape(-1, width)
            return moved if kept is None else moved[kept]

        call.contribute(
            RowContribution(
                module.weight,
                tap,
                lookups,
                rows,
                by_frequency=module.scale_grad_by_freq,
                compiled=call.options.compiled,
            )
        )
        return z


class EmbeddingBagRule(Rule):
    """One bag for each sample, as a matrix of indices or as a list of them with offsets."""

    replaces_forward = True
    owns_batch_axis = True

    def record(self, module: nn.EmbeddingBag, call: Call) -> Tensor:
        indices = call.argument(0, "input")
        offsets, factors = _optional(call, 1, "offsets"), _optional(call, 2, "per_sample_weights")
        if indices.dim() == 2:
            bags, length = indices.shape
            offsets = torch.arange(0, bags * length, length, device=indices.device) if length else None
            offsets = indices.new_zeros(bags) if offsets is None else offsets.to(indices.dtype)
            indices, factors = indices.reshape(-1), None if factors is None else factors.reshape(-1)
            has_end = False
        else:
            has_end = module.include_last_offset
        # With the winners of mode "max" at hand nothing has to be computed twice.
        output, _, used, winners = torch.embedding_bag(
            module.weight,
            indices,
            offsets,
            False,
            {"sum": 0, "mean": 1, "max": 2}[module.mode],
            False,
            factors,
            has_end,
            module.padding_idx,
        )
        if output.shape[0] != call.batch_size:
            raise UnsupportedModuleError(
                f"Module '{call.name}' got {output.shape[0]} bags in a batch of {call.batch_size} samples. Give each "
                "sample one bag, or use nn.Embedding and pool its output."
            )
        if not call.trainable(module.weight):
            return output
        z, tap = call.tap(output)
        if module.mode == "max":
            call.contribute(LargestContribution(module.weight, tap, winners.long(), used > 0))
            return z
        starts = offsets[: call.batch_size].long()
        owners = torch.searchsorted(starts, torch.arange(indices.shape[0], device=indices.device), right=True) - 1
        lookups = Lookups(
            tokens=call.save(indices).long(),
            samples=owners,
            factors=None if factors is None else call.save(factors),
            batch_size=call.batch_size,
        )
        lookups, _ = lookups.without(module.padding_idx)
        call.contribute(_bag_contribution(module, tap, lookups, compiled=call.options.compiled))
        return z


def _bag_contribution(module: nn.EmbeddingBag, tap: Tap, lookups: Lookups, *, compiled: bool) -> Contribution:
    """Every row of a bag gets the same gradient, but for a factor; equal rows are added up as numbers."""
    samples, tokens, counts, pair = lookups.distinct(module.num_embeddings)
    dtype = module.weight.dtype if lookups.factors is None else lookups.factors.dtype
    once = torch.ones(lookups.tokens.shape[0], dtype=dtype, device=counts.device)
    uses = once if lookups.factors is None else lookups.factors
    factors = torch.zeros(samples.shape[0], dtype=dtype, device=counts.device).index_add_(0, pair, uses)
    if module.mode == "mean":
        sizes = torch.zeros(lookups.batch_size, dtype=dtype, device=counts.device).index_add_(0, lookups.samples, once)
        factors = factors / sizes[samples]
    if module.scale_grad_by_freq:
        factors = factors / counts
    distinct = Lookups(tokens=tokens, samples=samples, factors=factors, batch_size=lookups.batch_size)
    return BagContribution(module.weight, tap, distinct, lambda gradient: gradient[samples], compiled=compiled)


class BagContribution(RowContribution):
    """Rows that are multiples of the sample's one output gradient: the norm needs no rows at all."""

    def norms_squared(self, *, keep: bool) -> Tensor:
        if len(self._pieces) > 1:
            return super().norms_squared(keep=keep)
        tap, lookups, _ = self._pieces[0]
        assert lookups.factors is not None
        gradient = tap.gradient if self._dropped is None else zero_rows(tap.gradient, self._dropped)
        factors = lookups.factors.double()
        squares = factors.new_zeros(lookups.batch_size).index_add_(0, lookups.samples, factors.square())
        return squared_norms(gradient.double()) * squares


def _optional(call: Call, position: int, keyword: str) -> Any:
    return call.inputs[position] if len(call.inputs) > position else call.keywords.get(keyword)


register(nn.Embedding, EmbeddingRule())
register(nn.EmbeddingBag, EmbeddingBagRule())
