"""nn.Embedding, without ever forming a gradient as large as the table for each sample. Bags are in `bags`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from sluice.gradients.contributions import (
    DOUBLE,
    Contribution,
    Tap,
    not_below_terms,
    row_lengths,
    squared_norms,
    working,
    zero_rows,
)
from sluice.gradients.native import kernels
from sluice.gradients.native import rows as row_kernels
from sluice.gradients.native.loading import library
from sluice.gradients.rules import Call, Rule, register


@dataclass(frozen=True, kw_only=True)
class Lookups:
    """Which rows of the table each sample used; one entry for each use.

    Attributes:
        tokens: row of the table, int32 or int64.
        owners: who used it; None where offsets say so.
        factors: what the row was multiplied by; None for one.
        batch_size: number of samples.
        offsets: where each sample's lookups begin, and where the last one's end, ``[batch_size + 1]``; None if they do not
            stand together.
    """

    tokens: Tensor
    factors: Tensor | None
    batch_size: int
    owners: Tensor | None = None
    offsets: Tensor | None = None

    @cached_property
    def samples(self) -> Tensor:
        """Who used each row."""
        return torch.repeat_interleave(self.sizes()) if self.owners is None else self.owners

    @classmethod
    def of(cls, matrix: Tensor, *, padding: int | None, compiled: bool) -> Lookups:
        """One sample in each row; entries that are ``padding`` are not lookups."""
        n, columns = matrix.shape
        if compiled and matrix.device.type == "cpu" and library() is not None:
            tokens, offsets = row_kernels.list_entries(matrix, padding=padding)
        else:
            tokens, ends = matrix.reshape(-1).long(), torch.arange(n + 1, device=matrix.device)
            samples, offsets = ends[:-1].repeat_interleave(columns), ends * columns
            if padding is not None:
                kept = (tokens != padding).nonzero().squeeze(1)
                tokens, samples = tokens[kept], samples[kept]
                offsets = torch.searchsorted(samples, ends)
        return cls(tokens=tokens, factors=None, batch_size=n, offsets=offsets)

    def where(self, kept: Tensor) -> Lookups:
        """Only the lookups in this boolean mask."""
        factors = None if self.factors is None else self.factors[kept]
        return Lookups(tokens=self.tokens[kept], owners=self.samples[kept], factors=factors, batch_size=self.batch_size)

    def sizes(self) -> Tensor:
        """How many lookups each sample has, ``[batch_size]``."""
        if self.offsets is not None:
            return self.offsets.diff()
        return torch.bincount(self.samples, minlength=self.batch_size)

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


#: Gives lookups, and the gradient of each, ``[lookups, width]``, once the backward pass has run.
Uses = Callable[[], tuple[Lookups, Tensor]]


class RowContribution(Contribution):
    """A table of which each sample uses a few rows; each use has its own gradient.

    Args:
        rows_used: what each sample used, see `uses`.
        by_frequency: divide a row's gradient by the number of times that the sample used it
            (``scale_grad_by_freq``, for a batch of one).
        compiled: whether the kernel in C may be used.
    """

    def __init__(
        self,
        parameter: Tensor,
        rows_used: Uses,
        *,
        by_frequency: bool = False,
        compiled: bool = False,
    ) -> None:
        super().__init__(parameter)
        self._compiled = compiled
        self._pieces = [rows_used]
        self._by_frequency = by_frequency
        self._uses: tuple[Lookups, Tensor] | None = None
        self._dropped: Tensor | None = None

    @property
    def is_merged(self) -> bool:
        """Whether it stands for others beside itself."""
        return len(self._pieces) > 1

    def lookups_and_rows(self) -> tuple[Lookups, Tensor]:
        """All lookups, and the gradient of each."""
        if self._uses is None:
            parts = [piece() for piece in self._pieces]
            lookups, rows = parts[0]
            if self.is_merged:
                lookups = Lookups(
                    tokens=torch.cat([part.tokens for part, _ in parts]),
                    owners=torch.cat([part.samples for part, _ in parts]),
                    factors=None,
                    batch_size=lookups.batch_size,
                )
                rows = torch.cat([rows for _, rows in parts])
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
        if self._compiled and lookups.offsets is not None and kernels.available(rows):
            return row_kernels.row_norms(rows, lookups.tokens, lookups.offsets, table_rows=self.parameter.shape[0])
        squares = squared_norms(rows)
        places, members, owners = lookups.repeated(self.parameter.shape[0])
        total = squares.new_zeros(lookups.batch_size)
        if places.shape[0]:
            squares[places] = 0
            sums = rows.new_zeros(owners.shape[0], rows.shape[1]).index_add_(0, members, rows[places])
            lengths = total.new_zeros(owners.shape[0]).index_add_(0, members, row_lengths(rows[places]))
            total.index_add_(0, owners, not_below_terms(squared_norms(sums), lengths, most=DOUBLE))
        return total.index_add_(0, lookups.samples, squares)

    def term_lengths(self) -> Tensor:
        lookups, rows = self.lookups_and_rows()
        lengths = row_lengths(rows)
        return lengths.new_zeros(lookups.batch_size).index_add_(0, lookups.samples, lengths)

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
        total = torch.empty_like(working(self.parameter), memory_format=torch.contiguous_format)
        self._add(weights, into=total, fresh=True)
        return total

    def add_weighted_sum(self, weights: Tensor, *, into: Tensor) -> None:
        """Only rows that were used are touched: a large table costs no more than a small one."""
        self._add(weights, into=into, fresh=False)

    def _add(self, weights: Tensor, *, into: Tensor, fresh: bool) -> None:
        lookups, rows = self.lookups_and_rows()
        add_rows(rows, lookups.tokens, weights[lookups.samples], into=into, fresh=fresh, compiled=self._compiled)

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


def add_rows(
    rows: Tensor,
    tokens: Tensor,
    scales: Tensor | None,
    *,
    into: Tensor,
    fresh: bool,
    compiled: bool,
    sources: Tensor | None = None,
) -> None:
    """``into[tokens[k]] += scales[k] * rows[k]``, in place; with ``sources``, ``rows[sources[k]]``.

    What goes to one row of the table is added up in double precision and rounded once, so that the error does not grow
    with the number of samples that share a word (docs/noise.md, section 6).

    Args:
        fresh: ``into`` has nothing in it yet and counts as zero.
    """
    if compiled and kernels.available(rows, into):
        scales = None if scales is None else scales.to(rows.dtype)
        row_kernels.add_rows(rows, tokens, scales, into=into, sources=sources, fresh=fresh)
        return
    if fresh:
        into.zero_()
    used, places = torch.unique(tokens, return_inverse=True)
    each = (rows if sources is None else rows[sources]).double()
    if scales is not None:
        each = each * scales.double().unsqueeze(1)
    sums = each.new_zeros(used.shape[0], rows.shape[1]).index_add_(0, places, each)
    into.index_add_(0, used, sums.to(into.dtype))


def uses(tap: Tap, lookups: Lookups, view: Callable[[Tensor], Tensor]) -> Uses:
    """What `RowContribution` takes, where ``view`` brings the tap's gradient to one row for each lookup, but for its factor."""

    def found() -> tuple[Lookups, Tensor]:
        rows = view(tap.gradient)
        return lookups, rows if lookups.factors is None else rows * lookups.factors.to(rows.dtype).unsqueeze(1)

    return found


class EmbeddingRule(Rule):
    sums_in_blocks = True

    def record(self, module: nn.Embedding, call: Call) -> Tensor:
        output: Tensor = call.output
        if not call.trainable(module.weight):
            return output
        z, tap = call.tap(output)
        ids = call.save(call.argument(0, "input")).movedim(call.batch_axis, 0).reshape(call.batch_size, -1)
        lookups = Lookups.of(ids, padding=module.padding_idx, compiled=call.options.compiled)
        padding = None if lookups.tokens.shape[0] == ids.numel() else module.padding_idx

        def rows(gradient: Tensor) -> Tensor:
            moved = gradient.movedim(call.batch_axis, 0).reshape(-1, module.embedding_dim)
            return moved if padding is None else moved[ids.reshape(-1) != padding]

        call.contribute(
            RowContribution(
                module.weight,
                uses(tap, lookups, rows),
                by_frequency=module.scale_grad_by_freq,
                compiled=call.options.compiled,
            )
        )
        return z


register(nn.Embedding, EmbeddingRule())
