"""The sound Renyi accountant: dp-accounting's, which also understands selective release."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from dp_accounting import rdp

from sluice.accounting import dpa
from sluice.accounting.attempt_cap import ADD_OR_REMOVE_ONE, GiveUpCharge, require_add_or_remove
from sluice.accounting.dpsur import DpsurAttemptDpEvent, DpsurDpEvent, provable_renyi
from sluice.accounting.dpsur_attempt import attempt_renyi
from sluice.accounting.events import as_release
from sluice.accounting.renyi_conversion import delta_and_order, epsilon_and_order
from sluice.accounting.selective_rdp import DEFAULT_ORDERS, renyi_divergences


class SelectiveRdpAccountant(rdp.RdpAccountant):
    """Composes selective releases with every event that dp-accounting's own Renyi accountant supports.

    Guarantee:
        ``get_epsilon`` and ``get_delta`` are upper bounds under adding or removing one record, for adaptively chosen
        releases (docs/accounting.md, sections 3.3 and 3.5). Reading them changes nothing.
    """

    def __init__(
        self,
        orders: Sequence[float] | None = None,
        neighboring_relation: dpa.NeighboringRelation = ADD_OR_REMOVE_ONE,
    ) -> None:
        require_add_or_remove(neighboring_relation)
        super().__init__(list(DEFAULT_ORDERS if orders is None else orders), neighboring_relation)
        self._rdp: np.ndarray = np.zeros(len(self._orders))
        self._charge = GiveUpCharge()

    def _maybe_compose(
        self, event: dpa.DpEvent, count: int, do_compose: bool
    ) -> dpa.PrivacyAccountant.CompositionErrorDetails | None:
        if isinstance(event, DpsurDpEvent):
            if do_compose and count:
                self._rdp = self._rdp + count * provable_renyi(event.release, tuple(self._orders))
            return None
        if isinstance(event, DpsurAttemptDpEvent):
            if do_compose and count:
                self._rdp = self._rdp + count * attempt_renyi(event.attempt, np.array(self._orders))
            return None
        release = as_release(event)
        if release is None:
            return super()._maybe_compose(event, count, do_compose)
        if do_compose and count:
            self._rdp = self._rdp + count * renyi_divergences(release, self._orders)
            self._charge = self._charge.plus(release, count)
        return None

    def get_epsilon_and_optimal_order(self, target_delta: float) -> tuple[float, float]:
        remaining = self._charge.remaining_delta(target_delta)
        epsilon, order = epsilon_and_order(self._orders, self._rdp, delta=remaining)
        return self._charge.with_epsilon(epsilon), order

    def get_epsilon(self, target_delta: float) -> float:
        return self.get_epsilon_and_optimal_order(target_delta)[0]

    def get_delta_and_optimal_order(self, target_epsilon: float) -> tuple[float, float]:
        remaining = self._charge.remaining_epsilon(target_epsilon)
        if remaining < 0 or not np.all(np.isfinite(self._rdp)):
            return 1.0, math.nan
        delta, order = delta_and_order(self._orders, self._rdp, epsilon=remaining)
        return self._charge.with_delta(delta), order

    def get_delta(self, target_epsilon: float) -> float:
        return self.get_delta_and_optimal_order(target_epsilon)[0]
