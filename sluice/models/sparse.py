"""A linear layer on rows that are mostly zero, which costs what their other entries cost."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from sluice.data.weighted import VALUE_STEPS
from sluice.gradients.contributions import RowsContribution
from sluice.gradients.layers.bags import BagContribution, bags_in, summed
from sluice.gradients.layers.linear import NarrowLinearRule
from sluice.gradients.rules import Call, register

#: Fills up lists of columns to one length.
NO_COLUMN = -1


class SparseLinear(nn.Linear):
    """A linear layer that also takes rows as lists of column numbers, filled up with -1.

    | integers of shape | the row that they stand for |
    |---|---|
    | ``[n, any]`` | a set of k columns: ``1 / sqrt(k)`` there, 0 elsewhere |
    | ``[n, 2, any]`` | columns, and below each its value in steps of ``2^-24`` (`sluice.data.WeightedBags`); 0 elsewhere |

    A column that is named twice counts twice; a list that names none stands for zeros.
    """

    def forward(self, x: Tensor) -> Tensor:
        if x.is_floating_point():
            return functional.linear(x, self.weight, self.bias)
        columns = columns_of(x)
        named = columns != NO_COLUMN
        if x.dim() == 3:
            factors = named * values_of(x[:, 1], self.weight.dtype)
        else:
            factors = named * scale_of(named.sum(1), self.weight.dtype).unsqueeze(1)
        columns = columns.masked_fill(~named, 0)
        rows = functional.embedding_bag(columns, self.weight.t(), per_sample_weights=factors, mode="sum")
        return rows if self.bias is None else rows + self.bias


def columns_of(x: Tensor) -> Tensor:
    """The columns that lists name, ``[n, any]``."""
    return x[:, 0] if x.dim() == 3 else x


def values_of(steps: Tensor, dtype: torch.dtype) -> Tensor:
    """The values that stand below columns."""
    return steps.to(dtype) / VALUE_STEPS


def scale_of(columns: Tensor, dtype: torch.dtype) -> Tensor:
    """The entries of rows with so many columns: they make the row's norm 1."""
    return columns.clamp(min=1).to(dtype).rsqrt()


class SparseLinearRule(NarrowLinearRule):
    """Lists of columns as bags of the weight's columns; rows of numbers as any linear layer takes them."""

    def record(self, module: nn.Linear, call: Call) -> Tensor:
        x = call.argument(0, "input")
        if x.is_floating_point():
            return super().record(module, call)
        x, table, compiled = call.save(x), module.weight.detach().t(), call.options.compiled
        factors = values_of(x[:, 1], table.dtype) if x.dim() == 3 else None
        used = bags_in(columns_of(x), table, padding=NO_COLUMN, factors=factors, compiled=compiled)
        scales = scale_of(used.sizes(), table.dtype) if factors is None else None
        bias = None if module.bias is None else module.bias.detach()
        output, squares = summed(table, used, scales=scales, bias=bias)
        z, tap = call.tap(output)
        if call.trainable(module.weight):
            call.contribute(
                BagContribution(
                    module.weight, tap, used, scales=scales, squares=squares, compiled=compiled, transposed=True
                )
            )
        if call.trainable(module.bias):
            call.contribute(RowsContribution(module.bias, tap))
        return z


register(SparseLinear, SparseLinearRule())
