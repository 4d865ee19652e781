from __future__ import annotations

import copy
import inspect
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, WeightedRandomSampler

from sluice import PrivacyEngine
from sluice._base.errors import InputError, UnsupportedModuleError
from sluice.mechanism.gates import ClippingBiasGate, CoinGate
from sluice.mechanism.scaling import Clip
from sluice.mechanism.selective_release import SelectiveRelease
from sluice.randomness.noise import SeededNoise
from sluice.training.options import TrainingOptions
from small_runs import GATE, RECORDS, THINNING, Run, blobs, same, small_model


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adamw"])
@pytest.mark.parametrize(
    "gate",
    [None, GATE, CoinGate(probability=0.4), THINNING, replace(THINNING, strength=-2.0)],
    ids=["none", "bias", "coin", "thinning", "thickening"],
)
def test_both_ways_of_training_give_the_same_weights(optimizer, gate):
    loop = Run(optimizer=optimizer, gate=gate, max_physical_batch_size=16).loop()
    fast = Run(optimizer=optimizer, gate=gate, max_physical_batch_size=16).fast()
    assert torch.allclose(loop.weights(), fast.weights(), atol=1e-5)
    assert loop.engine.released == fast.engine.released == 12
    assert not torch.allclose(loop.weights(), torch.cat([p.detach().flatten() for p in small_model().parameters()]))


@pytest.mark.parametrize("gate", [GATE, THINNING], ids=["bias", "thinning"])
def test_the_size_of_the_pieces_changes_nothing(gate):
    weights = [Run(gate=gate, max_physical_batch_size=size).loop().weights() for size in (1, 7, 256)]
    assert torch.allclose(weights[0], weights[2], atol=1e-5)
    assert torch.allclose(weights[1], weights[2], atol=1e-5)


def test_one_step_is_the_clipped_sum_plus_noise_over_the_expected_size():
    """Against a plain implementation: every record sampled, nearly no noise."""
    run = Run(sample_rate=1.0, noise_multiplier=1e-6, max_grad_norm=0.05, releases=1)
    before = copy.deepcopy(run.model)
    run.loop()
    total = [torch.zeros_like(p) for p in before.parameters()]
    for x, y in blobs():
        gradients = torch.autograd.grad(F.cross_entropy(before(x[None]), y[None]), list(before.parameters()))
        norm = torch.sqrt(sum(g.square().sum() for g in gradients))
        for slot, g in zip(total, gradients, strict=True):
            slot += g * min(1.0, 0.05 / norm.item())
    for p, start, slot in zip(run.model.parameters(), before.parameters(), total, strict=True):
        assert torch.allclose(p, start - 0.5 * slot / RECORDS, atol=1e-6)


def test_a_thinned_step_is_the_sum_over_those_whose_coins_let_them():
    """Against a plain implementation, which draws the same coins: nearly every record a candidate, nearly no noise."""
    rate = 1 - 2.0**-20
    run = Run(sample_rate=rate, noise_multiplier=1e-6, releases=1, gate=THINNING)
    before = copy.deepcopy(run.model)
    run.loop()
    noise = SeededNoise(11)
    candidates = noise.bernoulli(RECORDS, rate).nonzero().flatten()
    coins = noise.uniform((len(candidates),))
    total = [torch.zeros_like(p) for p in before.parameters()]
    kept = 0
    for record, coin in zip(noise.random_order(candidates), coins, strict=True):
        x, y = blobs()[int(record)]
        gradients = torch.autograd.grad(F.cross_entropy(before(x[None]), y[None]), list(before.parameters()))
        norm = torch.sqrt(sum(g.square().sum() for g in gradients))
        if coin < THINNING.keep_probability(norm[None], sample_rate=rate)[0]:
            kept += 1
            for slot, g in zip(total, gradients, strict=True):
                slot += g * min(1.0, 1.0 / norm.item())
    assert 0 < kept <= RECORDS
    for p, start, slot in zip(run.model.parameters(), before.parameters(), total, strict=True):
        assert torch.allclose(p, start - 0.5 * slot / (rate * RECORDS), atol=1e-4)


def test_a_loop_over_means_is_charged_for_all_records_of_a_piece():
    run = Run(gate=THINNING, max_physical_batch_size=16)
    assert run.engine.mechanism.gate.moved_records == 16
    assert Run(gate=THINNING, loss_reduction="sum").engine.mechanism.gate.moved_records == 1
    uncharged = replace(run.engine.mechanism, gate=THINNING)
    engine, model = PrivacyEngine(seed=1), small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine.make_private_by(uncharged, module=model, optimizer=optimizer, data_loader=blobs())
    with pytest.raises(InputError, match="moved_records=1 is not allowed in a loop of your own over a mean"):
        engine.ordinary_loop()
    assert next(engine.releases(F.cross_entropy)) == 1


def test_a_loop_over_means_is_charged_for_what_rounding_does_to_the_metric():
    charged = Run(gate=GATE).engine.mechanism
    assert charged.gate.metric_error > 0

    def wired(mechanism, **options) -> PrivacyEngine:
        engine, model = PrivacyEngine(seed=1), small_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        options = TrainingOptions(**options)
        engine.make_private_by(mechanism, module=model, optimizer=optimizer, data_loader=blobs(), options=options)
        return engine

    uncharged = replace(charged, gate=replace(charged.gate, metric_error=0.0))
    with pytest.raises(InputError, match="metric_error=0 is not allowed in a loop of your own over a mean"):
        wired(uncharged).ordinary_loop()
    for engine in (wired(charged), wired(uncharged, loss_reduction="sum")):
        engine.ordinary_loop()
    assert next(wired(uncharged).releases(F.cross_entropy)) == 1


def snapshot(run: Run) -> dict:
    return copy.deepcopy(
        {
            "weights": run.weights(),
            "optimizer": run.inner.state_dict(),
            "scheduler": run.engine._updater.lr_scheduler.state_dict(),
            "reference": run.engine._running().reference,
            "released": run.engine.released,
            "epsilon": run.engine.get_epsilon(1e-5) if run.engine.released else 0.0,
            "average": run.engine._average.state_dict(),
        }
    )


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_a_rejected_attempt_leaves_everything_bit_identical(optimizer):
    run = Run(
        optimizer=optimizer,
        gate=GATE,
        ema_decay=0.9,
        lr_scheduler=lambda inner: torch.optim.lr_scheduler.StepLR(inner, 3, 0.5),
    )
    rejections = releases = 0
    for batch in run.loader:
        before = snapshot(run)
        run.step(batch)
        after = snapshot(run)
        if after["released"] == before["released"]:
            rejections += 1
            assert same(before, after)
        else:
            releases += 1
            assert not torch.equal(before["weights"], after["weights"])
    assert rejections > 0
    assert releases == 12


@pytest.mark.parametrize("way", ["loop", "fast"])
def test_empty_batches_are_released_as_noise_and_charged(way):
    run = Run(sample_rate=1e-9, releases=4, noise_multiplier=2.0)
    start = run.weights()
    getattr(run, way)()
    assert run.engine.released == 4
    assert run.engine.mechanism.expected_batch_size == pytest.approx(1e-9 * RECORDS)
    assert not torch.equal(start, run.weights())


def test_seeded_runs_repeat_and_secure_runs_do_not():
    assert torch.equal(Run(seed=1).fast().weights(), Run(seed=1).fast().weights())
    assert not torch.equal(Run(seed=1).fast().weights(), Run(seed=2).fast().weights())
    assert not torch.equal(Run(seed=None).fast().weights(), Run(seed=None).fast().weights())


def test_the_average_of_released_weights():
    run = Run(releases=3, ema_decay=0.5, seed=4)
    history = []
    for batch in run.loader:
        run.step(batch)
        history.append(run.weights())
    expected = history[0]
    for weights in history[1:]:
        expected = 0.5 * expected + 0.5 * weights
    with run.engine.averaged() as averaged:
        found = torch.cat([p.detach().flatten() for p in averaged.parameters()])
    assert torch.allclose(found, expected, atol=1e-6)
    with pytest.raises(InputError, match="ema_decay"), Run().engine.averaged():
        pass


def test_the_module_is_neither_wrapped_nor_renamed_nor_marked():
    run = Run()
    keys = list(small_model().state_dict())
    run.loop()
    assert list(run.model.state_dict()) == keys
    assert type(run.model) is nn.Sequential
    assert all(p.requires_grad for p in run.model.parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks or "forward" in m.__dict__ for m in run.model.modules())
    copy.deepcopy(run.model)


class Stream(IterableDataset):
    def __iter__(self):
        yield torch.zeros(4), 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sample_rate": None}, "sample_rate=None is not allowed"),
        ({"sample_rate": 1.5}, "sample_rate=1.5 is not allowed"),
        ({"epochs": 2, "releases": 3}, "give exactly one of the two"),
        ({"scaling": Clip(max_grad_norm=3.0)}, "contradicts max_grad_norm=1.0"),
        ({"loss_reduction": "none"}, "loss_reduction='none' is not allowed"),
        ({"max_physical_batch_size": 0}, "max_physical_batch_size=0 is not allowed"),
        ({"ema_decay": 1.0}, "ema_decay=1.0 is not allowed"),
        ({"noise_multiplier": 0}, "noise_multiplier=0 is not allowed"),
        ({"gate": ClippingBiasGate()}, "noise=None is not allowed"),
        ({"data": Stream()}, "cannot be sampled by index"),
        ({"data": TensorDataset(torch.zeros(0, 4))}, "empty data set"),
        (
            {"data": DataLoader(blobs(), batch_size=8, sampler=WeightedRandomSampler([1.0] * RECORDS, RECORDS))},
            "samples by WeightedRandomSampler",
        ),
    ],
)
def test_bad_arguments_are_refused(options, message):
    with pytest.raises(InputError, match=message):
        Run(**options)


def test_an_optimizer_of_other_parameters_is_refused():
    model = small_model()
    for parameters, message in [
        (small_model().parameters(), "does not hold the trainable parameters 0.weight"),
        ([*model.parameters(), nn.Parameter(torch.zeros(1))], "1 parameters that are not the module's"),
    ]:
        with pytest.raises(InputError, match=message):
            PrivacyEngine().make_private(
                module=model,
                optimizer=torch.optim.SGD(parameters, lr=0.1),
                data_loader=blobs(),
                noise_multiplier=1.0,
                max_grad_norm=1.0,
                releases=1,
                sample_rate=0.1,
            )


def test_the_rate_is_the_batch_size_over_the_number_of_records():
    loader = DataLoader(blobs(1000), batch_size=300, shuffle=True)
    assert Run(data=loader, sample_rate=None).engine.mechanism.sample_rate == 300 / 1000


class Records(Dataset):
    """Read one by one, with a target that is not last of two."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x, y = blobs()[index]
        return x, y


@pytest.mark.parametrize("workers", [0, 1])
def test_any_map_style_data_set_works(workers):
    loader = DataLoader(Records(), batch_size=8, num_workers=workers)
    run = Run(data=loader, sample_rate=None, releases=3, max_physical_batch_size=5).loop()
    again = Run(data=TensorDataset(*[t[:40] for t in blobs().tensors]), sample_rate=8 / 40, releases=3).loop()
    assert torch.allclose(run.weights(), again.weights(), atol=1e-5)


def core(mechanism: SelectiveRelease) -> tuple[PrivacyEngine, nn.Module]:
    engine, model = PrivacyEngine(seed=11, accountant="rdp"), small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    engine.make_private_by(mechanism, module=model, optimizer=optimizer, data_loader=blobs())
    return engine, model


def test_make_private_is_the_core_call_and_the_ordinary_loop():
    expected = Run(gate=GATE).loop()
    mechanism = expected.engine.mechanism
    assert isinstance(mechanism, SelectiveRelease)
    expected.close()
    engine, model = core(mechanism)
    module, optimizer, loader = engine.ordinary_loop(passes=3)
    assert module is model
    for made in (4, 8, 12):
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        assert engine.released == made
    engine.close()
    assert torch.equal(torch.cat([p.detach().flatten() for p in model.parameters()]), expected.weights())


def test_only_the_ordinary_loop_is_charged_for_its_rounding():
    engine, _ = core(SelectiveRelease.from_dict(Run().engine.mechanism.to_dict()))
    before = engine._running().context.sum_error
    engine.ordinary_loop()
    assert engine._running().context.sum_error > before


def test_a_mechanism_with_open_noise_is_not_trained():
    with pytest.raises(InputError, match="noise_multiplier=None is not allowed"):
        core(
            SelectiveRelease(
                sample_rate=0.3, expected_batch_size=60.0, scaling=Clip(max_grad_norm=1.0), releases=3, gate=None
            )
        )


def test_the_two_ways_to_set_up_take_the_same_options():
    plain = set(inspect.signature(PrivacyEngine.make_private).parameters)
    calibrated = set(inspect.signature(PrivacyEngine.make_private_with_epsilon).parameters)
    assert plain - calibrated == {"ledger_delta"}
    assert calibrated - plain == {"target_epsilon", "target_delta"}


class Renormalising(nn.Module):
    """Rescales the rows that it looks up, in the table itself."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(0.1 * torch.randn(50, 3))
        self.table.data[40:] *= 100  # rows that made-up samples do not reach

    def forward(self, x):
        return F.embedding(x, self.table, max_norm=1.0).mean(1)


class Counting(nn.Module):
    """Adds up what it has seen, in a parameter that is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.seen = nn.Parameter(torch.zeros(3), requires_grad=False)

    def forward(self, x):
        if self.training:
            self.seen.data += x.detach().float().sum(0)
        return self.layer(x.float())


@pytest.mark.parametrize("gate", [None, GATE])
@pytest.mark.parametrize("make", [Renormalising, Counting])
def test_what_a_forward_pass_writes_to_its_parameters_is_not_published(make, gate):
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    engine = PrivacyEngine(seed=1)
    words = TensorDataset(torch.randint(40, 50, (60, 3)), torch.arange(60) % 3)
    options = {"noise_multiplier": 1.0, "max_grad_norm": 1.0, "releases": 2, "sample_rate": 0.5}
    with pytest.raises(
        (InputError, UnsupportedModuleError), match=r"was changed by hand|is changed by the forward pass"
    ):
        engine.make_private(module=model, optimizer=optimizer, data_loader=words, gate=gate, **options)
        next(engine.releases(F.cross_entropy))
    assert engine.released == 0
