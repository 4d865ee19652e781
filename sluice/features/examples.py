"""Labelled rows of features, and what a model sees of them before and after their mean is released."""

from __future__ import annotations

from typing import Self

import torch
from torch import Tensor

from sluice.data import TensorExamples
from sluice.data.examples import Indices
from sluice.data.transforms import unscaled
from sluice.features.rows import BIAS_INPUT, RowFeatures, presented


class RowExamples(TensorExamples):
    """Rows of norm 1, each with the constant of the bias at its end, and the features that made them."""

    def __init__(
        self, rows: Tensor, labels: Tensor, features: RowFeatures, *, digests: list[bytes] | None = None
    ) -> None:
        super().__init__(rows, labels, unscaled, digests=digests)
        self.features = features

    def inputs_at(self, indices: Tensor) -> Tensor:
        rows = super().inputs_at(indices)
        return torch.cat([rows, rows.new_full((len(rows), 1), BIAS_INPUT)], dim=1)

    def subset(self, indices: Indices) -> Self:
        chosen = self._chosen(indices)
        return type(self)(chosen.inputs, chosen.labels, self.features, digests=chosen._digests)

    def presented(self, centre: Tensor | None) -> TensorExamples:
        """The same records as a model sees them, less the released mean if there is one: quick to read in any order.

        Guarantee:
            Record i of the result is a function of record i and of the released mean alone.
        """
        return TensorExamples(presented(self.inputs, centre), self.labels, unscaled, digests=self._digests)


__all__ = ["RowExamples"]
