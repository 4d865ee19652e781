"""Clipping by layer, by a quantile and by a schedule, as it is carried out: sensitivity, noise, resuming."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from sluice import PrivacyEngine, TrainingOptions
from sluice._base.errors import InputError
from sluice.gradients import PerSampleGradients
from sluice.mechanism.clipped_release import ClippedRelease
from sluice.mechanism.clipping import COUNT_GRID, Clipping, FlatClipping, LayerClipping, QuantileClipping, Schedule
from sluice.runs.ledger import read_ledger
from sluice.runs.privacy_spent import spending
from sluice.training.clipped_release import ClippedBatch, ClippedReleaseExecutor, layers_of, unclipped

RECORDS = 60
LAYERS = LayerClipping.of({"0": 0.3, "2": 0.05}, schedule=Schedule(factors=(1.0, 0.5), every=2))
QUANTILE = QuantileClipping(max_grad_norm=0.2, noise=3.0, smallest=1e-3, largest=1e3)
FLAT = FlatClipping(max_grad_norm=0.5, schedule=Schedule(factors=(1.0, 0.1)))
WAYS = {"flat": FLAT, "layers": LAYERS, "quantile": QUANTILE}


def records(count: int = RECORDS) -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    y = torch.arange(count) % 3
    return TensorDataset(torch.randn(count, 4, generator=generator) + y[:, None], y)


def small_model() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(4, 8), nn.LeakyReLU(), nn.Linear(8, 3))


def engine_of(
    clipping: Clipping,
    *,
    data: TensorDataset | None = None,
    ledger: object = None,
    seed: int | None = 11,
    **changes: object,
):
    settings: dict = {
        "sample_rate": 0.3,
        "expected_batch_size": 18.0,
        "clipping": clipping,
        "noise_multiplier": 1.0,
        "releases": 6,
        **changes,
    }
    model = small_model()
    engine = PrivacyEngine(seed=seed, accountant="rdp")
    engine.make_private_by(
        ClippedRelease(**settings),
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9),
        data_loader=records() if data is None else data,
        options=TrainingOptions(ledger=ledger),
    )
    return engine, model


def weights(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()]).clone()


@pytest.mark.parametrize("way", WAYS)
def test_both_ways_of_training_give_the_same_weights_and_spend_the_same(way):
    engine, model = engine_of(WAYS[way])
    list(engine.releases(F.cross_entropy))
    own, other = engine_of(WAYS[way])
    _, optimizer, loader = own.ordinary_loop()
    for x, y in loader:
        F.cross_entropy(other(x), y).backward()
        optimizer.step()
    assert own.released == engine.released == 6
    torch.testing.assert_close(weights(model), weights(other), rtol=2e-2, atol=2e-3)
    assert own.get_epsilon(1e-5) == engine.get_certified_epsilon(1e-5)


def drafted(clipping: Clipping, data: TensorDataset) -> tuple[ClippedReleaseExecutor, object]:
    """The raw sums over all records: nothing is left to chance at a rate of one."""
    engine, _ = engine_of(clipping, data=data, sample_rate=1.0)
    executor = engine._executor
    assert isinstance(executor, ClippedReleaseExecutor)
    return executor, executor.prepare(F.cross_entropy).content


@pytest.mark.parametrize("size", [1e-3, 1.0, 1e4, 1e18, math.inf, math.nan])
@pytest.mark.parametrize("way", WAYS)
def test_no_record_moves_the_sums_by_more_than_their_sensitivity(way, size):
    """One record more, however hostile: it may add the whole bound to every layer at once, and does for a large one."""
    base = records()
    hostile = torch.full((1, 4), size)
    more = TensorDataset(torch.cat([base.tensors[0], hostile]), torch.cat([base.tensors[1], torch.tensor([1])]))
    _, without = drafted(WAYS[way], base)
    executor, with_it = drafted(WAYS[way], more)
    added, base_sum = with_it.raw_sum.tensors(), without.raw_sum.tensors()
    moved = math.sqrt(sum(float((added[k] - base_sum[k]).double().square().sum()) for k in base_sum))
    assert with_it.sensitivity == without.sensitivity
    assert moved <= with_it.sensitivity * (1 + executor.context.sum_error)
    assert abs(with_it.raw_count - without.raw_count) <= 0.5
    if size == 1e4:
        assert moved > 0.99 * with_it.sensitivity
        assert way != "quantile" or with_it.raw_count - without.raw_count == -0.5


def test_each_layer_is_clipped_by_itself():
    """Against single records, in float64."""
    data, model = records(), small_model().double()
    expected = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for x, y in zip(*data.tensors, strict=True):
        gradients = torch.autograd.grad(F.cross_entropy(model(x[None].double()), y[None]), list(model.parameters()))
        named = dict(zip(expected, gradients, strict=True))
        for layer, bound in LAYERS.bounds_at(0).items():
            parts = [named[f"{layer}.weight"], named[f"{layer}.bias"]]
            norm = math.sqrt(sum(float(part.square().sum()) for part in parts))
            for name in ("weight", "bias"):
                expected[f"{layer}.{name}"] += named[f"{layer}.{name}"] * min(1.0, bound / norm)
    _, found = drafted(LAYERS, data)
    assert found.sensitivity == pytest.approx(math.hypot(0.3, 0.05))
    total = found.raw_sum.tensors()
    for name, value in expected.items():
        torch.testing.assert_close(total[name].double(), value, rtol=1e-3, atol=1e-4)


def test_noise_and_bounds_follow_their_schedules():
    """With no record in any batch a release is noise alone, as long as its bound and its factor say."""
    noisy = {"noise_schedule": Schedule(factors=(1.0, 3.0), every=3), "sample_rate": 1e-9, "releases": 6}
    engine, _ = engine_of(FlatClipping(max_grad_norm=2.0, schedule=Schedule(factors=(1.0, 0.1), every=2)), **noisy)
    published = []
    executor = engine._executor
    publish = executor.publish
    executor.publish = lambda content: published.append(publish(content)) or published[-1]
    list(engine.releases(F.cross_entropy))
    deviations = [
        torch.cat([part.flatten() for part in each["gradient"].values()]).double().square().mean().sqrt().item() * 18
        for each in published
    ]
    for found, expected in zip(deviations, [2.0, 2.0, 0.2, 0.6, 0.6, 0.6], strict=True):
        assert found == pytest.approx(expected, rel=0.35)


def test_the_bound_follows_the_quantile():
    """Nearly all records are unclipped at first: the bound falls until about half of them are clipped."""
    wide = QuantileClipping(max_grad_norm=50.0, noise=2.0, rate=0.5, smallest=1e-3, largest=1e3)
    engine, _ = engine_of(wide, sample_rate=1.0, expected_batch_size=60.0, releases=60)
    bounds = [engine._executor.bound for _ in engine.releases(F.cross_entropy)]
    assert bounds[0] < 50.0
    engine.close()
    model = small_model()
    found = PerSampleGradients(model, loss_reduction="mean").norms(*records().tensors, F.cross_entropy)
    assert bounds[-1] < 10 * float(found.median()) < 500.0


def test_sum_and_count_have_the_noise_that_is_charged():
    """Noise alone: what is published of an empty batch, many times."""
    engine, _ = engine_of(QUANTILE)
    executor = engine._executor
    counts, gradients = [], []
    for _ in range(400):
        executor.bound = 0.2
        empty = ClippedBatch(turn=0, sensitivity=0.2, raw_sum=executor.context.raw_sum(), raw_count=0.0)
        published = executor.publish(empty)
        counts.append(-math.log(published["bound"] / 0.2) / QUANTILE.rate * 18.0)
        gradients.append(torch.cat([part.flatten() for part in published["gradient"].values()]) * 18.0)
    count_noise = torch.tensor(counts).square().mean().sqrt().item()
    gradient_noise = torch.stack(gradients).double().square().mean().sqrt().item()
    assert count_noise == pytest.approx(3.0, rel=0.15)
    assert gradient_noise == pytest.approx(0.2 * engine.mechanism.gradient_noise_at(0), rel=0.03)
    assert math.hypot(0.2 / gradient_noise, 0.5 / count_noise) < 1.03


def test_a_norm_near_the_bound_counts_in_between_and_sums_are_exact():
    norms = torch.tensor([0.0, 0.9, 1.0, 1.1, math.inf, math.nan])
    found = unclipped(norms, bound=1.0)
    assert found.tolist() == [0.5, 0.5, 0.0, -0.5, -0.5, -0.5]
    several = unclipped(torch.linspace(0.9, 1.1, 1001), bound=1.0)
    assert bool((several.diff() <= 0).all())
    assert bool(((several / COUNT_GRID) == (several / COUNT_GRID).round()).all())
    assert float(several.sum()) == math.fsum(several.tolist())


@pytest.mark.parametrize("way", WAYS)
def test_a_run_resumes_bit_for_bit_and_its_ledger_is_charged(way, tmp_path):
    whole, expected = engine_of(WAYS[way])
    list(whole.releases(F.cross_entropy))
    engine, _ = engine_of(WAYS[way], ledger=tmp_path / "ledger.jsonl")
    engine.keep_in(tmp_path / "kept", every=1)
    for number in engine.releases(F.cross_entropy):
        if number == 3:
            break
    engine.close()
    resumed, model = engine_of(WAYS[way], ledger=tmp_path / "ledger.jsonl")
    resumed.load(tmp_path / "kept")
    list(resumed.releases(F.cross_entropy))
    resumed.close()
    assert torch.equal(weights(model), weights(expected))
    contents = read_ledger(tmp_path / "ledger.jsonl")
    assert contents.spent == 6
    assert spending(contents).epsilon == resumed.get_certified_epsilon(1e-5)


@pytest.mark.parametrize("way", WAYS)
def test_the_journal_leads_to_the_state_that_was_left(way, tmp_path):
    engine, model = engine_of(WAYS[way], seed=None)
    engine.keep_in(tmp_path / "kept")
    for number in engine.releases(F.cross_entropy):
        if number == 3:
            break
    engine.close()
    resumed, other = engine_of(WAYS[way], seed=None)
    resumed.load(tmp_path / "kept")
    assert resumed.released == 3
    assert torch.equal(weights(model), weights(other))
    assert resumed._executor.bound == engine._executor.bound


def test_bounds_for_other_layers_are_refused():
    assert layers_of(small_model()) == ["0", "2"]
    with pytest.raises(InputError, match=r"give a bound for each of \['0', '2'\]"):
        engine_of(LayerClipping.of({"0": 1.0}))
