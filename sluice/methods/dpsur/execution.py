"""What makes the releases of DPSUR: candidates, tried out and put back until one is accepted."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sluice._base.errors import InputError
from sluice.accounting.dpsur import most_attempts_at_once
from sluice.mechanism.attempt import RAREST_USEFUL_ATTEMPT
from sluice.methods.dpsur import DpsurMechanism
from sluice.randomness.sampling import PoissonSampler
from sluice.training.context import Loss, TrainingContext
from sluice.training.executor import Draft, ReplayableExecutor
from sluice.training.selective_release import GaveUpError


@dataclass(frozen=True, kw_only=True)
class Accepted:
    """A candidate that passed the test, and how many attempts it took. The number is sensitive."""

    gradient: dict[str, Tensor]
    attempts: int


class SelectiveUpdates(ReplayableExecutor[Accepted]):
    """Makes candidates until one is accepted, or the run has used up its attempts.

    Guarantee:
        What is applied has the law that docs/accounting.md, sections 8.1 and 8.4, describe. A candidate is tried out and
        put back, so a rejected one changes nothing but ``trace`` and the noise source: weights and the optimizer's state
        are bit for bit as before. Whatever is shown depends on at most ``max_attempts`` attempts; those of a release that
        was lost are not known and count as the most that one release may make. A run that gave up has ended, also for a
        checkpoint that is made of it.
    """

    takes_workers = True

    def __init__(self, mechanism: DpsurMechanism, context: TrainingContext) -> None:
        super().__init__(releases=mechanism.releases, context=context)
        self._mechanism = mechanism
        self._attempts = 0
        self._has_ended = False
        self._most_at_once = most_attempts_at_once(mechanism.release)
        if mechanism.max_attempts is None and math.exp(mechanism.release.log_acceptance_max) < RAREST_USEFUL_ATTEMPT:
            raise InputError(
                f"threshold={mechanism.threshold} is not allowed without max_attempts: no candidate would ever be accepted. "
                "Raise it, or set max_attempts."
            )
        size = context.dataset_size
        self._batches = PoissonSampler(dataset_size=size, sample_rate=mechanism.sample_rate, source=context.noise)
        self._tests = PoissonSampler(dataset_size=size, sample_rate=mechanism.validation_rate, source=context.noise)

    def prepare(self, loss: Loss) -> Draft[Accepted]:
        attempts = measured = 0
        while attempts < self._attempts_left:
            attempts += 1
            indices = self._batches.sample()
            measured += len(indices)
            candidate = self._noisy_gradient(indices, loss)
            tested = self._tests.sample()
            raw_before = self._raw_losses(tested, loss)
            with self.context.updater.trial():
                self.context.updater.step(candidate)
                raw_change = self._raw_change(raw_before, self._raw_losses(tested, loss))
            if self._passes(raw_change):
                accepted = Accepted(gradient=candidate, attempts=attempts)
                return Draft(content=accepted, attempts=attempts, measured=measured, metric=raw_change)
        self._has_ended = True
        if self._mechanism.max_attempts is not None:
            self._attempts = self._mechanism.max_attempts  # asked again, it makes no more
        raise GaveUpError(
            f"the run used up its attempts (max_attempts={self._mechanism.max_attempts}) at release {self.spent + 1} and stops "
            "here. What was released so far stands and is accounted for."
        )

    def publish(self, content: Accepted) -> dict[str, Any]:
        return {"gradient": self.context.as_update(content.gradient), "attempts": content.attempts}

    def update(self, published: Mapping[str, Any]) -> None:
        self._attempts += published["attempts"]
        self.context.apply(published["gradient"])

    @property
    def _attempts_left(self) -> float:
        """How many attempts the next release may make."""
        if self._mechanism.max_attempts is None:
            return math.inf
        left = self._mechanism.max_attempts - self._attempts - self.lost * self._most_at_once
        return min(left, self._most_at_once)

    def own_state(self) -> dict[str, Any]:
        return {"attempts": self._attempts}

    def load_own_state(self, state: Mapping[str, Any]) -> None:
        if self._has_ended and self.noise.secure:
            return  # an earlier state does not give back attempts; seeded ones come out as before
        self._attempts = state.get("attempts", 0)  # runs of earlier versions have no cap and count none

    def _noisy_gradient(self, indices: Tensor, loss: Loss) -> dict[str, Tensor]:
        scaling, raw_sum = self._mechanism.scaling, self.context.raw_sum()
        for chunk in self.context.chunks(indices, loss):
            raw_sum.add(chunk, scaling(chunk.norms))
        gradient = self.context.noisy(
            raw_sum, noise_multiplier=self._mechanism.noise_multiplier, sensitivity=scaling.sensitivity
        )
        return {name: noisy.div_(self._mechanism.expected_batch_size) for name, noisy in gradient.items()}

    def _raw_losses(self, tested: Tensor, loss: Loss) -> Tensor:
        return self.context.raw_losses(tested, loss, expected_size=self._mechanism.expected_validation_size)

    def _raw_change(self, raw_before: Tensor, raw_after: Tensor) -> float:
        """The clipped change of the loss. One that is not a number counts as the worst there is."""
        clip = self._mechanism.loss_clip
        raw_sum = self.context.workers.total((raw_after - raw_before).sum())
        raw_change = float(raw_sum) / self._mechanism.expected_validation_size
        return min(max(raw_change, -clip), clip) if math.isfinite(raw_change) else clip

    def _passes(self, raw_change: float) -> bool:
        clip = self._mechanism.loss_clip
        std = 2 * clip * self._mechanism.validation_noise
        noise = float(self.noise.normal((1,), std, dtype=torch.float64))
        return raw_change + noise < self._mechanism.threshold * clip
