"""What makes the releases of `sluice.mechanism.clipped_release`: clip as the mechanism says, add noise, move the bound."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sluice._base.errors import InputError
from sluice.gradients import Chunk
from sluice.mechanism.clipped_release import ClippedRelease
from sluice.mechanism.clipping import COUNT_GRID, COUNT_RAMP, FlatClipping, LayerClipping, QuantileClipping, count_error
from sluice.mechanism.scaling import Clip
from sluice.randomness.sampling import PoissonSampler
from sluice.training.context import Loss, RawSum, TrainingContext
from sluice.training.executor import Draft, PiecewiseExecutor


@dataclass(frozen=True, kw_only=True)
class ClippedBatch:
    """What a batch left: sensitive until noise is added.

    Attributes:
        turn: how many releases were charged before this one.
        sensitivity: what one record adds to the sum at most: public.
        raw_count: the sum of what `unclipped` says.
    """

    turn: int
    sensitivity: float
    raw_sum: RawSum
    raw_count: float


def unclipped(norms: Tensor, *, bound: float) -> Tensor:
    """For each record 1/2 if its norm is below the bound, -1/2 if it is above, and in between near it, in float64.

    Guarantee:
        A continuous function of a record's own norm, up to a grid on which sums are exact; infinite or NaN count as -1/2.
    """
    away = (norms.detach().double() / bound - 1) / (2 * COUNT_RAMP)
    clipped = away.nan_to_num(nan=math.inf, posinf=math.inf).clamp(-0.5, 0.5)
    return torch.round(-clipped / COUNT_GRID) * COUNT_GRID


class ClippedReleaseExecutor(PiecewiseExecutor[ClippedBatch]):
    """Makes the releases of a `ClippedRelease`, one batch each.

    Attributes:
        bound: the bound of the next batch where it follows a quantile, else 0; public.

    Guarantee:
        Given what was released before, a release is a Poisson sample at ``mechanism.sample_rate`` and the sum of its
        gradients, to which one record adds at most ``sensitivity``, with noise `ClippedRelease.gradient_noise_at` times
        that; and where a bound is moved, a count to which one record adds at most 1/2, with noise ``count_noise``. Divisors
        are public. (docs/accounting.md, sections 12.2 to 12.4)
    """

    takes_workers = True

    def __init__(self, mechanism: ClippedRelease, context: TrainingContext) -> None:
        super().__init__(releases=mechanism.releases, context=context)
        self.mechanism = mechanism
        clipping = mechanism.clipping
        self.bound = clipping.max_grad_norm if isinstance(clipping, QuantileClipping) else 0.0
        self._sampler = PoissonSampler(
            dataset_size=context.dataset_size, sample_rate=mechanism.sample_rate, source=context.noise
        )
        self._require_layers()
        self._begin()

    def _require_layers(self) -> None:
        clipping = self.mechanism.clipping
        if not isinstance(clipping, LayerClipping):
            return
        found = layers_of(self.context.module)
        if set(clipping.layers) != set(found):
            raise InputError(
                f"layers={sorted(clipping.layers)} is not allowed for this model: give a bound for each of {sorted(found)}."
            )

    @property
    def expected_batch_size(self) -> float:
        return self.mechanism.expected_batch_size

    @property
    def still_possible(self) -> bool:
        return True

    def prepare(self, loss: Loss) -> Draft[ClippedBatch]:
        for chunk in self.context.chunks(self.draw(), loss):
            self.absorb(chunk)
            del chunk
        return self._draft()

    def draw(self) -> Tensor:
        self.require_more()
        self._begin()
        return self._sampler.sample()

    def absorb(self, chunk: Chunk | None) -> bool:
        if chunk is None:
            return True
        self._measured += len(chunk)
        self._raw_sum.add(chunk, self._weights(chunk))
        if isinstance(self.mechanism.clipping, QuantileClipping):
            self._raw_count += float(unclipped(chunk.norms, bound=self.bound).sum())
        return True

    def finish(self) -> bool:
        self.commit(self._draft())
        return True

    def publish(self, content: ClippedBatch) -> dict[str, Any]:
        mechanism, expected = self.mechanism, self.mechanism.expected_batch_size
        noisy = self.context.noisy(
            content.raw_sum,
            noise_multiplier=mechanism.gradient_noise_at(content.turn),
            sensitivity=content.sensitivity,
        )
        gradient = {name: each.div_(expected) for name, each in noisy.items()}
        return {"gradient": self.context.as_update(gradient), "bound": self._next_bound(content.raw_count)}

    def _next_bound(self, raw_count: float) -> float:
        clipping, expected = self.mechanism.clipping, self.mechanism.expected_batch_size
        if not isinstance(clipping, QuantileClipping):
            return self.bound
        noisy_count = self.noise.noisy_number(
            raw_count,
            noise_multiplier=2 * clipping.noise,
            sensitivity=0.5,
            sum_error=count_error(expected),
        )
        return clipping.next_bound(self.bound, 0.5 + noisy_count / expected)

    def update(self, published: Mapping[str, Any]) -> None:
        self.load_own_state(published)
        self.context.apply(published["gradient"])

    def own_state(self) -> dict[str, Any]:
        return {"bound": self.bound}

    def load_own_state(self, state: Mapping[str, Any]) -> None:
        self.bound = state["bound"]
        self._begin()

    def _weights(self, chunk: Chunk) -> Tensor | dict[str, Tensor]:
        clipping = self.mechanism.clipping
        if isinstance(clipping, LayerClipping):
            bounds, norms = clipping.bounds_at(self._turn), chunk.norms_by_layer()
            return {layer: Clip(max_grad_norm=bounds[layer])(each) for layer, each in norms.items()}
        return Clip(max_grad_norm=self._sensitivity())(chunk.norms)

    def _sensitivity(self) -> float:
        clipping = self.mechanism.clipping
        if isinstance(clipping, LayerClipping):
            return math.hypot(*clipping.bounds_at(self._turn).values())
        return clipping.bound_at(self._turn) if isinstance(clipping, FlatClipping) else self.bound

    def _draft(self) -> Draft[ClippedBatch]:
        # Exact in float64, the count because it lies on a grid: the same for all workers, in whatever order.
        own = torch.tensor((self._raw_count, self._measured), dtype=torch.float64)
        raw_count, measured = self.context.workers.total(own).tolist()
        content = ClippedBatch(
            turn=self._turn, sensitivity=self._sensitivity(), raw_sum=self._raw_sum, raw_count=raw_count
        )
        return Draft(content=content, measured=int(measured), metric=raw_count)

    def _begin(self) -> None:
        self.batch += 1
        self._turn = self.spent
        self._raw_sum: RawSum = self.context.raw_sum()
        self._raw_count = 0.0
        self._measured = 0


def layers_of(module: torch.nn.Module) -> list[str]:
    """The names that `LayerClipping` has for the layers of a model: of modules that hold trainable parameters."""
    names = (name.rpartition(".")[0] for name, p in module.named_parameters() if p.requires_grad)
    return list(dict.fromkeys(names))


__all__ = ["ClippedReleaseExecutor", "layers_of", "unclipped"]
