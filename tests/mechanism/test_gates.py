from __future__ import annotations

import itertools
import math
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy import stats
from scipy.special import log_ndtr, ndtr

from sluice._base.errors import InputError
from sluice.accounting.acceptance import Acceptance
from sluice.mechanism import gates as gate_module
from sluice.mechanism.attempt import Attempt, ReferenceState, first_above
from sluice.mechanism.gates import LARGEST_SMALL_NORM, ClippingBiasGate, CoinGate, Gate
from sluice.randomness.noise import NoiseSource, SeededNoise
from sluice.randomness.sampling import PoissonSampler

ALPHA = 1e-4

moderate = st.floats(-50, 50)


def make_gate(**changes: object) -> ClippingBiasGate:
    settings: dict[str, object] = {
        "beta": 1.0,
        "gate_noise": 0.25,
        "reference_noise": 5.0,
        "small_norm": 1.0,
        "large_norm": 4.0,
    }
    return ClippingBiasGate(**(settings | changes))  # type: ignore[arg-type]


def norms(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32)


# The metric.


def test_metric_of_each_kind_of_norm() -> None:
    gate = make_gate(metric_bound=2.0)
    given_norms = norms(0.0, -1.0, 1.0, 2.0, 3.0, 4.0, 4.5, 1e30, math.inf, math.nan, -math.inf)
    assert gate.measure(given_norms).tolist() == [0, 0, 0, 0.6666666567325592, 1.3333333134651184, 2, 2, 2, 2, 2, 2]
    assert gate.measure(given_norms).dtype == torch.float64
    assert gate.measure(torch.zeros(0)).shape == (0,)


@given(
    st.floats(1e-3, 1e3),
    st.floats(1e-3, 1e3),
    st.floats(0, LARGEST_SMALL_NORM),
    st.lists(st.floats(allow_nan=True, width=32), min_size=1),
)
def test_metric_is_bounded_and_nearly_exact(bound: float, large: float, ratio: float, values: list[float]) -> None:
    gate = make_gate(metric_bound=bound, large_norm=large, small_norm=ratio * large)
    measured = gate.measure(torch.tensor(values, dtype=torch.float64)).tolist()
    for value, metric in zip(values, measured, strict=True):
        rising = (value - ratio * large) / (large - ratio * large)
        exact = bound if not math.isfinite(value) else bound * min(max(rising, 0.0), 1.0)
        assert 0 <= metric <= bound
        assert metric <= exact + bound * 1e-13
        assert metric >= exact - bound * 2.0**-25


def test_sums_of_the_metric_do_not_depend_on_their_order() -> None:
    gate = make_gate(metric_bound=0.3, small_norm=0.0)
    values = gate.measure(torch.rand(5000, generator=torch.Generator().manual_seed(1)) * 5)
    exact = sum(Fraction(value) for value in values.tolist())
    assert Fraction(float(values.sum())) == exact
    assert Fraction(float(values.flip(0).cumsum(0)[-1])) == exact
    attempt = Attempt(limit=math.inf, count=1, measure=gate.measure)
    for chunk in values.split(37):
        attempt.add_metric(float(chunk.sum()))
    assert Fraction(attempt.raw_metric) == exact


# The decision.


@st.composite
def decisions(draw: st.DrawFn) -> tuple[ClippingBiasGate, ReferenceState, float, float]:
    """A gate, a reference, a metric and gate noise; often right at, or one float beside, a boundary."""
    gate = make_gate(
        beta=draw(st.floats(-5, 5)),
        clip_range=draw(st.floats(0.01, 5)),
        metric_bound=draw(st.sampled_from([1.0, 0.3, 7.0])),
    )
    reference, metric, noise = draw(moderate), draw(st.floats(0, 50)), draw(moderate)
    tau, bound = gate.threshold, gate.clip_bound
    reference = draw(st.sampled_from([reference, metric, metric + bound, metric - bound, 0.0, bound, -bound]))
    difference = min(max(reference - metric, -bound), bound)
    noise = draw(st.sampled_from([noise, tau - difference, tau - bound, tau + bound, tau - reference]))
    for _ in range(draw(st.integers(0, 2))):
        noise = math.nextafter(noise, draw(st.sampled_from([-math.inf, math.inf])))
    metric = draw(st.sampled_from([metric, max(0.0, reference - (tau - noise))]))
    metric = max(0.0, math.nextafter(metric, draw(st.sampled_from([-math.inf, math.inf, metric]))))
    return gate, ReferenceState(value=reference), metric, noise


@given(decisions())
def test_the_limit_is_the_exact_decision(case: tuple[ClippingBiasGate, ReferenceState, float, float]) -> None:
    gate, reference, metric, noise = case
    limit = gate.limit(reference, noise)
    beside = [math.nextafter(limit, -math.inf), limit, math.nextafter(limit, math.inf)] if math.isfinite(limit) else []
    for tried in [metric, *(value for value in beside if value >= 0)]:
        attempt = Attempt(limit=limit, count=1, measure=gate.measure)
        assert attempt.add_metric(tried) == gate.decide_plainly(reference, tried, noise)
        assert attempt.accepted == attempt.still_possible


def test_ties_are_decided_exactly() -> None:
    """On quarters, where sums are exact and every boundary is hit: both ends of the clip, and equality."""
    gate = make_gate(beta=0.5, clip_range=0.75)
    quarters = [number / 4 for number in range(-8, 9)]
    outcomes: Counter[bool] = Counter()
    for reference, noise, metric in itertools.product(quarters, quarters, quarters[8:]):
        attempt = Attempt(limit=gate.limit(ReferenceState(value=reference), noise), count=1, measure=gate.measure)
        accepted = min(max(reference - metric, -0.75), 0.75) + noise > 0.5
        assert attempt.add_metric(metric) == accepted
        assert gate.decide_plainly(ReferenceState(value=reference), metric, noise) == accepted
        outcomes[accepted] += 1
    assert min(outcomes.values()) > 500


class ListedNoise(SeededNoise):
    """Gate noise as listed, in grid steps of the gate under test."""

    def __init__(self, steps: list[float]) -> None:
        super().__init__(0)
        self.steps = steps

    def rounded_normal(self, count: int, *, scale: float) -> torch.Tensor:
        drawn, self.steps = self.steps[:count], self.steps[count:]
        return torch.tensor(drawn + [-1e15] * (count - len(drawn)), dtype=torch.float64)


@given(decisions())
def test_attempts_that_cannot_be_accepted_are_those_that_no_batch_passes(
    case: tuple[ClippingBiasGate, ReferenceState, float, float],
) -> None:
    gate, reference, _, noise = case
    step = gate._noise_step
    steps = math.floor(noise / step)
    noise = steps * step
    assume(Fraction(noise) == Fraction(steps) * Fraction(step))
    attempt = gate.begin(reference, ListedNoise([steps]), attempts_left=1)
    assert attempt.count == 1
    # The empty batch has the smallest metric, so it passes if any does.
    assert attempt.cannot_be_accepted != gate.decide_plainly(reference, 0.0, noise)
    assert attempt.cannot_be_accepted != (attempt.limit > 0)


def plain_release(
    gate: ClippingBiasGate,
    reference: ReferenceState,
    sampler: PoissonSampler,
    all_norms: torch.Tensor,
    noise: NoiseSource,
) -> tuple[float, int]:
    """The definition: a batch and noise for every attempt."""
    attempts = 0
    while True:
        attempts += 1
        metric = float(gate.measure(all_norms[sampler.sample()]).sum())
        step, std = gate._noise_step, gate.noise_std
        decision_noise = float(noise.rounded_normal(1, scale=std / step)) * step
        if gate.decide_plainly(reference, metric, decision_noise):
            return metric, attempts


def fast_release(
    gate: Gate,
    reference: ReferenceState,
    sampler: PoissonSampler,
    all_norms: torch.Tensor,
    noise: NoiseSource,
    *,
    attempts_left: int | None = None,
) -> tuple[float | None, int]:
    """As an engine does it: chunks of the batch, stopping as soon as acceptance is ruled out."""
    attempts = 0
    while True:
        left = None if attempts_left is None else attempts_left - attempts
        attempt = gate.begin(reference, noise, attempts_left=left)
        attempts += attempt.count
        if attempt.cannot_be_accepted:
            return None, attempts
        if all(attempt.add(chunk) for chunk in all_norms[sampler.sample()].split(3)) and attempt.accepted:
            return attempt.raw_metric, attempts


RECORDS, RATE = 12, 0.4


def exact_law(gate: ClippingBiasGate, reference: float) -> tuple[np.ndarray, float]:
    """Law of the accepted metric where every record adds 1, and the probability that an attempt is accepted."""
    metric = np.arange(RECORDS + 1)
    difference = np.clip(reference - metric, -gate.clip_bound, gate.clip_bound)
    accepted = stats.binom.pmf(metric, RECORDS, RATE) * ndtr(-(gate.threshold - difference) / gate.noise_std)
    return accepted / accepted.sum(), float(accepted.sum())


def p_value(observed: Counter[int], expected: np.ndarray) -> float:
    """Chi-square of counts of 0, 1, 2, ... where neighbours share a cell until five are expected in each."""
    total = sum(observed.values())
    cells: list[list[float]] = [[0.0, 0.0]]
    for place, probability in enumerate(expected):
        if cells[-1][1] > 5:
            cells.append([0.0, 0.0])
        cells[-1][0] += observed[place]
        cells[-1][1] += total * probability
    rest = np.array([total, total]) - np.sum(cells, axis=0)
    cells[-1] = list(np.array(cells[-1]) + rest)
    statistic = sum((count - mean) ** 2 / mean for count, mean in cells)
    return float(stats.chi2.sf(statistic, len(cells) - 1))


@pytest.mark.parametrize("reference", [4.0, 2.0, -3.0])
@pytest.mark.parametrize("plainly", [True, False])
def test_fast_path_has_the_law_of_the_plain_loop(reference: float, plainly: bool) -> None:
    gate, noise = make_gate(beta=-0.5, gate_noise=0.3), SeededNoise(100 + plainly)
    sampler = PoissonSampler(dataset_size=RECORDS, sample_rate=RATE, source=noise)
    state, all_norms = ReferenceState(value=reference), torch.full((RECORDS,), 9.0)
    metrics: Counter[int] = Counter()
    attempts: Counter[int] = Counter()
    for _ in range(300 if reference < 0 else 900):
        release = plain_release if plainly else fast_release
        metric, count = release(gate, state, sampler, all_norms, noise)
        assert metric is not None
        metrics[int(metric)] += 1
        attempts[count - 1] += 1
    law, accepted = exact_law(gate, reference)
    assert p_value(metrics, law) > ALPHA
    assert p_value(attempts, accepted * (1 - accepted) ** np.arange(500)) > ALPHA
    if reference > 0:
        # The test can fail: without a gate, and under another reference.
        assert p_value(metrics, stats.binom.pmf(np.arange(RECORDS + 1), RECORDS, RATE)) < 1e-9
        assert p_value(metrics, exact_law(gate, reference + 1)[0]) < 1e-9


def test_attempt_cap_has_the_law_of_the_plain_loop() -> None:
    gate, noise = make_gate(beta=-0.5, gate_noise=0.3), SeededNoise(8)
    sampler = PoissonSampler(dataset_size=RECORDS, sample_rate=RATE, source=noise)
    _, accepted = exact_law(gate, 3.0)
    given_up = 0
    for _ in range(600):
        metric, attempts = fast_release(
            gate, ReferenceState(value=3.0), sampler, torch.full((RECORDS,), 9.0), noise, attempts_left=2
        )
        assert attempts <= 2
        assert metric is not None or attempts == 2
        given_up += metric is None
    assert stats.binomtest(given_up, 600, (1 - accepted) ** 2).pvalue > ALPHA


@pytest.mark.parametrize(
    ("skipped", "left", "value", "count"),
    [(0, None, 5.0, 1), (20, None, 5.0, 21), (20, 21, 5.0, 21), (20, 20, None, 20)],
)
def test_all_skipped_attempts_are_counted(skipped: int, left: int | None, value: float | None, count: int) -> None:
    """Also those of earlier draws: six values come at once here."""
    values = [0.0] * skipped + [5.0] * 30

    def draw(draws: int) -> torch.Tensor:
        return torch.tensor([values.pop(0) for _ in range(draws)])

    assert first_above(1.0, draw=draw, probability=0.5, attempts_left=left) == (value, count)


def test_measuring_stops_as_soon_as_acceptance_is_ruled_out() -> None:
    gate = make_gate()
    attempt = Attempt(limit=2.5, count=1, measure=gate.measure)
    assert attempt.add(norms(9.0, 9.0))
    assert attempt.add(norms(0.5))
    assert not attempt.add(norms(2.5))
    assert not attempt.accepted
    assert attempt.raw_metric == 2.5
    for bad in (math.nan, -1.0, math.inf):
        with pytest.raises(InputError, match="raw_metric"):
            attempt.add_metric(bad)


# What the gate states to the accountant.


def exact_acceptance(gate: ClippingBiasGate, reference: float, metric: float) -> float:
    """Log-probability that the decision as computed accepts: a real normal rounded to a grid, compared exactly."""
    step = gate._noise_step
    gap = gate.threshold - min(max(reference - metric, -gate.clip_bound), gate.clip_bound)
    return float(log_ndtr(-(math.floor(gap / step) + 0.5) * step / gate.noise_std))


@pytest.mark.parametrize("metric_bound", [1.0625, 6.0])
def test_acceptance_covers_the_gate_as_computed(metric_bound: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a grid so coarse that it matters: the stated bounds hold, and those for real noise would not."""
    monkeypatch.setattr(gate_module, "DECISION_GRID", 2.0**-3)
    gate = make_gate(
        beta=1 / metric_bound, gate_noise=0.4 / metric_bound, metric_bound=metric_bound, clip_range=2 / metric_bound
    )
    real = Acceptance.one_sided(
        threshold=gate.threshold, clip_bound=gate.clip_bound, metric_bound=metric_bound, noise_std=gate.noise_std
    )
    stated, ratios, lowest = gate.acceptance, [], []
    for reference in np.arange(-4, 9, 0.0625):
        for metric in np.arange(0, 8, 0.25):
            for added in (metric_bound, metric_bound * 0.37):
                before, after = (exact_acceptance(gate, reference, value) for value in (metric, metric + added))
                ratios.append(math.exp(after - before))
                lowest.append(math.exp(after))
    assert stated.ratio_min <= min(ratios) < real.ratio_min
    assert max(ratios) <= stated.ratio_max == 1
    assert stated.probability_min <= min(lowest) < real.probability_min


def test_on_the_real_grid_the_difference_is_negligible() -> None:
    gate = make_gate(beta=3.0, gate_noise=1.0)
    real = Acceptance.one_sided(threshold=3.0, clip_bound=2.0, metric_bound=1.0, noise_std=4.0)
    assert gate.acceptance.ratio_min == pytest.approx(real.ratio_min, rel=1e-8)
    assert gate.acceptance.ratio_min < real.ratio_min
    assert gate.acceptance.probability_min == pytest.approx(real.probability_min, rel=1e-8)


def test_give_up_delta() -> None:
    gate = make_gate(gate_noise=1.0, max_attempts=50)
    smallest = gate.acceptance.probability_min
    assert gate.give_up_delta(releases=10) == pytest.approx(10 * (1 - smallest) ** 50, rel=1e-6)
    assert gate.give_up_delta(releases=10) >= 10 * (1 - smallest) ** 50
    assert make_gate().give_up_delta(releases=10) == 0
    assert make_gate(max_attempts=1).give_up_delta(releases=1000) == 1
    assert CoinGate(probability=1.0, max_attempts=1).give_up_delta(releases=5) == 0
    assert CoinGate(probability=1.0).attempts_for(releases=5, delta=1e-9) == 1


@given(st.floats(0.2, 3), st.integers(1, 10**5), st.floats(1e-12, 0.5))
def test_attempts_for_is_the_smallest_that_suffices(gate_noise: float, releases: int, delta: float) -> None:
    gate = make_gate(gate_noise=gate_noise)
    attempts = gate.attempts_for(releases=releases, delta=delta)
    assert make_gate(gate_noise=gate_noise, max_attempts=attempts).give_up_delta(releases=releases) <= delta
    if attempts > 1:
        fewer = make_gate(gate_noise=gate_noise, max_attempts=attempts - 1).give_up_delta(releases=releases)
        assert fewer > delta * (1 - 1e-6)


# The reference.


def test_the_first_published_reference_replaces_the_constant() -> None:
    state = ReferenceState(value=100.0)
    published = [3.0, 5.0, 4.0]
    for value in published:
        state = state.averaged_with(value, decay=0.9)
    weights = [0.81, 0.9, 1.0]
    assert state.value == pytest.approx(np.average(published, weights=weights))
    assert state.weight == pytest.approx(sum(weights))
    assert state.averaged_with(7.0, decay=0.0).value == 7.0


def test_published_references_have_the_stated_law() -> None:
    gate, noise = make_gate(metric_bound=0.5, reference_noise=4.0, reference_decay=0.0), SeededNoise(5)
    state = gate.first_reference()
    published = [gate.next_reference(state, 3.0, noise) for _ in range(1500)]
    assert stats.kstest([one.value for one in published], "norm", args=(3.0, 2.0)).pvalue > ALPHA
    assert all(one.public and one.weight == 1 for one in published)


def test_a_hidden_reference_is_labelled() -> None:
    hidden = make_gate(hidden_reference=True)
    assert not hidden.provable
    assert make_gate().provable
    state = hidden.next_reference(hidden.first_reference(), 3.25, SeededNoise(1))
    assert (state.value, state.public) == (3.25, False)


def test_infinite_noise_publishes_nothing() -> None:
    gate = make_gate(reference_noise=math.inf, initial_reference=2.0)
    assert gate.next_reference(gate.first_reference(), 9.0, SeededNoise(1)) == ReferenceState(value=2.0)


# The control.


def test_coin_gate() -> None:
    gate, noise = CoinGate(probability=0.3), SeededNoise(6)
    assert gate.acceptance == Acceptance(ratio_min=1.0, ratio_max=1.0, probability_min=0.3)
    assert gate.reference_noise == math.inf
    assert gate.provable
    sampler = PoissonSampler(dataset_size=RECORDS, sample_rate=RATE, source=noise)
    all_norms = torch.full((RECORDS,), math.nan)
    attempts: Counter[int] = Counter()
    for _ in range(900):
        metric, count = fast_release(gate, gate.first_reference(), sampler, all_norms, noise)
        assert metric == 0.0
        attempts[count - 1] += 1
    assert p_value(attempts, 0.3 * 0.7 ** np.arange(100)) > ALPHA
    assert gate.next_reference(gate.first_reference(), 1.0, noise) == gate.first_reference()
    assert CoinGate(probability=1.0).begin(gate.first_reference(), noise).count == 1


def test_coin_gate_gives_up() -> None:
    gate, noise = CoinGate(probability=0.2, max_attempts=3), SeededNoise(6)
    attempts = [gate.begin(gate.first_reference(), noise, attempts_left=3) for _ in range(500)]
    assert all(attempt.count <= 3 for attempt in attempts)
    assert all(attempt.count == 3 for attempt in attempts if attempt.cannot_be_accepted)
    assert stats.binomtest(sum(attempt.cannot_be_accepted for attempt in attempts), 500, 0.8**3).pvalue > ALPHA


# Mistakes.


def test_bad_settings() -> None:
    with pytest.raises(InputError, match="small_norm=None"):
        make_gate(small_norm=None).measure(norms(1.0))
    with pytest.raises(InputError, match="gate_noise=None"):
        make_gate(gate_noise=None).begin(ReferenceState(value=0.0), SeededNoise(1))
    with pytest.raises(InputError, match="reference_noise=None"):
        make_gate(reference_noise=None).next_reference(ReferenceState(value=0.0), 1.0, SeededNoise(1))
    with pytest.raises(InputError, match="probability="):
        CoinGate(probability=0.0)
    with pytest.raises(InputError, match="at least"):
        CoinGate(probability=1e-12)
    with pytest.raises(InputError, match="value=nan"):
        ReferenceState(value=math.nan)
    rare = make_gate(beta=9.0)
    with pytest.raises(InputError, match="would never end"):
        rare.begin(ReferenceState(value=2.0), SeededNoise(1))
    assert rare.begin(ReferenceState(value=2.0), SeededNoise(1), attempts_left=10**4).cannot_be_accepted
    assert rare.begin(ReferenceState(value=2.0), SeededNoise(1), attempts_left=0).count == 0
