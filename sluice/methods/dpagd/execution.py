"""What makes the measurements of DPAGD: noisy gradients, noisy minima, and the filter that keeps them in the budget."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from sluice.mechanism.scaling import Clip
from sluice.methods.dpagd import AdaptiveBudget, usable_rho
from sluice.randomness.noise import NoiseSource
from sluice.randomness.sampling import PoissonSampler
from sluice.training.context import Loss, TrainingContext
from sluice.training.executor import Draft, ReplayableExecutor

# Losses are counted in this many parts of the clipping bound, as integers: their sums are exact.
LOSS_PARTS = 2**30


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """A noisy gradient and the step that was selected along it, before they count.

    Attributes:
        cost: what both cost together.
        gradient_rho: what the gradient has cost so far, measurements averaged into it included.
        step: 0 where no step was worth making.
    """

    cost: float
    noisy_gradient: dict[str, Tensor]
    gradient_rho: float
    step: float


class AdaptiveDescent(ReplayableExecutor[Measurement]):
    """Makes the measurements of DPAGD. One "release" is one of them: a gradient and a selection, with a step or without.

    Attributes:
        spent_rho: what has been measured so far has cost this much.
        gradient_rho: what the present gradient, or the next one, costs in all.
        reach: the longest step of the grid.

    Guarantee:
        A measurement is ``rho_g + rho_s``-zCDP given all earlier ones, and begins only if its cost still fits into
        ``mechanism.rho``. All of it is public but the raw sums, which go no further than where they are made: noisy gradients, chosen
        steps and budgets. Measurements that a crash took are charged the most that they can have cost.
    """

    takes_workers = True

    def __init__(self, mechanism: AdaptiveBudget, context: TrainingContext) -> None:
        super().__init__(releases=mechanism.releases, context=context)
        self.mechanism = mechanism
        self.spent_rho = 0.0
        self.gradient_rho = mechanism.gradient_rho
        self.reach = mechanism.first_reach
        self._recent_steps: list[float] = []
        self._noisy_gradient: dict[str, Tensor] | None = None
        self._lost_and_paid = 0
        self._rule = Clip(max_grad_norm=mechanism.max_grad_norm)

    @property
    def done(self) -> bool:
        """Whether what is left of the budget does not suffice for the next measurement: public."""
        return super().done or self.spent_rho + self._next_cost > usable_rho(self.mechanism.rho)

    @property
    def _next_gradient_cost(self) -> float:
        return self.gradient_rho if self._noisy_gradient is None else self.mechanism.gamma * self.gradient_rho

    @property
    def _next_cost(self) -> float:
        return self._next_gradient_cost + self.mechanism.selection_rho

    def prepare(self, loss: Loss) -> Draft[Measurement]:
        cost = self._next_gradient_cost
        sample = self._sample(self.mechanism.gradient_rate)
        noisy_gradient = self._noisy_sum_of_gradients(sample, loss, rho=cost)
        gradient_rho = self.gradient_rho
        if self._noisy_gradient is not None:
            noisy_gradient = averaged(self._noisy_gradient, noisy_gradient, weights=(self.gradient_rho, cost))
            gradient_rho += cost
        steps = [self.reach * index / self.mechanism.candidates for index in range(self.mechanism.candidates + 1)]
        raw_sums = self._raw_losses_along(unit_vector(noisy_gradient), steps, loss)
        step = steps[noisy_minimum(raw_sums, rho=self.mechanism.selection_rho, noise=self.noise)]
        measurement = Measurement(
            cost=self._next_cost, noisy_gradient=noisy_gradient, gradient_rho=gradient_rho, step=step
        )
        return Draft(content=measurement, measured=len(sample), metric=step)

    def publish(self, content: Measurement) -> dict[str, Any]:
        return dict(vars(content))

    def update(self, published: Mapping[str, Any]) -> None:
        content = Measurement(**published)
        self.spent_rho += content.cost
        self.gradient_rho = content.gradient_rho
        self._noisy_gradient = content.noisy_gradient
        if content.step:
            self._noisy_gradient = None
            self._refresh(content.step)
            direction = unit_vector(content.noisy_gradient)
            self.context.updater.move(moved(self.context.updater.weights(), direction, content.step))

    def _sample(self, rate: float) -> Tensor:
        return PoissonSampler(dataset_size=self.context.dataset_size, sample_rate=rate, source=self.noise).sample()

    def _noisy_sum_of_gradients(self, sample: Tensor, loss: Loss, *, rho: float) -> dict[str, Tensor]:
        """The sum of clipped gradients with noise.

        Guarantee:
            A Gaussian mechanism with noise multiplier ``1 / sqrt(2 rho)``: rho-zCDP.
        """
        raw_sum = self.context.raw_sum()
        for chunk in self.context.chunks(sample, loss):
            raw_sum.add(chunk, self._rule(chunk.norms))
        return self.context.noisy(raw_sum, noise_multiplier=1 / math.sqrt(2 * rho), sensitivity=self._rule.sensitivity)

    def _raw_losses_along(self, direction: Mapping[str, Tensor], steps: Sequence[float], loss: Loss) -> Tensor:
        """The summed losses after each step, of the same records: integers, sensitive. The weights come back."""
        sample = self._sample(self.mechanism.loss_rate)
        weights = self.context.updater.weights()
        with torch.no_grad(), self.context.updater.trial() as parameters:

            def make(step: float) -> None:
                for name, value in moved(weights, direction, step).items():
                    parameters[name].copy_(value)

            raw_losses = self.context.raw_losses_at([partial(make, step) for step in steps], sample, loss)
        raw_parts = loss_parts(raw_losses, loss_clip=self.mechanism.loss_clip)
        return self.context.workers.total(raw_parts.sum(dim=1))

    def _refresh(self, step: float) -> None:
        """Take the longest of the steps made lately as the measure of those to come."""
        self._recent_steps.append(step)
        if len(self._recent_steps) == self.mechanism.refresh_every:
            self.reach = (1 + self.mechanism.reach_growth) * max(self._recent_steps)
            self._recent_steps = []

    def own_state(self) -> dict[str, Any]:
        return {
            "spent_rho": self.spent_rho,
            "gradient_rho": self.gradient_rho,
            "reach": self.reach,
            "recent_steps": list(self._recent_steps),
            "noisy_gradient": self._noisy_gradient,
            "lost_and_paid": self._lost_and_paid,
        }

    def load_own_state(self, state: Mapping[str, Any]) -> None:
        self.spent_rho, self.gradient_rho = state["spent_rho"], state["gradient_rho"]
        self.reach = state["reach"]
        self._recent_steps = list(state["recent_steps"])
        self._noisy_gradient = state["noisy_gradient"]
        self._lost_and_paid = state["lost_and_paid"]

    def catch_up(self) -> None:
        """Charge measurements that were logged and lost: each the most it can have cost, all what was left at most."""
        most = max(1.0, self.mechanism.gamma) * self.gradient_rho
        for _ in range(self.lost - self._lost_and_paid):
            if self.spent_rho >= self.mechanism.rho:
                break
            self.spent_rho += most + self.mechanism.selection_rho
            most *= 1 + self.mechanism.gamma
        self.spent_rho = min(self.spent_rho, self.mechanism.rho)
        self._lost_and_paid = max(self._lost_and_paid, self.lost)


def moved(weights: Mapping[str, Tensor], direction: Mapping[str, Tensor], step: float) -> dict[str, Tensor]:
    """The weights after a step against a direction."""
    return {name: value - step * direction[name].to(value) for name, value in weights.items()}


def unit_vector(gradient: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The direction of a gradient that is already public."""
    length = math.sqrt(sum(float(part.double().square().sum()) for part in gradient.values()))
    return {name: part / length if length > 0 else part for name, part in gradient.items()}


def averaged(
    first: Mapping[str, Tensor], second: Mapping[str, Tensor], *, weights: tuple[float, float]
) -> dict[str, Tensor]:
    """The mean of two noisy values of one sum. With their budgets as weights it is as exact as one at both together."""
    share = weights[0] / (weights[0] + weights[1])
    return {name: share * part + (1 - share) * second[name] for name, part in first.items()}


def loss_parts(losses: Tensor, *, loss_clip: float) -> Tensor:
    """Losses clipped to [0, loss_clip], as an integer number of parts of it. What is not a number counts as loss_clip.

    Guarantee:
        Every entry is in 0 .. LOSS_PARTS and depends on its own loss alone.
    """
    known = torch.where(losses.isnan(), loss_clip, losses.double())
    return (known / loss_clip).clamp(0.0, 1.0).mul(LOSS_PARTS).floor().to(torch.int64)


def noisy_minimum(raw_sums: Tensor, *, rho: float, noise: NoiseSource) -> int:
    """The index of one of the sums, with probability proportional to ``exp(-sqrt(8 rho) sum / LOSS_PARTS)``.

    A race of exponential clocks, whose logarithms are Gumbel noise: the same law as adding that and taking the least.

    Guarantee:
        rho-zCDP where one record adds 0 .. LOSS_PARTS to every sum (docs/methods-dpagd.md, section 3). Clocks have 53
        digits where they are late and 107 where they are early, so that probabilities far below 2^-53 are right too.
    """
    penalties = (raw_sums - raw_sums.min()).double() * (math.sqrt(8 * rho) / LOSS_PARTS)
    digits = noise.uniform((2, len(raw_sums)))
    uniform = digits[0] + 2.0**-53 * (digits[1] + 2.0**-54)
    clocks = -torch.log1p(-uniform.clamp(max=1 - 2.0**-53))
    return int(torch.argmin(clocks.log() + penalties))
