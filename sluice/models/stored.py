"""A linear layer on rows in the precision in which they are stored."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

from sluice.gradients.layers.linear import LinearRule, NarrowLinearRule, is_narrow
from sluice.gradients.rules import Rule, register


class StoredLinear(nn.Linear):
    """A linear layer that also takes rows in half precision. It computes in the precision of its weights.

    Features are stored in half precision. Half of the memory is then read, and no copy in single precision is written, where
    the layer has few outputs and kernels in C convert the rows as they read them.
    """

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x.to(self.weight.dtype), self.weight, self.bias)


class StoredLinearRule(LinearRule):
    """Rows in half precision as they are, where the layer has few outputs and there are kernels for it."""

    def variant(self, module: StoredLinear) -> Rule:
        return _narrow_rule if is_narrow(module) else self


class _NarrowStoredLinearRule(NarrowLinearRule):
    takes_half = True


_narrow_rule = _NarrowStoredLinearRule()
register(StoredLinear, StoredLinearRule())
