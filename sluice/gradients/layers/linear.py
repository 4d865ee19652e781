"""nn.Linear on any number of leading axes."""

from __future__ import annotations

from torch import Tensor, nn

from sluice.gradients.contributions import sum_over_positions
from sluice.gradients.positions import LinearContribution
from sluice.gradients.rules import Call, Rule, register


class LinearRule(Rule):
    sums_in_blocks = True

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
            call.contribute(sum_over_positions(module.bias, tap, by_position))
        return z


register(nn.Linear, LinearRule())
