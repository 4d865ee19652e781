"""nn.Linear on any number of leading axes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from sluice.gradients.contributions import (
    Contribution,
    RowsContribution,
    Tap,
    block_rows,
    squared_norms_of_products,
    sum_over_positions,
    zero_rows,
)
from sluice.gradients.native import kernels, narrow
from sluice.gradients.positions import LinearContribution
from sluice.gradients.rules import Call, Rule, register

#: Layers with at most so many outputs, and at least so many inputs, read their input faster by a kernel of their own.
_FEW_OUTPUTS, _MANY_INPUTS = 16, 128


def is_narrow(module: nn.Linear) -> bool:
    """Whether `NarrowLinearRule` is the rule for a layer of this shape."""
    return module.out_features <= _FEW_OUTPUTS and module.in_features >= _MANY_INPUTS


class LinearRule(Rule):
    sums_in_blocks = True

    def variant(self, module: Any) -> Rule:
        return _narrow_rule if is_narrow(module) else self

    def record(self, module: nn.Linear, call: Call) -> Tensor:
        z, tap = call.tap(call.output)

        def by_position(tensor: Tensor) -> Tensor:
            moved = tensor.movedim(call.batch_axis, 0)
            return moved.reshape(call.batch_size, -1, tensor.shape[-1])

        if call.trainable(module.weight):
            call.contribute(
                LinearContribution(
                    module.weight,
                    tap,
                    by_position(call.save(call.argument(0, "input"))),
                    view=by_position,
                    strategy=call.strategy,
                    options=call.options,
                    lender=call.lender,
                )
            )
        if call.trainable(module.bias):
            once = z.dim() == 2 and call.batch_axis == 0
            call.contribute(
                RowsContribution(module.bias, tap) if once else sum_over_positions(module.bias, tap, by_position)
            )
        return z


class NarrowContribution(Contribution):
    """The weight of a layer with few outputs on inputs ``a``, ``[n, in]``, whose squared norms are known."""

    def __init__(self, parameter: Tensor, tap: Tap, a: Tensor, squares: Tensor) -> None:
        super().__init__(parameter)
        self._tap = tap
        self._a = a
        self._squares = squares
        self._dropped: Tensor | None = None

    def _gradient(self) -> Tensor:
        gradient = self._tap.gradient
        return gradient if self._dropped is None else zero_rows(gradient, self._dropped)

    def norms_squared(self, *, keep: bool) -> Tensor:
        of_b = self._tap.squares if self._dropped is None else None
        return squared_norms_of_products(self._a, self._gradient(), of_a=self._squares, of_b=of_b)

    def per_sample(self, samples: slice) -> Tensor:
        return self._gradient()[samples].unsqueeze(2) * self._a[samples].unsqueeze(1)

    def weighted_sum(self, weights: Tensor) -> Tensor:
        gradient = self._gradient()
        scaled = gradient * weights.to(gradient.dtype).unsqueeze(1)
        return narrow.weight_gradient(self._a, scaled, block=block_rows(len(scaled)))

    def drop(self, samples: Tensor) -> None:
        self._dropped = samples
        self._a = zero_rows(self._a, samples)


class NarrowLinearRule(LinearRule):
    """Few outputs on inputs that nothing has to be learned about: a classifier on stored features.

    One kernel reads the inputs once for the outputs and for the norms. Where the inputs have a history, or are not
    float32 vectors, the layer is one like any other.
    """

    replaces_forward = True
    #: Whether the module also takes float16 inputs, and computes in the precision of its weights.
    takes_half: ClassVar[bool] = False

    def variant(self, module: Any) -> Rule:
        return self

    def record(self, module: nn.Linear, call: Call) -> Tensor:
        a = call.argument(0, "input")
        if not self.is_plain(module, call):
            return super().record(module, replace(call, output=module.forward(*call.inputs, **call.keywords)))
        bias = None if module.bias is None else module.bias.detach()
        output, squares = narrow.forward(a, module.weight.detach(), bias)
        z, tap = call.tap(output)
        if call.trainable(module.weight):
            call.contribute(NarrowContribution(module.weight, tap, call.save(a), squares))
        if call.trainable(module.bias):
            call.contribute(RowsContribution(module.bias, tap))
        return z

    def is_plain(self, module: nn.Linear, call: Call) -> bool:
        """Whether the kernels take this call."""
        a = call.argument(0, "input")
        parameters = [p for p in (module.weight, module.bias) if p is not None]
        in_rows = a.dim() == 2 and call.batch_axis == 0 and a.stride(1) == 1
        constant = not a.requires_grad and not any(p.requires_grad for p in parameters)
        readable = narrow.reads(a) if self.takes_half else kernels.available(a)
        usable = readable and kernels.available(*parameters) and all(p.is_contiguous() for p in parameters)
        return in_rows and constant and call.options.compiled and usable and not torch.is_autocast_enabled("cpu")


_narrow_rule = NarrowLinearRule()
register(nn.Linear, LinearRule())
