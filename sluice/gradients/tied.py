"""An embedding whose table is also the weight of a linear layer: norms of the two gradients' sum.

With inputs ``a_s`` and derivatives ``b_s`` of the linear layer and derivatives ``e_l`` of the rows ``t_l`` that were looked
up, the gradient is ``sum_s b_s (x) a_s + sum_l 1[t_l] (x) e_l``: a lookup is one more position, whose derivative has a
single one in it. Inner products with such a derivative are entries of the other one, so the Gram matrices over
all positions (`sluice.gradients.gram`) cost little more than those of the linear layer alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sluice.gradients import costs
from sluice.gradients.contributions import Contribution
from sluice.gradients.gram import gram, gram_norms
from sluice.gradients.layers.embedding import RowContribution
from sluice.gradients.positions import LinearContribution


@dataclass(frozen=True, kw_only=True)
class Pair:
    """The two parts of a tied weight."""

    linear: LinearContribution
    table: RowContribution

    @property
    def gram_is_cheaper(self) -> bool:
        """Than forming the gradients of each sample, in multiply-adds."""
        a, b = self.linear.inputs_and_derivatives()
        n, positions, width = a.shape
        rows = b.shape[2]
        lookups = -(-self.table.lookups_and_rows()[1].shape[0] // max(1, n))
        by_gram = costs.DOUBLE * ((positions + lookups) ** 2 * width + positions**2 * rows)
        return by_gram < (positions + costs.STREAM) * rows * width

    def norms_squared(self) -> Tensor:
        a, b = self.linear.inputs_and_derivatives()
        tokens, gradients = self._by_sample(a)
        positions, batch = a.shape[1], torch.cat([a, gradients], 1)

        def outputs(rows: slice) -> Tensor:
            derivatives, looked_up = b[rows].double(), tokens[rows]
            result = derivatives.new_empty(len(looked_up), batch.shape[1], batch.shape[1])
            result[:, :positions, :positions] = gram(derivatives)
            between = derivatives.gather(2, looked_up.unsqueeze(1).expand(-1, positions, -1))
            result[:, :positions, positions:] = between
            result[:, positions:, :positions] = between.transpose(1, 2)
            result[:, positions:, positions:] = looked_up.unsqueeze(1) == looked_up.unsqueeze(2)
            return result

        return gram_norms(lambda rows: gram(batch[rows]), outputs, b)

    def _by_sample(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """Rows that were looked up and their derivatives, as many for each sample: zeros fill up."""
        lookups, rows = self.table.lookups_and_rows()
        counts = torch.bincount(lookups.samples, minlength=lookups.batch_size)
        order = torch.argsort(lookups.samples, stable=True)
        samples = lookups.samples[order]
        place = torch.arange(len(order), device=order.device) - (counts.cumsum(0) - counts)[samples]
        most = int(counts.max()) if len(counts) else 0
        tokens = lookups.tokens.new_zeros(lookups.batch_size, most)
        gradients = like.new_zeros(lookups.batch_size, most, rows.shape[1])
        tokens[samples, place] = lookups.tokens[order]
        gradients[samples, place] = rows[order].to(like.dtype)
        return tokens, gradients


def pair(parts: list[Contribution]) -> Pair | None:
    """The parts as such a pair, if that is what they are."""
    linear = [part for part in parts if isinstance(part, LinearContribution) and part.rows is None]
    tables = [part for part in parts if isinstance(part, RowContribution)]
    if len(parts) != 2 or len(linear) != 1 or len(tables) != 1:
        return None
    return Pair(linear=linear[0], table=tables[0])
