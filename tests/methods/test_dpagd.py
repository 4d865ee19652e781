from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import logsumexp
from scipy.stats import chisquare
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from sluice._base.errors import InputError
from sluice.experiments.run import Progress, Training, recorded_run
from sluice.experiments.settings import settings_from
from sluice.gradients import PerSampleGradients
from sluice.mechanism.registry import mechanism_from_dict
from sluice.methods import dpagd
from sluice.methods.dpagd import AdaptiveBudget, Options, gaussian_noise, largest_rho
from sluice.methods.dpagd import execution as dpagd_descent
from sluice.methods.dpagd.execution import LOSS_PARTS, AdaptiveDescent, averaged, loss_parts, noisy_minimum, unit_vector
from sluice.randomness.noise import SeededNoise
from sluice.runs.verify import verify_run
from sluice.training.batches import Batches
from sluice.training.context import TrainingContext
from sluice.training.weights import WeightUpdater


def mechanism(**changes: Any) -> AdaptiveBudget:
    values: dict[str, Any] = {
        "rho": 1.0,
        "gradient_rho": 0.08,
        "selection_rho": 0.02,
        "max_grad_norm": 1.0,
        "gamma": 0.5,
        "candidates": 8,
        "first_reach": 2.0,
        "refresh_every": 3,
        "reach_growth": 0.25,
        "loss_clip": 3.0,
        "gradient_rate": 1.0,
        "loss_rate": 1.0,
        "releases": 100,
    }
    return AdaptiveBudget(**{**values, **changes})


QUIET: dict[str, Any] = {"rho": 1e18, "gradient_rho": 1e14, "selection_rho": 1e12, "max_grad_norm": 100.0}
"""Budgets at which noise is next to nothing."""


def make_context(
    *, count: int = 64, seed: int = 0, before_release: Callable[[int], None] | None = None
) -> TrainingContext:
    """Logistic regression: small and convex."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(count, 4, generator=generator)
    y = (x @ torch.tensor([1.0, -2.0, 0.5, 0.0]) + 0.5 * torch.randn(count, generator=generator) > 0).long()
    torch.manual_seed(1)
    model = nn.Linear(4, 2)
    return TrainingContext(
        gradients=PerSampleGradients(model, loss_reduction="mean"),
        batches=Batches(TensorDataset(x, y)),
        updater=WeightUpdater(module=model, optimizer=torch.optim.SGD(model.parameters(), lr=1.0)),
        noise=SeededNoise(seed),
        piece_size=50,
        before_release=before_release or (lambda number: None),
    )


def all_records(context: TrainingContext) -> tuple[Tensor, Tensor]:
    dataset: Any = context.batches.dataset
    return dataset.tensors


def flat(weights: dict[str, Tensor]) -> Tensor:
    return torch.cat([part.flatten() for part in weights.values()]).double()


# The line search.


def test_at_low_noise_every_step_is_the_best_of_the_grid():
    context = make_context()
    descent = AdaptiveDescent(mechanism(**QUIET), context)
    x, y = all_records(context)
    chosen = []
    for _ in range(12):
        before, reach = context.updater.weights(), descent.reach
        gradient = torch.autograd.grad(F.cross_entropy(context.module(x), y), list(context.module.parameters()))
        direction = torch.cat([part.flatten() for part in gradient]).double()
        direction /= direction.norm()
        losses = []
        for index in range(9):
            weight, bias = (flat(before) - reach * index / 8 * direction).float().split([8, 2])
            losses.append(float(F.cross_entropy(x @ weight.view(2, 4).T + bias, y, reduction="sum").double()))
        best = int(np.argmin(losses))
        descent.make_release(F.cross_entropy)
        made = (flat(before) - flat(context.updater.weights())).norm()
        assert float(made) == pytest.approx(reach * best / 8, abs=1e-5)
        torch.testing.assert_close(
            flat(before) - flat(context.updater.weights()), made * direction, atol=1e-4, rtol=1e-3
        )
        chosen.append(best)
    assert len(set(chosen)) > 1
    assert min(chosen) > 0


def test_candidates_are_undone(monkeypatch):
    """Where no step is chosen the weights are bit for bit what they were, though all candidates were tried."""
    context = make_context()
    descent = AdaptiveDescent(mechanism(), context)
    tried: list[Tensor] = []
    raw_losses_at = TrainingContext.raw_losses_at

    def watched(self: TrainingContext, weights: Any, indices: Tensor, loss: Any) -> Tensor:
        for set_weights in weights:
            set_weights()
            tried.append(flat(self.updater.weights()))
        return raw_losses_at(self, weights, indices, loss)

    monkeypatch.setattr(TrainingContext, "raw_losses_at", watched)
    monkeypatch.setattr(dpagd_descent, "noisy_minimum", lambda raw_sums, rho, noise: 0)
    before = context.updater.weights()
    descent.make_release(F.cross_entropy)
    after = context.updater.weights()
    assert all(torch.equal(before[name], after[name]) for name in before)
    context.updater.check_untouched()
    assert len(tried) == 9
    distances = [float((one - flat(before)).norm()) for one in tried]
    assert distances == pytest.approx([2.0 * index / 8 for index in range(9)], abs=1e-5)


def test_candidates_are_undone_after_an_error_too(monkeypatch):
    context = make_context()
    descent = AdaptiveDescent(mechanism(), context)
    before = context.updater.weights()

    def fail(self: TrainingContext, weights: Any, indices: Tensor, loss: Any) -> Tensor:
        weights[-1]()
        assert not torch.equal(flat(self.updater.weights()), flat(before))
        raise KeyboardInterrupt

    monkeypatch.setattr(TrainingContext, "raw_losses_at", fail)
    with pytest.raises(KeyboardInterrupt):
        descent.make_release(F.cross_entropy)
    assert all(torch.equal(before[name], part) for name, part in context.updater.weights().items())
    context.updater.check_untouched()


def test_the_grid_follows_the_steps_that_were_made(monkeypatch):
    picks = iter([4, 0, 2, 1, 8, 8, 8])
    monkeypatch.setattr(dpagd_descent, "noisy_minimum", lambda raw_sums, rho, noise: next(picks))
    descent = AdaptiveDescent(mechanism(rho=10.0), make_context())
    reaches = []
    for _ in range(7):
        descent.make_release(F.cross_entropy)
        reaches.append(descent.reach)
    assert reaches == pytest.approx([2, 2, 2, 1.25, 1.25, 1.25, 1.25 * 1.25])


# The adaptive budget.


def test_no_step_raises_the_budget_and_combines_by_precision(monkeypatch):
    asked: list[float] = []
    measured: list[dict[str, Tensor]] = []
    sum_of = AdaptiveDescent._noisy_sum_of_gradients

    def watched(self: AdaptiveDescent, sample: Tensor, loss: Any, *, rho: float) -> dict[str, Tensor]:
        asked.append(rho)
        measured.append(sum_of(self, sample, loss, rho=rho))
        return {name: part.clone() for name, part in measured[-1].items()}

    picks = iter([0, 0, 3, 1])
    monkeypatch.setattr(AdaptiveDescent, "_noisy_sum_of_gradients", watched)
    monkeypatch.setattr(dpagd_descent, "noisy_minimum", lambda raw_sums, rho, noise: next(picks))
    context = make_context()
    descent = AdaptiveDescent(mechanism(), context)
    descent.make_release(F.cross_entropy)
    descent.make_release(F.cross_entropy)
    assert asked == pytest.approx([0.08, 0.04])
    assert descent.gradient_rho == pytest.approx(0.12)
    before = context.updater.weights()
    descent.make_release(F.cross_entropy)
    assert asked == pytest.approx([0.08, 0.04, 0.06])
    assert descent.gradient_rho == pytest.approx(0.18)
    weights = torch.tensor([0.08, 0.04, 0.06], dtype=torch.float64)
    combined = sum(w * flat(m) for w, m in zip(weights / weights.sum(), measured, strict=True))
    assert isinstance(combined, Tensor)
    made = flat(before) - flat(context.updater.weights())
    torch.testing.assert_close(made, 0.75 * combined / combined.norm(), rtol=1e-4, atol=1e-6)
    descent.make_release(F.cross_entropy)
    assert asked[-1] == pytest.approx(0.18)
    assert descent.spent_rho == pytest.approx(0.08 + 0.04 + 0.06 + 0.18 + 4 * 0.02)


def test_the_combination_is_as_exact_as_one_measurement_at_the_whole_budget():
    noise = SeededNoise(1)
    first = {"w": noise.normal((200_000,), gaussian_noise(0.08), dtype=torch.float64)}
    second = {"w": noise.normal((200_000,), gaussian_noise(0.04), dtype=torch.float64)}
    both = averaged(first, second, weights=(0.08, 0.04))["w"]
    assert float(both.std()) == pytest.approx(gaussian_noise(0.12), rel=0.01)


def test_the_noise_of_a_gradient_is_that_of_its_budget():
    descent = AdaptiveDescent(mechanism(max_grad_norm=0.5), make_context())
    empty = torch.zeros(0, dtype=torch.int64)
    drawn = [flat(descent._noisy_sum_of_gradients(empty, F.cross_entropy, rho=0.08)) for _ in range(1500)]
    assert float(torch.cat(drawn).std()) == pytest.approx(0.5 / math.sqrt(0.16), rel=0.03)


@settings(max_examples=60)
@given(
    rho=st.floats(1e-4, 10.0),
    first=st.floats(0.02, 1.5),
    share=st.floats(0.01, 0.99),
    gamma=st.floats(0.01, 3.0),
    picks=st.lists(st.integers(0, 8), min_size=1, max_size=8),
)
def test_spending_never_exceeds_the_budget(rho, first, share, gamma, picks):
    """Whatever is selected, and however budgets were chosen."""
    one = mechanism(
        rho=rho, gradient_rho=first * rho * share, selection_rho=first * rho * (1 - share), gamma=gamma, releases=10**6
    )
    descent = FakeDescent(one, picks)
    costs = []
    while not descent.done:
        before = descent.spent_rho
        descent.make_release(F.cross_entropy)
        costs.append(descent.spent_rho - before)
    assert descent.paid == pytest.approx(sum(costs), abs=1e-9 * rho)
    assert math.fsum(descent.exact) <= rho
    assert descent.spent_rho + descent._next_cost > rho * (1 - 1e-9)
    with pytest.raises(InputError, match="more would exceed the budget"):
        descent.make_release(F.cross_entropy)


class FakeDescent(AdaptiveDescent):
    """The filter alone: nothing is measured, and what is selected is given."""

    def __init__(self, one: AdaptiveBudget, picks: list[int]) -> None:
        super().__init__(one, _CONTEXT)
        self._picks, self._made = picks, 0
        self.exact: list[float] = []

    @property
    def paid(self) -> float:
        return math.fsum(self.exact)

    def _noisy_sum_of_gradients(self, sample: Tensor, loss: Any, *, rho: float) -> dict[str, Tensor]:
        self.exact += [rho, self.mechanism.selection_rho]
        return {name: torch.ones_like(part) for name, part in self.context.updater.weights().items()}

    def _raw_losses_along(self, direction: Any, steps: Any, loss: Any) -> Tensor:
        pick = self._picks[self._made % len(self._picks)]
        self._made += 1
        # So far apart that no noise matters.
        sums = torch.full((len(steps),), 2**62, dtype=torch.int64)
        sums[pick] = 0
        return sums


_CONTEXT = make_context(count=4)


# The selection.


def test_the_selection_has_the_law_of_the_exponential_mechanism():
    raw_sums = torch.tensor([5.0, 4.0, 4.5, 9.0, 6.0]).mul(LOSS_PARTS).to(torch.int64)
    rho = 0.1
    exponents = -math.sqrt(8 * rho) * np.array([5.0, 4.0, 4.5, 9.0, 6.0])
    law = np.exp(exponents - exponents.max())
    law /= law.sum()
    noise = SeededNoise(5)
    trials = 10_000
    found = np.bincount([noisy_minimum(raw_sums, rho=rho, noise=noise) for _ in range(trials)], minlength=5)
    assert chisquare(found, trials * law).pvalue > 1e-3
    flattened = law**0.8 / (law**0.8).sum()
    assert chisquare(found, trials * flattened).pvalue < 1e-6


def test_the_race_is_right_far_below_the_digits_of_one_uniform():
    """An early clock: the first digits are all zero, so that the second draw decides."""

    class Early(SeededNoise):
        def uniform(self, shape: Any) -> Tensor:
            return torch.tensor([[0.0, 0.5], [0.25, 0.5]], dtype=torch.float64)

    # The clock of index 0 stands at 2^-55: it wins as long as its penalty is below log(log 2 / 2^-55).
    limit = math.log(math.log(2)) + 55 * math.log(2)
    for penalty, winner in ((limit - 0.01, 0), (limit + 0.01, 1)):
        sums = torch.tensor([round(penalty * LOSS_PARTS), 0])
        assert noisy_minimum(sums, rho=1 / 8, noise=Early(0)) == winner


def exact_law(sums: np.ndarray, rho: float) -> np.ndarray:
    exponents = -math.sqrt(8 * rho) * sums
    law = np.exp(exponents - exponents.max())
    return law / law.sum()


@pytest.mark.parametrize("seed", range(40))
def test_no_exact_divergence_of_the_selection_exceeds_its_budget(seed):
    rng = np.random.default_rng(seed)
    rho = float(rng.choice([0.001, 0.05, 0.5, 3.0]))
    sums = rng.uniform(0, 5, size=int(rng.integers(2, 22)))
    for added in (rng.uniform(0, 1, size=sums.size), rng.integers(0, 2, size=sums.size)):
        one, other = exact_law(sums, rho), exact_law(sums + added, rho)
        for order in (1.1, 2.0, 5.0, 30.0):
            for p, q in ((one, other), (other, one)):
                exact = logsumexp(order * np.log(p) + (1 - order) * np.log(q)) / (order - 1)
                assert exact <= order * rho * (1 + 1e-9) + 1e-12


def test_the_bound_of_the_selection_is_nearly_attained_and_a_smaller_one_is_not():
    """Two points whose difference one record turns round by the most; noise as if the range were half is too small."""
    rho, order = 0.01, 2.0

    def divergence(rho_used: float) -> float:
        one, other = exact_law(np.array([0.5, 0.0]), rho_used), exact_law(np.array([0.5, 1.0]), rho_used)
        return float(np.log(np.sum(one**order * other ** (1 - order))) / (order - 1))

    assert 0.95 * order * rho < divergence(rho) <= order * rho
    assert divergence(1.2 * rho) > order * rho


def test_losses_become_whole_parts_of_their_bound():
    losses = torch.tensor([-1.0, 0.0, 1.5, 3.0, 99.0, math.inf, -math.inf, math.nan], dtype=torch.float64)
    half = LOSS_PARTS // 2
    assert loss_parts(losses, loss_clip=3.0).tolist() == [0, 0, half, *[LOSS_PARTS] * 3, 0, LOSS_PARTS]


def test_one_more_record_moves_all_sums_the_same_way_by_at_most_one_bound():
    sums = []
    for count in (63, 64):
        generator = torch.Generator().manual_seed(3)
        x, y = 5 * torch.randn(64, 4, generator=generator), torch.randint(2, (64,), generator=generator)
        torch.manual_seed(1)
        model = nn.Linear(4, 2)
        context = TrainingContext(
            gradients=PerSampleGradients(model, loss_reduction="mean"),
            batches=Batches(TensorDataset(x[:count], y[:count])),
            updater=WeightUpdater(module=model, optimizer=torch.optim.SGD(model.parameters(), lr=1.0)),
            noise=SeededNoise(0),
            piece_size=64,
            before_release=lambda number: None,
        )
        direction = unit_vector({name: torch.ones_like(p) for name, p in context.updater.weights().items()})
        descent = AdaptiveDescent(mechanism(), context)
        sums.append(descent._raw_losses_along(direction, [0.0, 0.1, 1.0, 5.0], F.cross_entropy))
    difference = sums[1] - sums[0]
    assert (difference >= 0).all()
    assert (difference <= LOSS_PARTS).all()
    assert difference.max() > 0


# What is logged, and what crashes cost.


def test_a_measurement_is_logged_before_it_changes_anything():
    order: list[str] = []
    context = make_context(before_release=lambda number: order.append(f"logged {number}, {descent.spent_rho}"))
    descent = AdaptiveDescent(mechanism(), context)
    descent.make_release(F.cross_entropy)
    assert order == ["logged 1, 0.0"]
    assert descent.spent_rho > 0


@pytest.mark.parametrize("lost", [0, 1, 3])
def test_lost_measurements_are_charged_the_most_that_they_can_have_cost(lost):
    descent = AdaptiveDescent(mechanism(rho=5.0), make_context())
    descent.make_release(F.cross_entropy)
    state = descent.state_dict()
    again = AdaptiveDescent(mechanism(rho=5.0), make_context())
    again.load_state_dict(state, lost=lost)
    charged = sum(0.08 * 1.5**index + 0.02 for index in range(lost))
    assert again.spent_rho == pytest.approx(0.1 + charged)
    assert again.spent == 1 + lost
    third = AdaptiveDescent(mechanism(rho=5.0), make_context())
    third.load_state_dict(again.state_dict(), lost=lost)
    assert third.spent_rho == again.spent_rho  # paid for once


def test_lost_measurements_can_end_a_run():
    descent = AdaptiveDescent(mechanism(), make_context())
    descent.make_release(F.cross_entropy)
    again = AdaptiveDescent(mechanism(), make_context())
    again.load_state_dict(descent.state_dict(), lost=20)
    assert again.done
    assert again.spent_rho == 1.0


def test_the_worst_path_of_lost_measurements_is_covered():
    """Every sequence of selections costs at most what is charged for as many lost measurements."""
    for gamma in (0.1, 1.0, 2.5):
        one = mechanism(rho=1e6, gamma=gamma, releases=10**6)
        for pattern in range(2**5):
            descent = FakeDescent(one, [(pattern >> bit) & 1 for bit in range(5)])
            charged = FakeDescent(one, [0])
            charged.load_state_dict(charged.state_dict(), lost=5)
            for _ in range(5):
                descent.make_release(F.cross_entropy)
            assert descent.spent_rho <= charged.spent_rho * (1 + 1e-12)


# Planning.


def test_the_budget_is_what_the_sound_accountant_allows():
    rho = largest_rho(epsilon=3.0, delta=1e-5)
    one = mechanism(rho=rho)
    assert 2.9999 < one.epsilon_after(1, delta=1e-5, accountant="rdp") <= 3.0
    assert one.epsilon_after(0, delta=1e-5, accountant="rdp") == 0
    assert one.epsilon_after(100, delta=1e-5, accountant="rdp") == one.epsilon_after(1, delta=1e-5, accountant="rdp")
    # The textbook conversion, rho + 2 sqrt(rho log(1/delta)), is looser: it would allow less.
    assert rho > (math.sqrt(math.log(1e5) + 3) - math.sqrt(math.log(1e5))) ** 2


def test_the_plan_bounds_the_number_of_measurements():
    chosen = settings_from({"method": "dpagd", "dataset": "digits", "releases": 40})
    planned = dpagd.plan(chosen, 1000)
    assert planned.releases == math.floor(planned.rho / (0.1 * planned.gradient_rho + planned.selection_rho))
    for picks in ([0], [1], [0, 1], [0, 0, 0, 1]):
        descent = FakeDescent(planned, picks)
        while not descent.done:
            descent.make_release(F.cross_entropy)
        assert descent.released <= planned.releases
        assert picks != [1] or descent.released == 40


@pytest.mark.parametrize("gamma", [0.1, 0.5, 1.0, 3.0])
@pytest.mark.parametrize("selection_rho", [0.02, 0.1])
def test_the_fewest_measurements_are_those_of_the_dearest_path(gamma, selection_rho):
    one = mechanism(gamma=gamma, selection_rho=selection_rho, gradient_rho=0.2)
    made = []
    for pattern in range(2**5):
        descent = FakeDescent(one, [(pattern >> bit) & 1 for bit in range(5)])
        while not descent.done and descent.released < 5:
            descent.make_release(F.cross_entropy)
        made.append(descent.released)
    assert min(made) < 5
    assert one.fewest_measurements == min(made)


def test_the_plan_says_how_many_measurements_there_will_be_and_what_they_cost():
    planned = dpagd.plan(settings_from({"method": "dpagd", "dataset": "digits", "releases": 40}), 1000)
    rows = dict(planned.summary)
    assert rows["measurements"] == f"at least {planned.fewest_measurements}, at most 142; 40 if each makes a step"
    assert 20 < planned.fewest_measurements < 40
    assert f"{planned.gradient_rho + planned.selection_rho:.3g} at first" in rows["a measurement"]
    assert planned.ending_after(142) == ""


def test_settings_without_effect_are_refused():
    for name, value in (("lr", 0.1), ("batch_size", 64), ("noise_multiplier", 2.0), ("optimizer", "adam")):
        with pytest.raises(InputError, match=f"{name}=.* has no effect"):
            settings_from({"method": "dpagd", "dataset": "digits", name: value})
    with pytest.raises(InputError, match="the proof is by rdp"):
        settings_from({"method": "dpagd", "dataset": "digits", "accountant": "pld"})


@pytest.mark.parametrize(
    "options",
    [
        {"selection_share": 1.0},
        {"gamma": 0.0},
        {"gamma": 101.0},
        {"candidates": 0},
        {"candidates": 10**9},
        {"first_reach": -1.0},
        {"first_reach": 1e7},
        {"refresh_every": 0},
        {"reach_growth": -0.1},
        {"reach_growth": 11.0},
        {"loss_clip": math.inf},
        {"gradient_rate": 0.0},
        {"loss_rate": 1.1},
    ],
)
def test_bad_options_are_refused_by_name(options):
    [name] = options
    with pytest.raises(InputError, match=name):
        Options(**options)


def test_a_promise_survives_its_ledger():
    one = mechanism()
    assert mechanism_from_dict(json.loads(json.dumps(one.to_dict()))) == one
    with pytest.raises(InputError, match="lacks gamma"):
        mechanism_from_dict({name: value for name, value in one.to_dict().items() if name != "gamma"})


# Whole runs.


def stop_at(release: int) -> Callable[[Progress], None]:
    def report(progress: Progress) -> None:
        if progress.release == release:
            raise KeyboardInterrupt

    return report


def public_files(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted((path / "public").iterdir())}


@pytest.mark.parametrize("stopped", [3, 6])
def test_an_interrupted_run_ends_with_the_same_bytes(digits, tmp_path, stopped):
    base = {"method": "dpagd", "dataset": "digits", "releases": 8, "epsilon": 0.6, "seed": 3, "evaluate_every": 2}
    # Little budget and a coarse search: some measurements end without a step, and the gradient is carried over.
    chosen = settings_from({**base, "options": {"first_reach": 40.0, "candidates": 4, "loss_rate": 0.5}})
    whole = Training(settings=chosen, splits=digits).start(tmp_path / "whole")
    rows = [json.loads(line) for line in (tmp_path / "whole" / "private" / "trace.jsonl").read_text().splitlines()]
    assert 0.0 in [row["metric"] for row in rows]
    assert whole.releases < whole.mechanism.releases
    assert any(f"ended after {whole.releases} measurements" in note for note in whole.notes)
    told_again = recorded_run(tmp_path / "whole").result
    assert told_again is not None
    assert told_again.notes == whole.notes
    with pytest.raises(KeyboardInterrupt):
        Training(settings=chosen, splits=digits, checkpoint_every=2, report=stop_at(stopped)).start(tmp_path / "part")
    recorded = recorded_run(tmp_path / "part")
    Training(settings=chosen, splits=digits, mechanism=recorded.mechanism).resume(tmp_path / "part")
    assert public_files(tmp_path / "part") == public_files(tmp_path / "whole")
    assert verify_run(tmp_path / "whole").holds
    assert whole.epsilon is not None
    assert 0.599 < whole.epsilon <= 0.6


def test_it_learns(digits, tmp_path):
    chosen = settings_from({"method": "dpagd", "dataset": "digits", "releases": 25, "seed": 0, "evaluate_every": 0})
    result = Training(settings=chosen, splits=digits).start(tmp_path / "run")
    assert result.test_accuracy is not None
    assert result.test_accuracy > 0.75
