"""A linear layer on rows in the precision in which they are stored."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor, nn
from torch.nn import functional

from sluice.gradients.layers.linear import NarrowLinearRule
from sluice.gradients.rules import Call, register


class StoredLinear(nn.Linear):
    """A linear layer that also takes rows in half precision. It computes in the precision of its weights.

    Features are stored in half precision. Half of the memory is then read, and no copy in single precision is written, where
    the layer has few outputs and kernels in C convert the rows as they read them.
    """

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x.to(self.weight.dtype), self.weight, self.bias)


class StoredLinearRule(NarrowLinearRule):
    """Rows in half precision as they are, where there are kernels for them; else as any linear layer takes its input."""

    takes_half = True

    def record(self, module: nn.Linear, call: Call) -> Tensor:
        if not self.is_plain(module, call):
            x = call.argument(0, "input").to(module.weight.dtype)
            call = replace(call, inputs=(x,), keywords={})
        return super().record(module, call)


register(StoredLinear, StoredLinearRule())
