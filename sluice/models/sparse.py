"""A linear layer on rows that are mostly zero, which costs what their other entries cost."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from sluice.gradients.contributions import RowsContribution
from sluice.gradients.layers.bags import BagContribution, summed
from sluice.gradients.layers.embedding import Lookups
from sluice.gradients.layers.linear import NarrowLinearRule
from sluice.gradients.rules import Call, register

#: Fills up lists of columns to one length.
NO_COLUMN = -1


class SparseLinear(nn.Linear):
    """A linear layer that also takes sets as lists of column numbers, ``[n, any]``, filled up with -1.

    A list of k columns stands for the row that is ``1 / sqrt(k)`` there and 0 elsewhere (an empty one for zeros); a
    column that is named twice counts twice.
    """

    def forward(self, x: Tensor) -> Tensor:
        if x.is_floating_point():
            return functional.linear(x, self.weight, self.bias)
        named = x != NO_COLUMN
        factors = named * scale_of(named.sum(1), self.weight.dtype).unsqueeze(1)
        rows = functional.embedding_bag(x.clamp(min=0), self.weight.t(), per_sample_weights=factors, mode="sum")
        return rows if self.bias is None else rows + self.bias


def scale_of(columns: Tensor, dtype: torch.dtype) -> Tensor:
    """The entries of rows with so many columns: they make the row's norm 1."""
    return columns.clamp(min=1).to(dtype).rsqrt()


class SparseLinearRule(NarrowLinearRule):
    """Lists of columns as bags of the weight's columns; rows of numbers as any linear layer takes them."""

    def record(self, module: nn.Linear, call: Call) -> Tensor:
        x = call.argument(0, "input")
        if x.is_floating_point():
            return super().record(module, call)
        compiled = call.options.compiled
        lookups = Lookups.of(call.save(x), padding=NO_COLUMN, compiled=compiled)
        scales = scale_of(lookups.sizes(), module.weight.dtype)
        output, squares = summed(module.weight.detach().t(), lookups, scales=scales, compiled=compiled)
        z, tap = call.tap(output if module.bias is None else output + module.bias.detach())
        if call.trainable(module.weight):
            call.contribute(
                BagContribution(
                    module.weight, tap, lookups, scales=scales, squares=squares, compiled=compiled, transposed=True
                )
            )
        if call.trainable(module.bias):
            call.contribute(RowsContribution(module.bias, tap))
        return z


register(SparseLinear, SparseLinearRule())
