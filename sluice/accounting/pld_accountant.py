"""The sound accountant by privacy-loss distributions: dp-accounting's face, composed when it is asked."""

from __future__ import annotations

import math

from sluice._base import validate
from sluice.accounting import dp_accounting_losses, dpa
from sluice.accounting.attempt_cap import ADD_OR_REMOVE_ONE, GiveUpCharge, require_add_or_remove
from sluice.accounting.dpsur import DpsurAttemptDpEvent
from sluice.accounting.events import UNGATED, SelectiveReleaseDpEvent, as_release
from sluice.accounting.loss_solver import Events, solve_delta, solve_epsilon

DEFAULT_TOLERANCE = 1e-4


class SelectivePLDAccountant(dpa.PrivacyAccountant):
    """Composes selective releases with every event that dp-accounting's own PLD accountant supports.

    Events are kept as they come and composed by one transform when epsilon or delta is read: only then is it known
    how fine the grid has to be. The grid has at most about a million points, whatever the events; where that is
    too coarse the answer is looser, never too small. The Renyi bound is computed beside it, and the smaller of
    the two, both being sound, is the answer.

    Guarantee:
        ``get_epsilon`` and ``get_delta`` are upper bounds under adding or removing one record, for adaptively chosen
        releases (docs/accounting.md, sections 3.4 and 3.5). Reading them changes nothing.

    Args:
        neighboring_relation: ADD_OR_REMOVE_ONE; the proof covers no other.
        tolerance: how much looser than exact epsilon may become by rounding, relatively. Smaller is slower.
    """

    def __init__(
        self,
        neighboring_relation: dpa.NeighboringRelation = ADD_OR_REMOVE_ONE,
        tolerance: float = DEFAULT_TOLERANCE,
    ) -> None:
        require_add_or_remove(neighboring_relation)
        validate.positive(tolerance=tolerance)
        super().__init__(neighboring_relation)
        self._tolerance = tolerance
        self._releases: dict[SelectiveReleaseDpEvent, int] = {}
        self._attempts: dict[DpsurAttemptDpEvent, int] = {}
        self._others: list[tuple[dpa.DpEvent, int]] = []
        self._gaussian_precision = 0.0
        self._is_non_private = False
        self._charge = GiveUpCharge()

    def _maybe_compose(
        self, event: dpa.DpEvent, count: int, do_compose: bool
    ) -> dpa.PrivacyAccountant.CompositionErrorDetails | None:
        if isinstance(event, DpsurAttemptDpEvent):
            if do_compose and count:
                self._attempts[event] = self._attempts.get(event, 0) + count
            return None
        release = as_release(event)
        if release is not None:
            if do_compose and count:
                self._add_release(release, count)
            return None
        if isinstance(event, dpa.NoOpDpEvent):
            return None
        if isinstance(event, dpa.NonPrivateDpEvent):
            self._is_non_private |= do_compose
            return None
        if isinstance(event, dpa.SelfComposedDpEvent):
            return self._maybe_compose(event.event, event.count * count, do_compose)
        if isinstance(event, dpa.ComposedDpEvent):
            errors = (self._maybe_compose(each, count, do_compose) for each in event.events)
            return next((error for error in errors if error is not None), None)
        error = dp_accounting_losses.unsupported(event)
        if error is None and do_compose and count:
            self._add_other(event, count)
        return error

    def _add_release(self, release: SelectiveReleaseDpEvent, count: int) -> None:
        self._charge = self._charge.plus(release, count)
        sigma = release.effective_noise_multiplier
        if release.sampling_probability == 1.0 and release.acceptance.ratio_min == release.acceptance.ratio_max:
            self._gaussian_precision += count / sigma / sigma
            self._is_non_private |= math.isinf(self._gaussian_precision)
            return
        key = SelectiveReleaseDpEvent(
            sampling_probability=release.sampling_probability, noise_multiplier=sigma, acceptance=release.acceptance
        )
        self._releases[key] = self._releases.get(key, 0) + count

    def _add_other(self, event: dpa.DpEvent, count: int) -> None:
        if dp_accounting_losses.has_no_effect(event):
            return
        if dp_accounting_losses.is_non_private(event):
            self._is_non_private = True
            return
        self._others.append((event, count))

    def _events(self) -> Events:
        """Gaussian releases of the whole data set are one Gaussian release with their precisions added."""
        releases = list(self._releases.items())
        if self._gaussian_precision > 0:
            gaussian = SelectiveReleaseDpEvent(
                sampling_probability=1.0,
                noise_multiplier=1.0 / math.sqrt(self._gaussian_precision),
                acceptance=UNGATED,
            )
            releases.append((gaussian, 1))
        return Events(releases=tuple(releases), attempts=tuple(self._attempts.items()), others=tuple(self._others))

    def get_epsilon(self, target_delta: float) -> float:
        remaining = self._charge.remaining_delta(target_delta)
        if self._is_non_private:
            return math.inf
        return self._charge.with_epsilon(solve_epsilon(self._events(), delta=remaining, tolerance=self._tolerance))

    def get_delta(self, target_epsilon: float) -> float:
        remaining = self._charge.remaining_epsilon(target_epsilon)
        if self._is_non_private or remaining < 0:
            return 1.0
        return self._charge.with_delta(solve_delta(self._events(), epsilon=remaining, tolerance=self._tolerance))
