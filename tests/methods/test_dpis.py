from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy.stats import binomtest
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from sluice._base.errors import InputError
from sluice.accounting.events import SelectiveReleaseDpEvent, as_release, plain_release
from sluice.accounting.loss_distribution import hockey_stick_bound
from sluice.accounting.selective_rdp import renyi_divergences
from sluice.experiments.run import Progress, Training, recorded_run
from sluice.experiments.settings import settings_from
from sluice.gradients import PerSampleGradients
from sluice.mechanism.registry import mechanism_from_dict
from sluice.mechanism.scaling import MARGIN
from sluice.methods import dpis
from sluice.methods.dpis import ImportanceSampling, Options
from sluice.methods.dpis.execution import CLIP_RAMP, LEAST_SHARE, ImportanceSamplingExecutor, shares
from sluice.randomness.noise import SeededNoise
from sluice.runs.verify import verify_run
from sluice.training.batches import Batches
from sluice.training.context import TrainingContext
from sluice.training.engine import PrivacyEngine
from sluice.training.options import TrainingOptions
from sluice.training.weights import WeightUpdater

RUNS = 600


def mechanism(**changes: Any) -> ImportanceSampling:
    values: dict[str, Any] = {
        "dataset_size": 40,
        "wanted_rate": 0.25,
        "sample_rate": 0.5,
        "first_clip_norm": 0.7,
        "noise_multiplier": 2.0,
        "norm_noise": 15.0,
        "count_noise": 9.0,
        "norm_decay": 0.9,
        "clip_rate": 0.2,
        "clip_target": 0.5,
        "releases": 6,
    }
    return ImportanceSampling(**{**values, **changes})


def make_context(inputs: Tensor, targets: Tensor, *, lr: float = 1.0, seed: int = 0) -> TrainingContext:
    torch.manual_seed(0)
    model = nn.Linear(inputs.shape[1], 1)
    return TrainingContext(
        gradients=PerSampleGradients(model, loss_reduction="mean"),
        batches=Batches(TensorDataset(inputs, targets)),
        updater=WeightUpdater(module=model, optimizer=torch.optim.SGD(model.parameters(), lr=lr)),
        noise=SeededNoise(seed),
        piece_size=16,
        before_release=lambda number: None,
    )


def records(count: int, *, width: int = 3, seed: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    scales = torch.logspace(-2, 1, count)[:, None]
    return torch.randn(count, width, generator=generator) * scales, torch.randn(count, 1, generator=generator)


def each_gradient(context: TrainingContext) -> Tensor:
    """Row i is the gradient of record i, one at a time by autograd."""
    rows = []
    for index in range(context.dataset_size):
        [(x, y)] = list(context.pairs(torch.tensor([index])))
        loss = F.mse_loss(context.module(x), y)
        rows.append(torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(context.module.parameters()))]))
    return torch.stack(rows).double()


class ScriptedNoise(SeededNoise):
    """Everybody is a candidate, and the coins are the ones given."""

    def __init__(self, coins: Tensor) -> None:
        super().__init__(0)
        self._coins = coins

    def bernoulli(self, count: int, probability: float) -> Tensor:
        return torch.ones(count, dtype=torch.bool)

    def uniform(self, shape: Any) -> Tensor:
        assert tuple(shape) == tuple(self._coins.shape)
        return self._coins


def test_thinned_and_lengthened_gradients_average_to_the_clipped_ones():
    """Exactly: each record's kept and lost contribution, weighted by the probability of its coin."""
    generator = torch.Generator().manual_seed(2)
    lengths = torch.logspace(-5, 2, 40, dtype=torch.float64)[:, None]
    gradients = F.normalize(torch.randn(40, 5, generator=generator, dtype=torch.float64)) * lengths
    norms = gradients.norm(dim=1)
    clip = 0.5
    found = shares(norms, clip_norm=clip)
    assert float(found.keep.min()) == LEAST_SHARE < float(found.keep.max()) == 1.0
    expected = (found.keep * found.weight)[:, None] * gradients * clip
    clipped = gradients * (clip / norms).clamp(max=1.0)[:, None]
    torch.testing.assert_close(expected, clipped * (1 - MARGIN), rtol=1e-12, atol=1e-15)


def test_a_release_sums_the_kept_unit_vectors(monkeypatch):
    x, y = records(40)
    context = make_context(x, y)
    monkeypatch.setattr(context.noise, "random_order", lambda indices: indices)  # so that coins belong to known records
    gradients = each_gradient(context)
    norms = gradients.norm(dim=1)
    coins = torch.linspace(0, 0.999, 40, dtype=torch.float64).flip(0)
    clip = 1.01 * float(norms.median())
    executor = ImportanceSamplingExecutor(
        mechanism(first_clip_norm=clip, noise_multiplier=1e-6, norm_noise=1e-6), context
    )
    executor.noise = ScriptedNoise(coins)  # type: ignore[assignment]
    keep = (norms / clip).clamp(min=LEAST_SHARE, max=1.0)
    kept = coins < keep
    assert 5 < int(kept.sum()) < 35
    sums, count = executor._measure(torch.arange(40), F.mse_loss, expected=10.0)
    flat = torch.cat([part.flatten() for part in sums.gradients.tensors().values()]).double()
    expected = (gradients / norms.clamp(min=LEAST_SHARE * clip)[:, None])[kept].sum(0) * (1 - MARGIN)
    torch.testing.assert_close(flat, expected, rtol=1e-4, atol=1e-5)
    assert count == int(kept.sum())
    assert float(sums.shares) == pytest.approx(float(keep.sum()), rel=1e-6)
    ramp = ((norms / clip - 1) / (2 * CLIP_RAMP)).clamp(-0.5, 0.5)
    assert float(sums.clipped) == pytest.approx(float(ramp.sum()), abs=1e-4)


def test_the_update_estimates_the_mean_clipped_gradient_in_units_of_the_first_clip_norm():
    """Averaged over many releases that start from the same weights, with hardly any noise."""
    x, y = records(40)
    context = make_context(x, y, lr=1.0)
    gradients = each_gradient(context)
    norms = gradients.norm(dim=1)
    clip = float(norms.median())
    quiet = {"noise_multiplier": 1e-4, "norm_noise": 1e-3, "count_noise": 1e-3, "releases": RUNS}
    executor = ImportanceSamplingExecutor(mechanism(first_clip_norm=clip, **quiet), context)
    start = context.updater.weights()
    total = torch.zeros(gradients.shape[1], dtype=torch.float64)
    for _ in range(RUNS):
        executor.mean_share, executor.clip_norm = 0.6, clip / 2
        executor.make_release(F.mse_loss)
        now = context.updater.weights()
        total += torch.cat([(start[name] - now[name]).flatten() for name in start]).double()
        context.updater.move(start)
    mean = gradients * (clip / 2 / norms).clamp(max=1.0)[:, None]
    expected = mean.mean(0) * 2  # C is half of the first one, and the step is as long as if it were not
    spread = clip / math.sqrt(RUNS * 0.4 * 40)
    assert (total / RUNS - expected).abs().max() < 3 * spread
    assert expected.abs().max() > 10 * spread


def test_records_are_sampled_in_proportion_to_their_clipped_norms():
    x, y = records(40)
    context = make_context(x, y)
    norms = each_gradient(context).norm(dim=1)
    clip = float(norms.median())
    one = mechanism(first_clip_norm=clip, wanted_rate=0.25, sample_rate=0.5)
    rate = one.rate_at(0.7)
    assert rate == pytest.approx(0.25 / 0.7)
    trials = 20_000
    noise = SeededNoise(3)
    keep = shares(norms, clip_norm=clip).keep
    candidates = noise.bernoulli(40 * trials, rate).reshape(trials, 40)
    times = (candidates & (noise.uniform((trials, 40)) < keep)).sum(0)
    for index in range(40):
        share = max(min(float(norms[index]), clip), LEAST_SHARE * clip)
        wanted = 0.25 * share / (0.7 * clip)  # b min(n, C) / K over the number of records
        assert binomtest(int(times[index]), trials, wanted).pvalue > 1e-5


@pytest.mark.parametrize("clip", [1e-3, 1.0, 40.0])
def test_shares_are_bounded_for_every_norm(clip):
    norms = torch.tensor([0.0, 1e-45, 1e-20, 1e-4, 0.5, 1.0, 1.1, 1e10, 3e38, math.inf, math.nan])
    found = shares(norms, clip_norm=clip)
    assert ((found.keep >= LEAST_SHARE) & (found.keep <= 1)).all()
    assert found.weight.isfinite().all()
    assert (found.weight.float().isfinite()).all()
    finite = norms.isfinite()
    lengths = found.weight.float().double()[finite] * norms.double()[finite] * (1 + 1e-5)
    assert (lengths <= 1).all()
    assert (found.clipped.abs() <= 0.5).all()
    assert found.clipped[norms > 1.1 * clip].eq(0.5)[:-1].all()
    assert found.keep[~finite].tolist() == [LEAST_SHARE] * 2
    assert found.clipped[~finite].tolist() == [-0.5] * 2


def test_a_record_that_is_not_finite_adds_nothing():
    x, y = records(20)
    broken = x.clone()
    broken[7] = math.nan
    executor = ImportanceSamplingExecutor(mechanism(dataset_size=20), make_context(broken, y))
    executor.noise = ScriptedNoise(torch.zeros(20, dtype=torch.float64))  # type: ignore[assignment]
    with pytest.warns(UserWarning, match="not finite"):
        sums, _ = executor._measure(torch.arange(20), F.mse_loss, expected=10.0)
    others = torch.tensor([index for index in range(20) if index != 7])
    clean = ImportanceSamplingExecutor(mechanism(dataset_size=20), make_context(x, y))
    clean.noise = ScriptedNoise(torch.zeros(19, dtype=torch.float64))  # type: ignore[assignment]
    without, _ = clean._measure(others, F.mse_loss, expected=10.0)
    for name, part in sums.gradients.tensors().items():
        torch.testing.assert_close(part, without.gradients.tensors()[name])


def test_no_release_samples_above_the_rate_that_is_paid_for():
    x, y = records(40)
    seen: list[float] = []
    context = make_context(x, y)

    class Watching(SeededNoise):
        def bernoulli(self, count: int, probability: float) -> Tensor:
            seen.append(probability)
            return super().bernoulli(count, probability)

    one = mechanism(releases=60, norm_noise=8.0, norm_decay=0.0, clip_rate=1.0)
    executor = ImportanceSamplingExecutor(one, context)
    executor.noise = Watching(5)  # type: ignore[assignment]
    while not executor.done:
        executor.make_release(F.mse_loss)
    assert len(seen) == 60
    assert max(seen) == 0.5 == one.sample_rate
    assert min(seen) >= 0.25
    assert len(set(seen)) > 5
    with pytest.raises(InputError, match="all releases=60"):
        executor.make_release(F.mse_loss)


def test_an_empty_sample_is_released_as_any_other():
    x, y = records(40)
    executor = ImportanceSamplingExecutor(mechanism(wanted_rate=1e-9, sample_rate=1e-9), make_context(x, y))
    executor.make_release(F.mse_loss)
    assert executor.trace.measured == [0]
    assert executor.released == 1


# The exact law of one release with three other records, against what is accounted.

ORDERS = np.array([1.5, 2.0, 4.0, 8.0, 20.0])
EPSILONS = np.array([0.0, 0.05, 0.2, 0.5, 1.0])


def contribution_law(gradient: float, *, rate: float, clip: float) -> list[tuple[float, tuple[float, float, float]]]:
    """(probability, what is added to the three sums) of one record with a one-dimensional gradient."""
    found = shares(torch.tensor([abs(gradient)], dtype=torch.float64), clip_norm=clip)
    keep, weight, clipped = float(found.keep), float(found.weight), float(found.clipped)
    return [
        (1 - rate, (0.0, 0.0, 0.0)),
        (rate * (1 - keep), (0.0, keep, clipped)),
        (rate * keep, (weight * gradient, keep, clipped)),
    ]


def densities(gradients: list[float], one: ImportanceSampling, *, rate: float, clip: float) -> np.ndarray:
    """The density of the three released numbers on a grid, times the cell."""
    stds = (one.noise_multiplier, one.norm_noise, one.count_noise)
    axes = [np.linspace(-4.2 - 8 * std, 4.2 + 8 * std, 57) for std in stds]
    total = np.zeros((57, 57, 57))
    laws = [contribution_law(gradient, rate=rate, clip=clip) for gradient in gradients]
    for outcome in itertools.product(*laws):
        weight = math.prod(probability for probability, _ in outcome)
        means = [sum(added[block] for _, added in outcome) for block in range(3)]
        parts = [
            np.exp(-0.5 * ((axis - mean) / std) ** 2) / (std * math.sqrt(2 * math.pi)) * (axis[1] - axis[0])
            for axis, mean, std in zip(axes, means, stds, strict=True)
        ]
        total += weight * np.einsum("i,j,k->ijk", *parts)
    return total.ravel()


def worst_ratio(others: list[float], z: float, one: ImportanceSampling, *, rate: float, clip: float) -> float:
    """The largest exact divergence over the accounted one."""
    event = as_release(
        plain_release(sampling_probability=one.sample_rate, noise_multiplier=one.effective_noise_multiplier)
    )
    assert event is not None
    return max_ratio(
        event, densities([*others, z], one, rate=rate, clip=clip), densities(others, one, rate=rate, clip=clip)
    )


def max_ratio(event: SelectiveReleaseDpEvent, with_z: np.ndarray, without: np.ndarray) -> float:
    bound = renyi_divergences(event, ORDERS)
    worst = 0.0
    for direction, top, bottom in (("remove", with_z, without), ("add", without, with_z)):
        usable = (top > 1e-250) & (bottom > 1e-250)
        exponents = ORDERS[:, None] * np.log(top[usable]) + (1 - ORDERS[:, None]) * np.log(bottom[usable])
        peak = exponents.max(axis=1)
        exact = (peak + np.log(np.exp(exponents - peak[:, None]).sum(axis=1))) / (ORDERS - 1)
        worst = max(worst, float(np.max(exact / bound)))
        sticks = hockey_stick_bound(event, direction, EPSILONS, pieces=12)  # type: ignore[arg-type]
        exact_sticks = np.array([np.maximum(top - math.exp(e) * bottom, 0).sum() for e in EPSILONS])
        relevant = exact_sticks > 1e-7
        if relevant.any():
            with np.errstate(divide="ignore"):  # a bound of zero where there is something is as wrong as can be
                worst = max(worst, float(np.max(exact_sticks[relevant] / sticks[relevant])))
    return worst


def toy(seed: int) -> tuple[list[float], float, ImportanceSampling, float, float]:
    rng = np.random.default_rng(seed)
    clip = float(rng.uniform(0.5, 1.5))
    one = mechanism(
        sample_rate=float(rng.choice([0.1, 0.5, 0.9])),
        wanted_rate=0.05,
        noise_multiplier=float(rng.uniform(0.7, 3.0)),
        norm_noise=float(rng.uniform(0.7, 6.0)),
        count_noise=float(rng.uniform(0.5, 4.0)),
    )
    rate = one.sample_rate * float(rng.choice([1.0, rng.uniform(0.2, 1.0)]))
    others = [float(g) for g in rng.uniform(-2, 2, size=2)]
    return others, float(rng.choice([-2.0, 2.0, rng.uniform(-1, 1)])), one, rate, clip


@pytest.mark.parametrize("block", range(3))
def test_no_exact_divergence_exceeds_what_is_accounted(block):
    for seed in range(8):
        others, z, one, rate, clip = toy(100 * block + seed)
        assert worst_ratio(others, z, one, rate=rate, clip=clip) <= 1 + 1e-5


def test_the_bound_is_attained_by_a_record_that_is_always_kept():
    one = mechanism(sample_rate=0.5, wanted_rate=0.1, noise_multiplier=1.0, norm_noise=2.0, count_noise=1.0)
    assert worst_ratio([], 2.0, one, rate=0.5, clip=1.0) > 0.999


def test_accounting_with_the_record_s_own_rate_is_caught():
    """The rate at which z is kept is not enough: it is looked at, and counted in the statistics, more often."""
    one = mechanism(sample_rate=0.5, wanted_rate=0.1, noise_multiplier=1.0, norm_noise=1.5, count_noise=1.0)
    laws = [densities(others, one, rate=0.5, clip=1.0) for others in ([0.4, 0.2], [0.4])]
    event = as_release(plain_release(sampling_probability=0.1, noise_multiplier=one.effective_noise_multiplier))
    assert event is not None
    assert max_ratio(event, *laws) > 1.2


def test_statistics_that_are_not_charged_are_caught():
    one = mechanism(sample_rate=0.5, wanted_rate=0.1, noise_multiplier=3.0, norm_noise=1.0, count_noise=1.0)
    laws = [densities(others, one, rate=0.5, clip=1.0) for others in ([2.0], [])]
    event = as_release(plain_release(sampling_probability=0.5, noise_multiplier=3.0))
    assert event is not None
    assert max_ratio(event, *laws) > 1.5


# Planning.


def test_the_calibrated_run_meets_its_budget_and_no_less():
    settings = settings_from({"method": "dpis", "dataset": "digits", "releases": 50, "epsilon": 2.0})
    planned = dpis.plan(settings, 1000)
    epsilon = planned.epsilon_after(50, delta=settings.delta, accountant="pld")
    assert 1.99 < epsilon <= 2.0
    assert planned.sample_rate == 1.5 * 256 / 1000
    assert planned.noise_multiplier == pytest.approx(planned.effective_noise_multiplier / math.sqrt(0.98), rel=1e-9)
    assert planned.epsilon_after(0, delta=1e-5, accountant="rdp") == 0
    assert planned.epsilon_after(20, delta=1e-5, accountant="rdp") < planned.epsilon_after(
        50, delta=1e-5, accountant="rdp"
    )


def test_given_statistics_are_kept_and_refused_where_they_would_spend_everything():
    base: dict[str, Any] = {"method": "dpis", "dataset": "digits", "releases": 50, "accountant": "rdp"}
    planned = dpis.plan(settings_from({**base, "options": {"norm_noise": 30.0, "count_noise": 40.0}}), 1000)
    assert (planned.norm_noise, planned.count_noise) == (30.0, 40.0)
    assert planned.epsilon_after(50, delta=1e-5, accountant="rdp") <= 3.0
    with pytest.raises(InputError, match="statistics alone"):
        dpis.plan(settings_from({**base, "options": {"norm_noise": 0.5}}), 1000)
    given = dpis.plan(settings_from({**base, "noise_multiplier": 4.0}), 1000)
    assert (given.noise_multiplier, given.norm_noise, given.count_noise) == (4.0, 40.0, 20.0)


def test_the_worst_rate_is_never_above_one():
    settings = settings_from({"method": "dpis", "dataset": "digits", "noise_multiplier": 5.0, "batch_size": 900})
    assert dpis.plan(settings, 1000).sample_rate == 1.0


@pytest.mark.parametrize(
    "options",
    [
        {"rate_cap": 0.9},
        {"rate_cap": math.inf},
        {"norm_noise": 0.0},
        {"count_noise": -1.0},
        {"norm_decay": 1.0},
        {"clip_rate": -0.1},
        {"clip_rate": 2000.0},
        {"norm_noise": 1e-300},
        {"count_noise": 1e300},
        {"clip_target": 1.0},
    ],
)
def test_bad_options_are_refused_by_name(options):
    [name] = options
    with pytest.raises(InputError, match=name):
        Options(**options)


def test_scaling_has_no_effect_and_is_refused():
    with pytest.raises(InputError, match="scaling=global has no effect"):
        settings_from({"method": "dpis", "dataset": "digits", "scaling": "global"})


def test_a_promise_survives_its_ledger():
    one = mechanism()
    assert mechanism_from_dict(one.to_dict()) == one
    with pytest.raises(InputError, match="unknown keys surprise"):
        mechanism_from_dict({**one.to_dict(), "surprise": 1})
    with pytest.raises(InputError, match="wanted_rate"):
        mechanism(wanted_rate=0.6)


# Whole runs.


def stop_at(release: int) -> Callable[[Progress], None]:
    def report(progress: Progress) -> None:
        if progress.release == release:
            raise KeyboardInterrupt

    return report


def public_files(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted((path / "public").iterdir())}


def test_an_interrupted_run_ends_with_the_same_bytes(digits, tmp_path):
    base = {"method": "dpis", "dataset": "digits", "releases": 8, "noise_multiplier": 2.0, "accountant": "rdp"}
    settings = settings_from({**base, "seed": 3, "evaluate_every": 4, "max_grad_norm": 3.0})
    whole = Training(settings=settings, splits=digits).start(tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        Training(settings=settings, splits=digits, checkpoint_every=2, report=stop_at(5)).start(tmp_path / "stopped")
    recorded = recorded_run(tmp_path / "stopped")
    Training(settings=settings, splits=digits, mechanism=recorded.mechanism).resume(tmp_path / "stopped")
    assert public_files(tmp_path / "stopped") == public_files(tmp_path / "whole")
    assert verify_run(tmp_path / "whole").holds
    assert whole.epsilon == pytest.approx(whole.mechanism.epsilon_after(8, delta=1e-5, accountant="rdp"))


def test_it_learns_and_adapts(digits, tmp_path):
    settings = settings_from(
        {"method": "dpis", "dataset": "digits", "releases": 60, "noise_multiplier": 2.0, "seed": 0}
    )
    training = Training(settings=settings, splits=digits)
    result = training.start(tmp_path / "run")
    assert result.test_accuracy is not None
    assert result.test_accuracy > 0.85
    state = training.engine.state_dict()["releases"]
    assert 0 < state["mean_share"] < 1
    assert state["clip_norm"] != settings.max_grad_norm


def test_pieces_of_any_size_give_the_same_run():
    x, y = records(40)
    outcomes = []
    for piece in (7, 64):
        torch.manual_seed(0)
        model = nn.Linear(3, 1)
        engine = PrivacyEngine(accountant="rdp", seed=1)
        engine.make_private_by(
            mechanism(),
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            data_loader=TensorDataset(x, y),
            options=TrainingOptions(max_physical_batch_size=piece),
        )
        assert list(engine.releases(F.mse_loss)) == [1, 2, 3, 4, 5, 6]
        outcomes.append(model.weight.detach().clone())
    torch.testing.assert_close(*outcomes)
