"""One release of DPIS: candidates, thinned by their norms, and two statistics of them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sluice.mechanism.scaling import MARGIN
from sluice.methods.dpis import ImportanceSampling
from sluice.randomness.noise import noisy_sum
from sluice.randomness.sampling import PoissonSampler
from sluice.training.context import Loss, RawSum, TrainingContext
from sluice.training.executor import Draft, ReplayableExecutor

# No candidate is kept more rarely than this, and none has a weight above 1 / (LEAST_SHARE C): rounding errors of tiny
# norms are not blown up. The estimate stays unbiased, because the gradient of a record kept so often is not lengthened to C.
LEAST_SHARE = 2.0**-10

# The count of clipped gradients rises over norms from (1 - CLIP_RAMP) C to (1 + CLIP_RAMP) C.
CLIP_RAMP = 2.0**-5

# C stays within this factor of the first one, whatever the noise says.
CLIP_RANGE = 10.0


@dataclass(frozen=True, kw_only=True)
class Shares:
    """What each candidate's norm makes of it.

    Attributes:
        keep: probability of being kept: min(norm, C) / C, at least `LEAST_SHARE`. Also the first statistic.
        weight: with it a kept gradient has length 1 (C, in units of C), or less where ``keep`` is at its least.
        clipped: the second statistic: 1/2 for norms above C, -1/2 for smaller ones, and in between, within `CLIP_RAMP` of
            C, rising evenly: a jump would turn rounding errors of norms into whole counts.
    """

    keep: Tensor
    weight: Tensor
    clipped: Tensor


def shares(norms: Tensor, *, clip_norm: float) -> Shares:
    """From norms to shares, each by itself, in float64.

    Guarantee:
        For every norm, also with an error of 1e-5 in it: ``weight * norm <= 1`` and ``0 < keep <= 1``. ``keep * weight * C``
        is the weight of clipping, ``min(1, C / norm)``, but for the margin of the scaling rules. Not finite norms count as
        0: kept at the least rate, contributing nothing, not clipped.
    """
    exact = norms.detach().double().cpu()
    exact = torch.where(exact.isfinite(), exact, 0.0)
    long_enough = exact.clamp(min=LEAST_SHARE * clip_norm)
    return Shares(
        keep=(long_enough / clip_norm).clamp(max=1.0),
        weight=(1 - MARGIN) / long_enough,
        clipped=((exact / clip_norm - 1) / (2 * CLIP_RAMP)).clamp(-0.5, 0.5),
    )


def _on_grid(shares: Tensor) -> Tensor:
    """Rounded down to multiples of 2^-26, so that float64 adds up those of 2^26 records exactly, in any order."""
    return torch.floor(shares * 2.0**26).mul_(2.0**-26)


@dataclass(frozen=True, kw_only=True)
class RawSums:
    """The three sums over the candidates, and the divisor that is public: sensitive until noise is added."""

    gradients: RawSum
    shares: Tensor
    clipped: Tensor
    expected: float


class ImportanceSamplingExecutor(ReplayableExecutor[RawSums]):
    """Makes the releases of DPIS.

    Attributes:
        mean_share: the public estimate of the mean of min(norm, C) / C. Times N C it is the normaliser of the paper.
        clip_norm: the present C; public.

    Guarantee:
        Given what was released before, one release is a Poisson sample at a rate of at most ``mechanism.sample_rate``, and
        sums over it to which one record adds at most 1, 1 and 1/2, with normal noise of ``noise_multiplier``,
        ``norm_noise`` and ``count_noise`` (docs/methods-dpis.md, section 3). Divisors are public. Which candidates were
        kept is a coin of each record's own.
    """

    takes_workers = True

    def __init__(self, mechanism: ImportanceSampling, context: TrainingContext) -> None:
        super().__init__(releases=mechanism.releases, context=context)
        self.mechanism = mechanism
        self.mean_share = 1.0
        self.clip_norm = mechanism.first_clip_norm

    def prepare(self, loss: Loss) -> Draft[RawSums]:
        rate = self.mechanism.rate_at(self.mean_share)
        sampler = PoissonSampler(dataset_size=self.context.dataset_size, sample_rate=rate, source=self.noise)
        candidates = sampler.sample()
        sums, kept = self._measure(candidates, loss, expected=rate * self.mechanism.dataset_size)
        return Draft(content=sums, measured=len(candidates), metric=float(kept))

    def _measure(self, candidates: Tensor, loss: Loss, *, expected: float) -> tuple[RawSums, int]:
        """The raw sums over the candidates, and how many were kept: sensitive."""
        workers = self.context.workers
        coins = workers.own(self.noise.uniform((len(candidates),)))
        raw_sum = self.context.raw_sum()
        raw = torch.zeros(3, dtype=torch.float64)  # shares, clipped gradients, candidates that are kept
        start = 0
        for chunk in self.context.chunks(candidates, loss):
            norms = chunk.norms
            found = shares(norms, clip_norm=self.clip_norm)
            is_kept = coins[start : start + len(chunk)] < found.keep
            weights = torch.where(is_kept, found.weight, 0.0).to(dtype=norms.dtype, device=norms.device)
            raw_sum.add(chunk, weights)
            raw += torch.stack([_on_grid(found.keep).sum(), _on_grid(found.clipped).sum(), is_kept.sum()])
            start += len(chunk)
        raw_shares, raw_clipped, kept = workers.total(raw).split(1)
        return RawSums(gradients=raw_sum, shares=raw_shares, clipped=raw_clipped, expected=expected), int(kept)

    def publish(self, content: RawSums) -> dict[str, Any]:
        mechanism, expected = self.mechanism, content.expected
        noisy = self.context.noisy(content.gradients, noise_multiplier=mechanism.noise_multiplier, sensitivity=1.0)
        for raw, multiplier, sensitivity in (
            (content.shares, mechanism.norm_noise, 1.0),
            (content.clipped, 2 * mechanism.count_noise, 0.5),
        ):
            noisy_sum([raw], noise_multiplier=multiplier, sensitivity=sensitivity, noise=self.noise)
        scale = mechanism.first_clip_norm / expected
        return {
            "gradient": self.context.as_update({name: each.mul_(scale) for name, each in noisy.items()}),
            "share": float(content.shares) / expected,
            "clipped": 0.5 + float(content.clipped) / expected,
        }

    def update(self, published: Mapping[str, Any]) -> None:
        self._adapt(share=published["share"], clipped=published["clipped"])
        self.context.apply(published["gradient"])

    def _adapt(self, *, share: float, clipped: float) -> None:
        """Set the next rate and C from what was just released: post-processing."""
        mechanism = self.mechanism
        decay = mechanism.norm_decay
        seen = min(max(share, LEAST_SHARE), 1.0)
        self.mean_share = decay * self.mean_share + (1 - decay) * seen
        away = min(max(clipped, 0.0), 1.0) - mechanism.clip_target
        moved = self.clip_norm * math.exp(mechanism.clip_rate * away)
        first = mechanism.first_clip_norm
        self.clip_norm = min(max(moved, first / CLIP_RANGE), first * CLIP_RANGE)

    def own_state(self) -> dict[str, Any]:
        return {"mean_share": self.mean_share, "clip_norm": self.clip_norm}

    def load_own_state(self, state: Mapping[str, Any]) -> None:
        self.mean_share, self.clip_norm = state["mean_share"], state["clip_norm"]
