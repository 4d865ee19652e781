"""The bounds against the exact laws of a toy that can be enumerated: five other records, all their batches."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np
import pytest
from scipy.special import ndtr

from sluice.accounting.acceptance import Acceptance
from sluice.accounting.events import UNGATED, SelectiveReleaseDpEvent
from sluice.accounting.loss_distribution import DIRECTIONS, hockey_stick_bound
from sluice.accounting.selective_rdp import renyi_divergences

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
