"""nn.EmbeddingBag: rows of a table added up for each sample, whose gradients are multiples of one vector."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from sluice._base.errors import UnsupportedModuleError
from sluice.gradients.contributions import DOUBLE, Contribution, Tap, not_below_terms, squared_norms, zero_rows
from sluice.gradients.layers.embedding import Lookups, RowContribution, add_rows
from sluice.gradients.native import kernels
from sluice.gradients.native import rows as row_kernels
from sluice.gradients.native.rows import Bags
from sluice.gradients.rules import Call, Rule, register


class BagContribution(RowContribution):
    """Rows that are multiples of the sample's one output gradient: neither norms nor sums need any rows.

    Args:
        scales: what all rows of a sample are multiplied with, beside their factors, ``[n]``; None for one.
        squares: the squared norm of a sample's gradient over that of the derivative at its output, ``[n]``.
        transposed: the parameter is the table's transpose.
    """

    def __init__(
        self,
        parameter: Tensor,
        tap: Tap,
        used: Lookups | Bags,
        *,
        scales: Tensor | None,
        squares: Tensor,
        compiled: bool,
        transposed: bool = False,
    ) -> None:
        # Not a method: a contribution that refers to itself would wait for the garbage collector.
        super().__init__(parameter, partial(_uses, tap, used, scales), compiled=compiled)
        self._tap = tap
        self._used = used
        self._scales = scales
        self._squares = squares
        self._transposed = transposed

    def norms_squared(self, *, keep: bool) -> Tensor:
        if self.is_merged:
            return super().norms_squared(keep=keep)
        return squared_norms(self._gradient().double()) * self._squares

    def _gradient(self) -> Tensor:
        gradient = self._tap.gradient
        return gradient if self._dropped is None else zero_rows(gradient, self._dropped)

    def per_sample(self, samples: slice) -> Tensor:
        gradients = super().per_sample(samples)
        return gradients.transpose(1, 2) if self._transposed else gradients

    def _add(self, weights: Tensor, *, into: Tensor, fresh: bool) -> None:
        if self.is_merged:
            super()._add(weights, into=into, fresh=fresh)
            return
        table, gradient, used = into.t() if self._transposed else into, self._gradient(), self._used
        if isinstance(used, Bags) and kernels.available(gradient, table):
            weights = weights.to(gradient.dtype)
            row_kernels.add_bags(gradient, used, scales=self._scales, weights=weights, into=table, fresh=fresh)
            return
        lookups = listed(used)
        add_rows(
            _scaled(_scaled(gradient, self._scales), weights),
            lookups.tokens,
            lookups.factors,
            into=table,
            fresh=fresh,
            compiled=self._compiled,
            sources=lookups.samples,
        )

    def drop(self, samples: Tensor) -> None:
        super().drop(samples)
        # Nothing times an infinite factor is not nothing.
        self._used = _without_factors(self._used, samples)
        if self._scales is not None:
            self._scales = self._scales.masked_fill(samples, 0)

    def merged(self, other: Contribution) -> Contribution | None:
        return None if self._transposed else super().merged(other)


def _without_factors(used: Lookups | Bags, samples: Tensor) -> Lookups | Bags:
    """The factors of some samples set to zero, whatever they were."""
    if used.factors is None:
        return used
    if isinstance(used, Bags):
        return replace(used, factors=zero_rows(used.factors, samples))
    return replace(used, factors=used.factors.masked_fill(samples[used.samples], 0))


def _scaled(gradient: Tensor, scales: Tensor | None) -> Tensor:
    return gradient if scales is None else gradient * scales.to(gradient.dtype).unsqueeze(1)


def _uses(tap: Tap, used: Lookups | Bags, scales: Tensor | None) -> tuple[Lookups, Tensor]:
    """The lookups, and the gradient of each."""
    lookups = listed(used)
    return lookups, _scaled(_scaled(tap.gradient, scales)[lookups.samples], lookups.factors)


def listed(used: Lookups | Bags) -> Lookups:
    """The lookups of bags as one list."""
    if isinstance(used, Lookups):
        return used
    columns = torch.arange(used.ids.shape[1])
    named = columns < used.counts.unsqueeze(1)
    return Lookups(
        tokens=used.ids[named],
        factors=None if used.factors is None else used.factors[named],
        batch_size=used.ids.shape[0],
        owners=torch.repeat_interleave(used.counts),
    )


def bags_in(
    matrix: Tensor, table: Tensor, *, padding: int | None, factors: Tensor | None = None, compiled: bool
) -> Lookups | Bags:
    """The lookups in a table that rows of a matrix name, for a kernel in C where there is one for them.

    Args:
        matrix: integers, one sample in each row; entries that are ``padding`` are not lookups.
        factors: what each row of the table is multiplied by, of the same shape; None for one.
    """
    if compiled and row_kernels.has_ids(matrix) and kernels.available(table):
        return Bags.of(matrix, padding=padding, factors=factors)
    lookups = Lookups.of(matrix, padding=padding, compiled=False)
    return lookups if factors is None else replace(lookups, factors=factors[matrix != padding])


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
        total = gradient.new_zeros(self.parameter.shape, dtype=torch.float64)
        total.scatter_add_(0, self._winners, gradient.double() * weights.double().unsqueeze(1))
        return total.to(gradient.dtype)

    def drop(self, samples: Tensor) -> None:
        self._dropped = samples


def summed(
    table: Tensor, used: Lookups | Bags, *, scales: Tensor | None, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Rows of a table added up for each sample, the sum times the sample's scale, plus a bias. No autograd.

    Returns (the sums, the squares that `BagContribution` takes).
    """
    if isinstance(used, Bags):
        return row_kernels.bag_forward(table, used, bias=bias, scales=scales)
    rows = functional.embedding(used.tokens, table)  # indexing would take negative numbers as well
    if used.factors is not None:
        rows = rows * used.factors.unsqueeze(1)
    output = _scaled(rows.new_zeros(used.batch_size, table.shape[1]).index_add_(0, used.samples, rows), scales)
    return output if bias is None else output + bias, _squares(used, table, scales)


def _squares(lookups: Lookups, table: Tensor, scales: Tensor | None) -> Tensor:
    """The sum over distinct rows of the square of what a row is multiplied with; equal rows are added up as numbers."""
    samples, _, counts, pair = lookups.distinct(table.shape[0])
    each = counts.double().square()
    if lookups.factors is not None:
        factors = lookups.factors.double()
        each, without_signs = (
            torch.zeros_like(each).index_add_(0, pair, by).square_() for by in (factors, factors.abs())
        )
    squares = each.new_zeros(lookups.batch_size).index_add_(0, samples, each)
    if lookups.factors is not None:
        lengths = torch.zeros_like(squares).index_add_(0, samples, without_signs).sqrt_()
        squares = not_below_terms(squares, lengths, most=DOUBLE)
    return squares if scales is None else squares * scales.double().square()


def _by_frequency(lookups: Lookups, table: Tensor) -> Lookups:
    """The distinct lookups, their gradients divided by the number of their uses."""
    samples, tokens, counts, pair = lookups.distinct(table.shape[0])
    factors = torch.ones_like(tokens, dtype=table.dtype)
    if lookups.factors is not None:
        factors = torch.zeros_like(factors).index_add_(0, pair, lookups.factors.to(table.dtype)) / counts
    return Lookups(tokens=tokens, owners=samples, factors=factors, batch_size=lookups.batch_size)


class EmbeddingBagRule(Rule):
    """One bag for each sample, as a matrix of indices or as a list of them with offsets."""

    replaces_forward = True
    owns_batch_axis = True
    sums_in_blocks = True

    def record(self, module: nn.EmbeddingBag, call: Call) -> Tensor:
        if _has_kernel(module, call):
            return self._record_matrix(module, call)
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
        _require_one_bag_each(output.shape[0], call)
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
            owners=owners,
            factors=None if factors is None else call.save(factors),
            batch_size=call.batch_size,
        )
        if module.padding_idx is not None:
            lookups = lookups.where(lookups.tokens != module.padding_idx)
        scales = _mean_scales(module, lookups)
        if module.scale_grad_by_freq:
            lookups = _by_frequency(lookups, module.weight)
        call.contribute(
            BagContribution(
                module.weight,
                tap,
                lookups,
                scales=scales,
                squares=_squares(lookups, module.weight, scales),
                compiled=call.options.compiled,
            )
        )
        return z

    def _record_matrix(self, module: nn.EmbeddingBag, call: Call) -> Tensor:
        """The usual case, by a kernel in C: a row of indices for each sample, and no factors."""
        indices = call.save(call.argument(0, "input"))
        _require_one_bag_each(indices.shape[0], call)
        bags = bags_in(indices, module.weight, padding=module.padding_idx, compiled=True)
        scales = _mean_scales(module, bags)
        output, squares = summed(module.weight, bags, scales=scales)
        if not call.trainable(module.weight):
            return output
        z, tap = call.tap(output)
        call.contribute(BagContribution(module.weight, tap, bags, scales=scales, squares=squares, compiled=True))
        return z


def _mean_scales(module: nn.EmbeddingBag, used: Lookups | Bags) -> Tensor | None:
    """One over the number of rows in each bag, if they are averaged."""
    if module.mode != "mean":
        return None
    return 1 / used.sizes().clamp(min=1).to(torch.promote_types(module.weight.dtype, torch.float32))


def _has_kernel(module: nn.EmbeddingBag, call: Call) -> bool:
    plain = module.mode != "max" and not module.scale_grad_by_freq
    indices = call.argument(0, "input")
    no_factors = _optional(call, 2, "per_sample_weights") is None
    in_rows = indices.dim() == 2 and row_kernels.has_ids(indices)
    return plain and no_factors and in_rows and call.options.compiled and kernels.available(module.weight)


def _require_one_bag_each(bags: int, call: Call) -> None:
    if bags != call.batch_size:
        raise UnsupportedModuleError(
            f"Module '{call.name}' got {bags} bags in a batch of {call.batch_size} samples. Give each "
            "sample one bag, or use nn.Embedding and pool its output."
        )


def _optional(call: Call, position: int, keyword: str) -> Any:
    return call.inputs[position] if len(call.inputs) > position else call.keywords.get(keyword)


register(nn.EmbeddingBag, EmbeddingBagRule())
