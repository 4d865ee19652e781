"""What a target and its shadow models say of the same records, and which of them each shadow model was trained on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from sluice._base.errors import InputError
from sluice.attacks.scores import Scores, require_scores


@dataclass(frozen=True, kw_only=True, eq=False)
class References:
    """One number for each model and record.

    Attributes:
        target: ``(records,)``.
        shadows: ``(models, records)``.
        inside: ``(models, records)``: whether the model was trained on the record.
    """

    target: Scores
    shadows: Scores
    inside: NDArray[np.bool_]

    @classmethod
    def of(cls, *, target: ArrayLike, shadows: ArrayLike, inside: ArrayLike) -> Self:
        """Checked: a record that every shadow model was trained on has no score, and none is made up for it."""
        found = require_scores(target=target, shadows=shadows)
        members = np.asarray(inside)
        if members.dtype != np.bool_ or found["target"].ndim != 1 or found["target"].size == 0:
            raise InputError("inside must hold True or False, and target one number for each of at least one record.")
        if found["shadows"].shape != members.shape or found["shadows"].shape[1:] != found["target"].shape:
            raise InputError(
                f"target {found['target'].shape}, shadows {found['shadows'].shape} and inside {members.shape} are not "
                "allowed: they must be (records,), (models, records) and (models, records)."
            )
        references = cls(target=found["target"], shadows=found["shadows"], inside=members)
        references.require("OUT", 1)
        return references

    @property
    def models(self) -> int:
        return len(self.shadows)

    def require(self, side: str, count: int) -> None:
        """Refuse unless each record has so many models on this side, IN or OUT."""
        least = int(self._side(side).sum(axis=0).min())
        if least < count:
            record = int(self._side(side).sum(axis=0).argmin())
            raise InputError(
                f"record {record} has {least} {side} models, and {count} are needed: without them it has no score. Train "
                "more shadow models, or draw their members anew."
            )

    def means(self, side: str) -> Scores:
        """For each record, the mean over models on this side."""
        chosen = self._side(side)
        means: Scores = np.where(chosen, self.shadows, 0.0).sum(axis=0) / chosen.sum(axis=0)
        return means

    def squared_residuals(self, side: str) -> tuple[Scores, NDArray[np.int64]]:
        """For each record, the sum of squares around its own mean, and the degrees of freedom that belong to it."""
        chosen = self._side(side)
        residuals = np.where(chosen, self.shadows - self.means(side), 0.0)
        return (residuals**2).sum(axis=0), chosen.sum(axis=0) - 1

    def without_shadow(self, number: int) -> References:
        """One shadow model as the target of the others."""
        others = np.arange(self.models) != number
        return References.of(target=self.shadows[number], shadows=self.shadows[others], inside=self.inside[others])

    def _side(self, side: str) -> NDArray[np.bool_]:
        return self.inside if side == "IN" else ~self.inside
