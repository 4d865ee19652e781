"""The proof of docs/convergence.md, step by step, on quadratics with so few records that all batches can be listed."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace

import numpy as np
import pytest
import scipy
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from sluice._base.errors import InputError
from sluice.experiments.convergence.bound import Descent, Selection, inclusion
from sluice.mechanism.gates import ClippingBiasGate, CoinGate, Gate
from sluice.mechanism.scaling import Clip, GlobalScaling
from sluice.mechanism.selective_release import SelectiveRelease

TIGHT = 1e-9
numbers = st.floats(-3, 3, allow_nan=False).map(lambda value: round(value, 3))


@dataclass(frozen=True, kw_only=True)
class Case:
    """Half the squared distances from a few points, at some weights, with a gate's reference."""

    descent: Descent
    points: np.ndarray
    weights: np.ndarray
    reference: float

    @property
    def each(self) -> np.ndarray:
        return self.weights - self.points

    @property
    def norms(self) -> np.ndarray:
        return np.linalg.norm(self.each, axis=1)

    @property
    def gradient(self) -> np.ndarray:
        return self.each.mean(axis=0)

    @property
    def value(self) -> float:
        return float((self.norms**2).mean()) / 2

    def law(self) -> list[tuple[float, tuple[int, ...]]]:
        """Accepted batches with their probabilities, from the definitions of sampling and gate."""
        gate, rate = self.descent.mechanism.gate, self.descent.mechanism.sample_rate
        count = len(self.points)
        found = []
        for size in range(count + 1):
            for batch in itertools.combinations(range(count), size):
                weight = rate**size * (1 - rate) ** (count - size)
                found.append((weight * self._acceptance(gate, batch), batch))
        total = sum(weight for weight, _ in found)
        return [(weight / total, batch) for weight, batch in found]

    def _acceptance(self, gate: Gate | None, batch: tuple[int, ...]) -> float:
        if gate is None:
            return 1.0
        if isinstance(gate, CoinGate):
            return gate.probability
        assert isinstance(gate, ClippingBiasGate)
        metric = float(gate.measure(torch.from_numpy(self.norms[list(batch)])).sum())
        difference = min(max(self.reference - metric, -gate.clip_bound), gate.clip_bound)
        return float(scipy.special.ndtr((difference - gate.threshold) / gate.noise_std))

    def release(self, batch: tuple[int, ...]) -> np.ndarray:
        """The sum of a batch, before noise, over the expected size."""
        mechanism = self.descent.mechanism
        weights = mechanism.scaling(torch.from_numpy(self.norms)).numpy()
        chosen = list(batch)
        total: np.ndarray = (weights[chosen, None] * self.each[chosen]).sum(axis=0)
        return total / mechanism.expected_batch_size

    def mean_release(self) -> np.ndarray:
        return sum(weight * self.release(batch) for weight, batch in self.law())

    def bias(self) -> float:
        bound = self.descent.scaling.bound
        lost = (np.maximum(1 - bound / np.maximum(self.norms, 1e-12), 0)[:, None] * self.each).mean(axis=0)
        cut_off, kept = np.linalg.norm(lost), np.minimum(self.norms, bound).mean()
        assert cut_off <= np.maximum(self.norms - bound, 0).mean() + 1e-9, "norms alone give no less"
        return self.descent.bias(cut_off=float(cut_off), kept=float(kept))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    count, dimension = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    rate = draw(st.sampled_from([0.05, 0.3, 0.7]))
    bound = draw(st.sampled_from([0.5, 1.0, 4.0]))
    gate: Gate | None = None
    kind = draw(st.sampled_from(["none", "coin", "clipping-bias"]))
    if kind == "coin":
        gate = CoinGate(probability=0.25)
    if kind == "clipping-bias":
        gate = ClippingBiasGate(
            beta=draw(st.sampled_from([0.0, 1.0, 3.0])),
            gate_noise=draw(st.sampled_from([0.2, 0.5, 2.0])),
            reference_noise=5.0,
            small_norm=draw(st.sampled_from([0.0, 0.5])),
            large_norm=draw(st.sampled_from([1.0, 3.0])),
            clip_range=draw(st.sampled_from([0.5, 2.0])),
        )
    mechanism = SelectiveRelease(
        sample_rate=rate,
        expected_batch_size=rate * count,
        scaling=GlobalScaling(bound=bound),
        noise_multiplier=draw(st.sampled_from([0.1, 1.0, 3.0])),
        releases=1,
        gate=gate,
    )
    rows = st.lists(numbers, min_size=dimension, max_size=dimension)
    return Case(
        descent=Descent(
            mechanism=mechanism,
            dataset_size=count,
            lr=draw(st.sampled_from([0.01, 0.3, 1.0, 4.0])),
            smoothness=1.0,
            trace=float(dimension),
            dimension=dimension,
        ),
        points=np.array(draw(st.lists(rows, min_size=count, max_size=count))),
        weights=np.array(draw(rows)),
        reference=draw(st.floats(-1, 4)),
    )


@given(cases())
@settings(max_examples=60, deadline=None)
def test_selection_keeps_rates_and_densities_within_its_bounds(case: Case):
    selection, rate = case.descent.selection, case.descent.mechanism.sample_rate
    for record in range(len(case.points)):
        included = sum(weight for weight, batch in case.law() if record in batch)
        assert selection.low - TIGHT <= included / rate <= selection.high + TIGHT
    count = len(case.points)
    for weight, batch in case.law():
        plain = rate ** len(batch) * (1 - rate) ** (count - len(batch))
        assert weight <= selection.density * plain * (1 + TIGHT)


@given(cases())
@settings(max_examples=60, deadline=None)
def test_the_mean_of_a_release_is_the_scaled_gradient_but_for_the_bias(case: Case):
    scale = case.descent.scale * case.descent.selection.middle
    off = case.mean_release() / scale - case.gradient
    assert np.linalg.norm(off) <= case.bias() + 1e-6


@given(cases())
@settings(max_examples=60, deadline=None)
def test_the_variance_of_a_release_is_within_its_bound(case: Case):
    mean = case.mean_release()
    variance = sum(weight * float(((case.release(batch) - mean) ** 2).sum()) for weight, batch in case.law())
    assert variance <= case.descent.sampling_variance * (1 + TIGHT) + TIGHT


@given(cases())
@settings(max_examples=100, deadline=None)
def test_one_release_lowers_the_expected_loss_by_as_much_as_the_proof_says(case: Case):
    descent = case.descent
    assume(descent.applies)
    dimension = descent.dimension
    expected = sum(weight * float((case.release(batch) ** 2).sum()) for weight, batch in case.law())
    # The loss is quadratic with curvature 1, so its expectation after the step is exact.
    after = (
        case.value
        - descent.lr * float(case.gradient @ case.mean_release())
        + descent.lr**2 / 2 * (expected + dimension * descent.noise_variance)
    )
    promised = (
        case.value
        - descent.step / 2 * float(case.gradient @ case.gradient)
        + descent.step / 2 * case.bias() ** 2
        + descent.lr**2 / 2 * (descent.sampling_variance + descent.trace * descent.noise_variance)
    )
    assert after <= promised + 1e-9 * (1 + abs(promised))
    terms = descent.terms(loss_gap=case.value - after, squared_bias=case.bias() ** 2, releases=1)
    assert float(case.gradient @ case.gradient) <= terms.total * (1 + 1e-9) + 1e-9


def example(**changes: object) -> Case:
    """One point at distance 2, S = 1: half of its gradient is clipped away, and nothing else happens."""
    mechanism = SelectiveRelease(
        sample_rate=1.0,
        expected_batch_size=1.0,
        scaling=GlobalScaling(bound=1.0),
        noise_multiplier=0.01,
        releases=1,
    )
    descent = Descent(mechanism=mechanism, dataset_size=1, lr=0.1, smoothness=1.0, trace=1.0, dimension=1)
    return replace(Case(descent=descent, points=np.array([[2.0]]), weights=np.zeros(1), reference=0.0), **changes)


def test_each_term_is_needed():
    clipped = example()
    gradient, loss_after = 4.0, (2.0 - 0.1) ** 2 / 2
    terms = clipped.descent.terms(loss_gap=clipped.value - loss_after, squared_bias=1.0, releases=1)
    assert gradient <= terms.total
    assert gradient > terms.start - 0.1, "the start alone is the bound where nothing else happens"
    assert gradient > terms.total - terms.start
    noisy = replace(clipped.descent, mechanism=replace(clipped.descent.mechanism, noise_multiplier=30.0))
    # At the minimum only noise is left: the loss cannot fall, and the bound is what the noise makes it rise by.
    rise = 0.1**2 / 2 * noisy.noise_variance
    assert noisy.terms(loss_gap=-rise, squared_bias=0.0, releases=1).total == pytest.approx(0.0, abs=1e-9)


def test_the_paper_forgets_the_scaling_and_fails_without_noise_or_clipping():
    """Steps of C / S of the gradient: with S = 8 the paper's first term has vanished long before the gradient has."""
    gate = ClippingBiasGate(beta=5.0, gate_noise=0.1, reference_noise=5.0, small_norm=8.0)
    mechanism = SelectiveRelease(
        sample_rate=1.0,
        expected_batch_size=1.0,
        scaling=GlobalScaling(bound=8.0),
        noise_multiplier=1e-3,
        releases=400,
        gate=gate,
    )
    descent = Descent(mechanism=mechanism, dataset_size=1, lr=0.01, smoothness=1.0, trace=1.0, dimension=1)
    place, squares = 7.0, []
    for _ in range(400):
        squares.append(place**2)
        place -= 0.01 * place / 8
    gap = 7.0**2 / 2
    paper = descent.paper_terms(loss_gap=gap, releases=400)
    assert paper is not None
    assert min(squares) > paper.total
    kept = float(np.mean(np.array(squares)))
    bias = descent.selection.relative_shift**2 * kept
    assert np.mean(squares) <= descent.terms(loss_gap=gap, squared_bias=bias, releases=400).total


def test_a_gate_states_what_selection_can_do():
    assert Selection.of(None, 0.1) == Selection()
    coin = Selection.of(CoinGate(probability=0.3), 0.1)
    assert (coin.low, coin.high, coin.density) == (1.0, 1.0, 1.0)
    gate = ClippingBiasGate(gate_noise=2.0, reference_noise=5.0, small_norm=1.0)
    selection = Selection.of(gate, 0.0)
    assert selection.low == pytest.approx(gate.acceptance.ratio_min)
    best, worst = (scipy.special.ndtr((difference - 3.0) / 8.0) for difference in (2.0, -2.0))
    assert selection.density == pytest.approx(best / worst, rel=1e-4)
    assert inclusion(0.5, 1.0) == 1.0, "a record that is always there stays"
    assert math.isclose(inclusion(0.5, 0.0), 0.5)


def test_what_the_bound_is_not_for_is_refused():
    case = example()
    with pytest.raises(InputError, match="at most 1 / 1"):
        replace(case.descent, lr=1.1).terms(loss_gap=1.0, squared_bias=0.0, releases=1)
    with pytest.raises(InputError, match="for GlobalScaling"):
        replace(case.descent, mechanism=replace(case.descent.mechanism, scaling=Clip()))
    with pytest.raises(InputError, match="expected_batch_size"):
        replace(case.descent, mechanism=replace(case.descent.mechanism, expected_batch_size=2.0))
    assert case.descent.paper_terms(loss_gap=1.0, releases=1) is None
