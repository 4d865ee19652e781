"""The bounds against the exact laws of a toy that can be enumerated: five other records, all their batches."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from scipy.special import ndtr
from scipy.stats import binom

from sluice.accounting.acceptance import Acceptance
from sluice.accounting.events import UNGATED, SelectiveReleaseDpEvent
from sluice.accounting.loss_distribution import DIRECTIONS, hockey_stick_bound
from sluice.accounting.selective_rdp import renyi_divergences
from sluice.mechanism.gates import ClippingBiasGate
from sluice.mechanism.thinning import LARGEST_SHARE, ThinningGate
from sluice.randomness.noise import SeededNoise

ORDERS = np.array([1.5, 2.0, 4.0, 8.0, 20.0])
EPSILONS = np.array([0.0, 0.01, 0.05, 0.2, 0.5, 1.0, 2.0])


@dataclass(frozen=True, kw_only=True)
class Toy:
    """Others' one-dimensional gradients and metrics, the record z, and a gate with a public reference."""

    q: float
    sigma: float
    sr: float
    gate_std: float
    threshold: float
    clip: float
    reference: float
    gradients: tuple[float, ...]
    metrics: tuple[float, ...]
    z_gradient: float
    z_metric: float

    @property
    def event(self) -> SelectiveReleaseDpEvent:
        return SelectiveReleaseDpEvent(
            sampling_probability=self.q,
            noise_multiplier=self.sigma,
            reference_noise_multiplier=self.sr,
            acceptance=Acceptance.one_sided(
                threshold=self.threshold, clip_bound=self.clip, metric_bound=1.0, noise_std=self.gate_std
            ),
        )

    def accept(self, metric: float) -> float:
        difference = min(max(self.reference - metric, -self.clip), self.clip)
        return float(ndtr((difference - self.threshold) / self.gate_std))

    def law(self, *, with_z: bool) -> list[tuple[float, float, float]]:
        """(probability, released sum, metric) of every accepted batch."""
        outcomes = []
        for batch in itertools.product((0, 1), repeat=len(self.gradients)):
            for z in (0, 1) if with_z else (0,):
                sampled = math.prod(self.q if taken else 1 - self.q for taken in (*batch, *((z,) if with_z else ())))
                total = float(np.dot(batch, self.gradients)) + z * self.z_gradient
                metric = float(np.dot(batch, self.metrics)) + z * self.z_metric
                outcomes.append((sampled * self.accept(metric), total, metric))
        accepted = sum(weight for weight, _, _ in outcomes)
        return [(weight / accepted, total, metric) for weight, total, metric in outcomes]

    def densities(self) -> tuple[np.ndarray, np.ndarray]:
        """Densities of what is published with and without z, times the cell of the grid they are evaluated on."""
        reach = 9 * self.sigma
        first = np.linspace(-6 - reach, 6 + reach, 1601 if math.isinf(self.sr) else 241)
        second = np.array([0.0])
        if math.isfinite(self.sr):
            second = np.linspace(-9 * self.sr, 6 + 9 * self.sr, 241)
        cell = (first[1] - first[0]) * (second[1] - second[0] if second.size > 1 else 1.0)
        laws = []
        for with_z in (True, False):
            density = np.zeros((first.size, second.size))
            for weight, total, metric in self.law(with_z=with_z):
                along = np.exp(-0.5 * ((first - total) / self.sigma) ** 2) / (self.sigma * math.sqrt(2 * math.pi))
                across = np.ones(1)
                if math.isfinite(self.sr):
                    across = np.exp(-0.5 * ((second - metric) / self.sr) ** 2) / (self.sr * math.sqrt(2 * math.pi))
                density += weight * np.outer(along, across)
            laws.append(density.ravel() * cell)
        return laws[0], laws[1]


def random_toy(rng: np.random.Generator, *, with_reference: bool) -> Toy:
    return Toy(
        q=float(rng.choice([0.02, 0.2, 0.5, 0.8, 1.0])),
        sigma=float(rng.uniform(0.4, 12.0)),
        sr=float(rng.uniform(0.5, 10.0)) if with_reference else math.inf,
        gate_std=float(rng.uniform(0.25, 4.0)),
        threshold=float(rng.uniform(-1.0, 3.0)),
        clip=float(rng.uniform(0.3, 2.5)),
        reference=float(rng.uniform(-1.0, 5.0)),
        gradients=tuple(float(g) for g in rng.choice([-1.0, 0.0, 1.0, rng.uniform(-1, 1)], size=5)),
        metrics=tuple(float(e) for e in rng.choice([0.0, 1.0, rng.uniform(0, 1)], size=5)),
        z_gradient=float(rng.choice([-1.0, 1.0])),
        z_metric=float(rng.choice([0.0, 1.0, rng.uniform(0, 1)])),
    )


def exact_renyi(numerator: np.ndarray, denominator: np.ndarray) -> np.ndarray:
    usable = (numerator > 1e-290) & (denominator > 1e-290)
    top, bottom = np.log(numerator[usable]), np.log(denominator[usable])
    exponents = ORDERS[:, None] * top + (1 - ORDERS[:, None]) * bottom
    peaks = exponents.max(axis=1)
    return (peaks + np.log(np.exp(exponents - peaks[:, None]).sum(axis=1))) / (ORDERS - 1)


def exact_hockey_stick(numerator: np.ndarray, denominator: np.ndarray) -> np.ndarray:
    return np.array([np.maximum(numerator - math.exp(e) * denominator, 0).sum() for e in EPSILONS])


def excess(toy: Toy, event: SelectiveReleaseDpEvent) -> float:
    """How far the exact divergences of the toy exceed the bounds for ``event``, relatively; negative if they do not."""
    with_z, without = toy.densities()
    bound = renyi_divergences(event, ORDERS)
    worst = -math.inf
    for direction, top, bottom in (("remove", with_z, without), ("add", without, with_z)):
        assert direction in DIRECTIONS
        worst = max(worst, float(np.max(exact_renyi(top, bottom) / bound)) - 1)
        sticks = hockey_stick_bound(event, direction, EPSILONS, pieces=12)
        exact = exact_hockey_stick(top, bottom)
        relevant = exact > 1e-7
        if relevant.any():
            worst = max(worst, float(np.max(exact[relevant] / sticks[relevant])) - 1)
    return worst


@pytest.mark.parametrize("block", range(6))
def test_no_exact_divergence_exceeds_its_bound(block):
    rng = np.random.default_rng(block)
    ratios = [excess(toy, toy.event) for toy in (random_toy(rng, with_reference=False) for _ in range(50))]
    assert max(ratios) <= 1e-5


def test_the_bound_is_nearly_attained():
    rng = np.random.default_rng(0)
    ratios = [excess(toy, toy.event) for toy in (random_toy(rng, with_reference=False) for _ in range(50))]
    assert max(ratios) > -0.1


@pytest.mark.parametrize("block", range(3))
def test_no_exact_divergence_exceeds_its_bound_with_a_published_reference(block):
    rng = np.random.default_rng(100 + block)
    ratios = [excess(toy, toy.event) for toy in (random_toy(rng, with_reference=True) for _ in range(8))]
    assert max(ratios) <= 1e-5


CONTROL = Toy(
    q=0.5,
    sigma=10.0,
    sr=math.inf,
    gate_std=0.25,
    threshold=1.0,
    clip=2.0,
    reference=3.855708736872213,
    gradients=(-1.0, -1.0, 0.0, -1.0, -1.0),
    metrics=(1.0, 1.0, 0.0, 0.0, 1.0),
    z_gradient=1.0,
    z_metric=1.0,
)


def test_an_accountant_that_ignores_the_gate_is_caught():
    ignorant = SelectiveReleaseDpEvent(
        sampling_probability=CONTROL.q, noise_multiplier=CONTROL.sigma, acceptance=UNGATED
    )
    with_z, without = CONTROL.densities()
    at_four = list(ORDERS).index(4.0)
    exact = max(exact_renyi(with_z, without)[at_four], exact_renyi(without, with_z)[at_four])
    assert exact == pytest.approx(0.006147, abs=5e-7)
    assert renyi_divergences(ignorant, ORDERS)[at_four] == pytest.approx(0.005044, abs=5e-7)
    assert renyi_divergences(CONTROL.event, ORDERS)[at_four] == pytest.approx(0.2261, abs=5e-5)
    assert excess(CONTROL, ignorant) > 0.2
    assert excess(CONTROL, CONTROL.event) <= 0


def test_ignoring_the_gate_fails_on_random_toys_too():
    rng = np.random.default_rng(7)
    caught = 0
    for _ in range(40):
        toy = random_toy(rng, with_reference=False)
        plain = SelectiveReleaseDpEvent(sampling_probability=toy.q, noise_multiplier=toy.sigma, acceptance=UNGATED)
        caught += excess(toy, plain) > 1e-3
    assert caught >= 1


def test_a_reference_that_is_not_charged_is_caught():
    """Publishing the metric with little noise, and accounting as if it were not published, must fail."""
    rng = np.random.default_rng(11)
    toy = Toy(
        q=0.5,
        sigma=4.0,
        sr=0.5,
        gate_std=2.0,
        threshold=1.0,
        clip=2.0,
        reference=2.0,
        gradients=(1.0, 0.0, -1.0, 0.0, 1.0),
        metrics=(0.0, 0.0, 0.0, 0.0, 0.0),
        z_gradient=float(rng.choice([-1.0, 1.0])),
        z_metric=1.0,
    )
    free = SelectiveReleaseDpEvent(
        sampling_probability=toy.q, noise_multiplier=toy.sigma, acceptance=toy.event.acceptance
    )
    assert excess(toy, free) > 0.1
    assert excess(toy, toy.event) <= 1e-5


# Gates whose acceptance is a product over records (docs/accounting.md, section 13).


@dataclass(frozen=True, kw_only=True)
class FactorisingToy(Toy):
    """The same toy, accepted with probability ``prod exp(-strength * metric)``, up to a factor that is the same for all batches."""

    strength: float

    def accept(self, metric: float) -> float:
        return math.exp(-self.strength * metric)

    @property
    def gate(self) -> ThinningGate:
        return ThinningGate(strength=self.strength, small_norm=0.0, large_norm=1.0)

    @property
    def candidate_rate(self) -> float:
        return self.gate.candidate_rate(self.q)

    def charged_at(self, rate: float) -> SelectiveReleaseDpEvent:
        return SelectiveReleaseDpEvent(sampling_probability=rate, noise_multiplier=self.sigma, acceptance=UNGATED)

    @property
    def event(self) -> SelectiveReleaseDpEvent:
        return self.charged_at(self.candidate_rate)

    def thinned_law(self, *, with_z: bool) -> dict[tuple[int, ...], float]:
        """The probability of every batch where candidates are drawn once and kept by coins of their own."""
        metrics = torch.tensor([*self.metrics, *((self.z_metric,) if with_z else ())], dtype=torch.float64)
        kept = self.gate.keep_probability(metrics, sample_rate=self.candidate_rate).tolist()
        rates = [self.candidate_rate * each / LARGEST_SHARE for each in kept]
        return {
            batch: math.prod(rate if taken else 1 - rate for rate, taken in zip(rates, batch, strict=True))
            for batch in itertools.product((0, 1), repeat=len(rates))
        }


def factorising_toy(rng: np.random.Generator, *, strengths: tuple[float, float]) -> FactorisingToy:
    plain = random_toy(rng, with_reference=False)
    return FactorisingToy(
        **{**vars(plain), "q": float(rng.choice([0.02, 0.2, 0.5, 0.8]))}, strength=float(rng.uniform(*strengths))
    )


@pytest.mark.parametrize("with_z", [True, False])
def test_rejecting_batches_and_thinning_them_give_the_same_law(with_z):
    rng = np.random.default_rng(20)
    for _ in range(60):
        toy = factorising_toy(rng, strengths=(-5, 5))
        thinned = toy.thinned_law(with_z=with_z)
        for batch, (rejected, _, _) in zip(thinned, toy.law(with_z=with_z), strict=True):
            assert rejected == pytest.approx(thinned[batch], rel=2e-5, abs=1e-15)


@pytest.mark.parametrize("strengths", [(0.0, 6.0), (-3.0, 0.0)], ids=["small gradients preferred", "large ones"])
@pytest.mark.parametrize("block", range(3))
def test_a_factorising_gate_never_costs_more_than_plain_sampling(block, strengths):
    rng = np.random.default_rng(200 + block)
    toys = [factorising_toy(rng, strengths=strengths) for _ in range(50)]
    assert max(excess(toy, toy.event) for toy in toys) <= 1e-6


def test_a_factorising_gate_attains_what_is_charged_and_can_cost_less():
    rng = np.random.default_rng(3)
    toys = [factorising_toy(rng, strengths=(0.5, 6.0)) for _ in range(50)]
    ratios = [1 + excess(toy, toy.event) for toy in toys]
    assert max(ratios) > 0.999  # records whose metric is 0, and nobody beside them
    assert min(ratios) < 0.5


def test_charging_a_negative_strength_at_the_plain_rate_is_caught():
    rng = np.random.default_rng(9)
    caught = 0
    for _ in range(20):
        toy = replace(factorising_toy(rng, strengths=(-3.0, -1.0)), z_metric=1.0)
        exact = exact_renyi(*toy.densities())
        assert (exact <= renyi_divergences(toy.event, ORDERS) * (1 + 1e-6)).all()
        caught += bool((exact > 1.1 * renyi_divergences(toy.charged_at(toy.q), ORDERS)).any())
    assert caught >= 5


def test_the_metric_of_other_records_does_not_matter():
    """The tilt of the other records, which costs so much elsewhere, is none here: they may be anything."""
    rng = np.random.default_rng(12)
    alone = replace(factorising_toy(rng, strengths=(2.0, 3.0)), z_metric=1.0)
    inclusion = {
        metrics: sum(
            weight for batch, weight in replace(alone, metrics=metrics).thinned_law(with_z=True).items() if batch[-1]
        )
        for metrics in ((0.0,) * 5, (1.0,) * 5, (0.3, 1.0, 0.0, 0.7, 0.2))
    }
    assert max(inclusion.values()) == pytest.approx(min(inclusion.values()), rel=1e-12)


# The gate of selective release is nearly one of these: how much rarer records are that it counts fully, or by half.
INCLUSION = {0.93: (0.2392, 0.8847, 0.9421), 2.9: (0.4013, 0.9701, 0.9850)}


def gate_for_inclusion(gate_noise: float) -> ClippingBiasGate:
    return ClippingBiasGate(
        beta=3.0, clip_range=2.0, gate_noise=gate_noise, reference_noise=math.inf, initial_reference=23.0, small_norm=0.0, large_norm=1.0
    )  # fmt: skip


def exact_inclusion(gate: ClippingBiasGate, *, rate: float, records: int) -> tuple[float, float, float]:
    """Acceptance, and the factors of the odds of metrics 1 and 1/2; three, four and three of ten records have 0, 1/2 and 1."""
    counts = np.arange(400)
    ones, halves = (binom.pmf(counts, records * share // 10, rate) for share in (3, 4))
    spread = np.zeros(2 * counts.size)
    spread[::2] = ones
    law = np.convolve(halves, spread)[: counts.size]

    def accepted(extra: float) -> float:
        difference = np.clip(23.0 - counts / 2 - extra, -gate.clip_bound, gate.clip_bound)
        return float(law @ ndtr((difference - gate.threshold) / gate.noise_std))

    return accepted(0.0), accepted(1.0) / accepted(0.0), accepted(0.5) / accepted(0.0)


@pytest.mark.parametrize("gate_noise", INCLUSION)
def test_the_gate_of_selective_release_tilts_odds_nearly_exponentially(gate_noise):
    acceptance, full, half = exact_inclusion(gate_for_inclusion(gate_noise), rate=0.017, records=2700)
    assert (acceptance, full, half) == pytest.approx(INCLUSION[gate_noise], abs=6e-5)
    assert half == pytest.approx(math.sqrt(full), abs=0.002)


def test_inclusion_weights_of_the_gate_as_implemented_agree_within_monte_carlo_error():
    """The real gate, on batches by their counts of records with metrics 1/2 and 1."""
    gate, rate, records, releases = gate_for_inclusion(0.93), 0.017, 2700, 2000
    rng, noise = np.random.default_rng(1), SeededNoise(4)
    sizes = {0.0: records - 7 * records // 10, 0.5: 4 * records // 10, 1.0: 3 * records // 10}
    included = dict.fromkeys(sizes, 0)
    for _ in range(releases):
        while True:
            drawn = {metric: int(rng.binomial(size, rate)) for metric, size in sizes.items()}
            attempt = gate.begin(gate.first_reference(), noise)
            attempt.add_metric(sum(metric * count for metric, count in drawn.items()))
            if attempt.accepted:
                break
        for metric, count in drawn.items():
            included[metric] += count
    odds = {metric: included[metric] / (releases * sizes[metric] - included[metric]) for metric in sizes}
    _, full, half = exact_inclusion(gate, rate=rate, records=records)
    for metric, expected in ((1.0, full), (0.5, half)):
        error = expected * math.sqrt(1 / included[metric] + 1 / included[0.0])
        assert odds[metric] / odds[0.0] == pytest.approx(expected, abs=4 * error)
    tilt = -math.log(odds[1.0] / odds[0.0])
    error = math.sqrt(1 / included[0.5] + 1 / included[0.0])
    assert odds[0.5] / odds[0.0] == pytest.approx(math.exp(-tilt / 2), abs=4 * error)
