"""The real gate, sampler and noise on a toy whose released law is known exactly.

Five records and perhaps a sixth, with gradients of one dimension: enumerating all batches gives the accepted batches'
law, and with it the law of the released gradient and of the released reference as a mixture of normals. What the
code releases must follow it, under both of two adjacent data sets; deliberately wrong variants must not.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch
from scipy import stats
from scipy.special import ndtr

from sluice.mechanism.attempt import Attempt, ReferenceState
from sluice.mechanism.gates import ClippingBiasGate
from sluice.randomness.noise import NoiseSource, SeededNoise, noisy_sum
from sluice.randomness.sampling import PoissonSampler

ALPHA = 1e-4
NOISE_MULTIPLIER = 0.3
RATE = 0.5

GRADIENTS = (0.9, 0.6, -0.4, 0.2, 1.0)
NORMS = (5.0, 3.0, 0.2, 1.0, 9.0)
ADDED = (1.0, 9.0)


@dataclass(frozen=True)
class Toy:
    """A data set, a gate and the reference that the release is compared with."""

    gradients: tuple[float, ...]
    norms: tuple[float, ...]
    reference: float = 1.5
    gate: ClippingBiasGate = field(
        default_factory=lambda: ClippingBiasGate(
            beta=-0.1,
            clip_range=1.5,
            gate_noise=0.2,
            reference_noise=0.4,
            small_norm=0.5,
            large_norm=6.0,
            reference_decay=0.0,
        )
    )

    def mixture(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Weight, sum of gradients and metric of every batch, given that it is accepted."""
        gate, rows = self.gate, []
        for batch in itertools.product((False, True), repeat=len(self.norms)):
            chosen = [place for place, present in enumerate(batch) if present]
            metric = 0.0
            for place in chosen:
                norm = self.norms[place]
                metric += min(max((norm - 0.5) / 5.5, 0.0), 1.0)
            difference = min(max(self.reference - metric, -gate.clip_bound), gate.clip_bound)
            rows.append(
                (
                    RATE ** len(chosen)
                    * (1 - RATE) ** (len(batch) - len(chosen))
                    * ndtr(-(gate.threshold - difference) / gate.noise_std),
                    sum(self.gradients[place] for place in chosen),
                    metric,
                )
            )
        weights, sums, metrics = np.array(rows).T
        return weights / weights.sum(), sums, metrics


TOYS = {
    "without the record": Toy(gradients=GRADIENTS, norms=NORMS),
    "with the record": Toy(gradients=(*GRADIENTS, ADDED[0]), norms=(*NORMS, ADDED[1])),
}


@dataclass(frozen=True)
class Parts:
    """The parts of one release; each can be exchanged for a wrong one."""

    begin: Callable[[ClippingBiasGate, ReferenceState, NoiseSource], Attempt] = lambda gate, reference, noise: (
        gate.begin(reference, noise)
    )
    next_reference: Callable[[ClippingBiasGate, ReferenceState, float, NoiseSource], ReferenceState] = (
        lambda gate, reference, raw_metric, noise: gate.next_reference(reference, raw_metric, noise)
    )
    reuse_decision_noise: bool = False
    measure_first_chunk_only: bool = False
    rate: float = RATE
    noise_multiplier: float = NOISE_MULTIPLIER


def release(toy: Toy, parts: Parts, sampler: PoissonSampler, noise: NoiseSource) -> tuple[float, float]:
    """One release as an engine makes it: the noisy sum and the published reference."""
    gradients, norms = torch.tensor(toy.gradients), torch.tensor(toy.norms)
    reference = ReferenceState(value=toy.reference)
    attempt = parts.begin(toy.gate, reference, noise)
    while True:
        batch = sampler.sample()
        chunks = norms[batch].split(2)
        if all(attempt.add(chunk) for chunk in (chunks[:1] if parts.measure_first_chunk_only else chunks)):
            break
        if parts.reuse_decision_noise:
            attempt = Attempt(limit=attempt.limit, count=1, measure=toy.gate.measure)
        else:
            attempt = parts.begin(toy.gate, reference, noise)
    (released,) = noisy_sum(
        [gradients[batch].sum()], noise_multiplier=parts.noise_multiplier, sensitivity=1.0, noise=noise
    )
    return float(released), parts.next_reference(toy.gate, reference, attempt.raw_metric, noise).value


def p_values(toy: Toy, parts: Parts, *, releases: int, seed: int, against: Toy | None = None) -> list[float]:
    """Agreement with the exact mixture: of the gradient, the reference, and two combinations of both."""
    noise = SeededNoise(seed)
    sampler = PoissonSampler(dataset_size=len(toy.norms), sample_rate=parts.rate, source=noise)
    drawn = np.array([release(toy, parts, sampler, noise) for _ in range(releases)])
    weights, sums, metrics = (against or toy).mixture()
    result = []
    for along in ((1.0, 0.0), (0.0, 1.0), (1.0, 1.0), (1.0, -0.5)):
        means = along[0] * sums + along[1] * metrics
        assert toy.gate.reference_noise is not None
        std = math.hypot(along[0] * NOISE_MULTIPLIER, along[1] * toy.gate.reference_noise)

        def cdf(x: np.ndarray, means: np.ndarray = means, std: float = std) -> np.ndarray:
            return ndtr((np.asarray(x)[:, None] - means) / std) @ weights

        result.append(float(stats.kstest(drawn @ along, cdf).pvalue))
    return result


@pytest.mark.parametrize("name", list(TOYS))
def test_what_is_released_follows_the_exact_law(name: str) -> None:
    assert min(p_values(TOYS[name], Parts(), releases=2000, seed=1)) > ALPHA


@pytest.mark.slow
@pytest.mark.parametrize("name", list(TOYS))
def test_what_is_released_follows_the_exact_law_closely(name: str) -> None:
    assert min(p_values(TOYS[name], Parts(), releases=20_000, seed=10)) > ALPHA


def test_a_record_shows_by_the_batches_that_the_gate_prefers() -> None:
    """The tilt alone, of a record without gradient, under a gate sharp enough for a thousand releases to show it."""
    sharp = replace(TOYS["without the record"].gate, beta=-0.3, gate_noise=0.05)
    before = Toy(gradients=GRADIENTS, norms=NORMS, gate=sharp)
    after = Toy(gradients=(*GRADIENTS, 0.0), norms=(*NORMS, ADDED[1]), gate=sharp)
    gradient, *_ = p_values(before, Parts(), releases=1000, seed=2, against=after)
    assert gradient < ALPHA


WRONG = {
    "no gate": Parts(begin=lambda gate, reference, noise: Attempt(limit=math.inf, count=1, measure=gate.measure)),
    "gate noise of a rejected attempt used again": Parts(reuse_decision_noise=True),
    "only the first chunk measured": Parts(measure_first_chunk_only=True),
    "reference without noise": Parts(
        next_reference=lambda gate, reference, raw_metric, noise: ReferenceState(value=raw_metric)
    ),
    "sampled too often": Parts(rate=0.65),
    "noise of another scale": Parts(noise_multiplier=1.0),
    "reference one lower": Parts(
        begin=lambda gate, reference, noise: gate.begin(ReferenceState(value=reference.value - 1), noise)
    ),
}


@pytest.mark.parametrize("name", list(WRONG))
def test_wrong_parts_are_noticed(name: str) -> None:
    assert min(p_values(TOYS["with the record"], WRONG[name], releases=600, seed=3)) < ALPHA
