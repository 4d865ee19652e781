"""Scaling rules: from the norm of a record's gradient to the weight with which it counts.

A rule is frozen, works on each norm by itself, and carries its ``sensitivity``; noise is computed from that and from
nothing else.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from sluice._base import validate
from sluice._base.codec import Encoded, readable

if TYPE_CHECKING:
    from torch import Tensor

# Weights are this much smaller than the formulas say. Norms are exact to 1e-5 and weights are rounded to the gradients'
# precision; the margin is larger than both, so that the bound holds for what is computed and not only on paper.
MARGIN = 2.0**-15


@dataclass(frozen=True, kw_only=True)
class ScalingRule(Encoded, ABC):
    """A rule from norms to weights.

    Attributes:
        max_grad_norm: no record's weighted gradient is longer than this [the paper's C].
    """

    max_grad_norm: float = 1.0

    tag: ClassVar[str | None] = "rule"

    def __post_init__(self) -> None:
        validate.positive(max_grad_norm=self.max_grad_norm)

    @property
    def sensitivity(self) -> float:
        """How far adding or removing one record moves the weighted sum, at most."""
        return self.max_grad_norm

    @property
    def unclipped_norm(self) -> float:
        """Norms up to this are not shortened more than others: what gates take for small."""
        return self.max_grad_norm

    def __call__(self, norms: Tensor) -> Tensor:
        """The weight of each record, in the norms' precision.

        Guarantee:
            ``weight * norm <= max_grad_norm`` for every norm, rounding and an error of 1e-5 in the norm included, and a
            weight depends on its own norm alone. A norm that is infinite or NaN gets weight 0 under every rule.
        """
        exact = norms.detach().double()
        weights = self._weights(exact) * (1 - MARGIN)
        # Both are NaN if any norm is.
        if exact.numel() and not all(map(math.isfinite, exact.aminmax())):
            weights = weights.masked_fill(~exact.isfinite(), 0.0)
        return weights.to(norms.dtype)

    @abstractmethod
    def _weights(self, norms: Tensor) -> Tensor: ...


@readable
@dataclass(frozen=True, kw_only=True)
class Clip(ScalingRule):
    """``min(1, C / norm)``: the rule of DP-SGD.

    Guarantee:

        | norm | weight | length of the weighted gradient |
        |---|---|---|
        | 0 | 1 | 0 |
        | up to C | 1 | norm |
        | above C | C / norm | C |
        | infinite, NaN | 0 | 0 |
    """

    kind = "clip"

    def _weights(self, norms: Tensor) -> Tensor:
        return (self.max_grad_norm / norms).clamp(max=1.0)


@readable
@dataclass(frozen=True, kw_only=True)
class GlobalScaling(ScalingRule):
    """``C / max(norm, S)``: gradients up to the bound S keep their relative lengths (the DPSR-CG paper's Algorithm 1).

    Guarantee:

        | norm | weight | length of the weighted gradient |
        |---|---|---|
        | 0 | C / S | 0 |
        | up to S | C / S | C * norm / S |
        | above S | C / norm | C |
        | infinite, NaN | 0 | 0 |
    """

    bound: float

    kind = "global-scaling"

    def __post_init__(self) -> None:
        super().__post_init__()
        validate.positive(bound=self.bound)

    @property
    def unclipped_norm(self) -> float:
        return self.bound

    def _weights(self, norms: Tensor) -> Tensor:
        return self.max_grad_norm / norms.clamp(min=self.bound)


@readable
@dataclass(frozen=True, kw_only=True)
class Normalise(ScalingRule):
    """``C / (norm + gamma)``: automatic clipping, in which the learning rate takes the place of the clipping bound.

    Guarantee:

        | norm | weight | length of the weighted gradient |
        |---|---|---|
        | 0 | C / gamma | 0 |
        | any finite | C / (norm + gamma) | below C |
        | infinite, NaN | 0 | 0 |
    """

    gamma: float = 0.01

    kind = "normalise"

    def __post_init__(self) -> None:
        super().__post_init__()
        validate.positive(gamma=self.gamma)

    def _weights(self, norms: Tensor) -> Tensor:
        return self.max_grad_norm / (norms + self.gamma)
