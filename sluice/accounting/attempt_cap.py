"""What a cap on attempts costs, and which adjacency the accountants speak about."""

from __future__ import annotations

import math
from dataclasses import dataclass

from sluice._base import validate
from sluice._base.errors import InputError
from sluice.accounting import dpa
from sluice.accounting.events import SelectiveReleaseDpEvent
from sluice.accounting.renyi_conversion import at_least_zero, at_most_one

ADD_OR_REMOVE_ONE = dpa.NeighboringRelation.ADD_OR_REMOVE_ONE


def require_add_or_remove(neighboring_relation: dpa.NeighboringRelation) -> None:
    """The proof is for adding or removing one record, and for nothing else."""
    if neighboring_relation is not ADD_OR_REMOVE_ONE:
        raise InputError(
            f"neighboring_relation={neighboring_relation} is not allowed: the bound for selective release is proved for "
            "ADD_OR_REMOVE_ONE only. (Replacing a record is a removal and an addition: use group privacy of size 2.)"
        )


@dataclass(frozen=True, kw_only=True)
class GiveUpCharge:
    """The cost of stopping after ``max_attempts`` rejections in a row.

    A release that may give up with probability at most eta publishes either "gave up" or exactly what it would have
    published anyway, the latter with probability at least ``1 - eta``. So for the capped laws Q, Q' of all releases,
    ``Q(S) <= P(S) + sum eta`` and ``P'(S) <= Q'(S) / prod (1 - eta)``: the cap adds ``sum eta`` to delta and
    ``sum -log(1 - eta)`` to epsilon.
    """

    delta: float = 0.0
    epsilon: float = 0.0

    def plus(self, release: SelectiveReleaseDpEvent, count: int) -> GiveUpCharge:
        eta = release.give_up_probability
        loss = -math.log1p(-eta) if eta < 1 else math.inf
        return GiveUpCharge(delta=self.delta + count * eta, epsilon=self.epsilon + (count * loss if eta else 0.0))

    def remaining_delta(self, target_delta: float) -> float:
        """What is left of the target for the releases themselves."""
        validate.open_fraction(target_delta=target_delta)
        if not self.delta < target_delta:
            raise InputError(
                f"target_delta={target_delta} is not allowed: giving up after max_attempts alone may happen with "
                f"probability {self.delta:.3g}, which is charged to delta. Raise max_attempts (or drop it), or raise delta."
            )
        return target_delta - self.delta

    def remaining_epsilon(self, target_epsilon: float) -> float:
        validate.non_negative(target_epsilon=target_epsilon)
        return target_epsilon - self.epsilon

    def with_epsilon(self, epsilon: float) -> float:
        return at_least_zero(epsilon) + self.epsilon

    def with_delta(self, delta: float) -> float:
        return at_most_one(delta + self.delta)
