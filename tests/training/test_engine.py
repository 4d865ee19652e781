from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, WeightedRandomSampler

from sluice import PrivacyEngine
from sluice._base.errors import DataError, InputError, SluiceError
from sluice.audit.canaries import Canaries
from sluice.mechanism.gates import ClippingBiasGate, CoinGate
from sluice.mechanism.scaling import Clip, GlobalScaling
from sluice.mechanism.selective_release import SelectiveRelease
from sluice.mechanism.thinning import ThinningGate
from sluice.randomness.noise import SeededNoise
from sluice.runs.ledger import read_ledger
from sluice.runs.privacy_spent import spending
from sluice.training.selective_release import GaveUpError

RECORDS = 120
GATE = ClippingBiasGate(gate_noise=1.0, reference_noise=4.0, small_norm=0.2)
THINNING = ThinningGate(strength=2.0, small_norm=0.2, large_norm=2.0)


def blobs(records: int = RECORDS) -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    y = torch.arange(records) % 3
    return TensorDataset(torch.randn(records, 4, generator=generator) + y[:, None], y)


def small_model() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


class Run:
    """A small private run; ``options`` go to make_private."""

    def __init__(
        self, *, seed: int | None = 11, optimizer: str = "sgd", data: object = None, **options: object
    ) -> None:
        self.model = small_model()
        makers = {
            "sgd": lambda p: torch.optim.SGD(p, lr=0.5, momentum=0.9),
            "adam": lambda p: torch.optim.Adam(p, lr=0.02),
            "adamw": lambda p: torch.optim.AdamW(p, lr=0.02),
        }
        self.inner = makers[optimizer](self.model.parameters())
        self.engine = PrivacyEngine(seed=seed, accountant="rdp")
        settings: dict = {"noise_multiplier": 1.0, "max_grad_norm": 1.0, "releases": 12, "sample_rate": 0.3, **options}
        if "lr_scheduler" in settings:
            settings["lr_scheduler"] = settings["lr_scheduler"](self.inner)
        _, self.optimizer, self.loader = self.engine.make_private(
            module=self.model, optimizer=self.inner, data_loader=blobs() if data is None else data, **settings
        )

    def step(self, batch: tuple[Tensor, Tensor]) -> None:
        x, y = batch
        self.optimizer.zero_grad()
        F.cross_entropy(self.model(x), y).backward()
        self.optimizer.step()

    def loop(self) -> Run:
        for batch in self.loader:
            self.step(batch)
        return self

    def fast(self) -> Run:
        for _ in self.engine.releases(F.cross_entropy):
            pass
        return self

    def weights(self) -> Tensor:
        return torch.cat([p.detach().flatten() for p in self.model.parameters()])

    def close(self) -> None:
        self.engine.close()


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    made: list[Run] = []
    original = Run.__init__

    def remember(self: Run, *args: object, **options: object) -> None:
        made.append(self)
        original(self, *args, **options)

    Run.__init__ = remember
    yield
    Run.__init__ = original
    for run in made:
        run.close()


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


def same(first: object, second: object) -> bool:
    if isinstance(first, Tensor):
        return isinstance(second, Tensor) and torch.equal(first, second)
    if isinstance(first, dict):
        return (
            isinstance(second, dict) and first.keys() == second.keys() and all(same(first[k], second[k]) for k in first)
        )
    if isinstance(first, list | tuple):
        return len(first) == len(second) and all(map(same, first, second))
    return first == second


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


def test_schedulers_advance_by_release():
    run = Run(gate=GATE, lr_scheduler=lambda inner: torch.optim.lr_scheduler.StepLR(inner, 4, 0.5)).loop()
    assert run.inner.param_groups[0]["lr"] == 0.5 * 0.5**3


def test_a_scheduler_that_moves_without_a_release_is_refused():
    run = Run(gate=GATE, max_physical_batch_size=8)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(run.optimizer, 0.9)

    def train() -> None:
        for batch in run.loader:
            run.step(batch)
            scheduler.step()

    with pytest.raises(InputError, match=r"make_private\(lr_scheduler=...\)"):
        train()


def test_without_a_gate_a_scheduler_of_ones_own_is_fine():
    run = Run()
    scheduler = torch.optim.lr_scheduler.ExponentialLR(run.optimizer, 0.9)
    for batch in run.loader:
        run.step(batch)
        scheduler.step()
    assert run.inner.param_groups[0]["lr"] == pytest.approx(0.5 * 0.9**12)


def test_the_loop_ends_by_itself_and_nothing_goes_beyond_the_budget():
    run = Run(releases=5).loop()
    assert run.engine.released == 5
    assert list(run.loader) == []
    with pytest.raises(InputError, match="all releases=5 of this run are made"):
        run.engine._running().draw()


def test_epochs_end_the_loader_after_each_pass():
    run = Run(releases=None, epochs=3)
    per_epoch = math.ceil(1 / 0.3)
    for epoch in range(1, 4):
        run.loop()
        assert run.engine.released == epoch * per_epoch
    assert list(run.loader) == []


def test_the_loader_tells_its_public_numbers():
    run = Run(releases=None, epochs=3, sample_rate=None, data=DataLoader(blobs(), batch_size=30))
    assert (len(run.loader), run.loader.batch_size, run.loader.sample_rate) == (4, 30, 0.25)
    assert len(run.loader.dataset) == RECORDS


@pytest.mark.parametrize("options", [{}, {"gate": CoinGate(probability=0.4)}, {"max_physical_batch_size": 7}])
def test_step_hooks_are_called_once_for_each_release(options):
    run = Run(releases=5, **options)
    called = []
    run.optimizer.register_step_pre_hook(lambda optimizer, args, kwargs: called.append("before"))
    handle = run.optimizer.register_step_post_hook(lambda optimizer, args, kwargs: called.append("after"))
    for batch in run.loader:
        run.step(batch)
        if called.count("after") == 4:
            handle.remove()
    assert called == ["before", "after"] * 4 + ["before"]


def test_state_dict_hooks_are_those_of_the_users_optimizer():
    run = Run()
    called = []
    run.optimizer.register_state_dict_pre_hook(lambda optimizer: called.append("saving"))
    run.optimizer.register_state_dict_post_hook(lambda optimizer, state: called.append("saved"))
    run.optimizer.register_load_state_dict_pre_hook(lambda optimizer, state: called.append("loading"))
    run.optimizer.register_load_state_dict_post_hook(lambda optimizer: called.append("loaded"))
    run.optimizer.load_state_dict(run.optimizer.state_dict())
    assert called == ["saving", "saved", "loading", "loaded"]


@pytest.mark.parametrize("way", ["loop", "fast"])
def test_empty_batches_are_released_as_noise_and_charged(way):
    run = Run(sample_rate=1e-9, releases=4, noise_multiplier=2.0)
    start = run.weights()
    getattr(run, way)()
    assert run.engine.released == 4
    assert run.engine.mechanism.expected_batch_size == pytest.approx(1e-9 * RECORDS)
    assert not torch.equal(start, run.weights())


def test_epsilon_counts_what_was_released_and_reading_it_is_pure():
    run = Run(releases=6, gate=GATE)
    seen = []
    for batch in run.loader:
        run.step(batch)
        if run.engine.released:
            seen.append((run.engine.released, run.engine.get_epsilon(1e-5)))
            assert run.engine.get_epsilon(1e-5) == seen[-1][1]
            assert run.engine.get_certified_epsilon(1e-5) >= seen[-1][1]
    by_release = dict(seen)
    assert list(by_release) == [1, 2, 3, 4, 5, 6]
    assert by_release[6] == run.engine.get_certified_epsilon(1e-5)
    assert all(a < b for a, b in zip(by_release.values(), list(by_release.values())[1:], strict=False))


def test_what_is_certified_does_not_depend_on_where_the_run_stops():
    run = Run(releases=6, gate=GATE)
    before = run.engine.get_certified_epsilon(1e-5)
    next(run.engine.releases(F.cross_entropy))
    assert run.engine.released == 1
    assert run.engine.get_epsilon(1e-5) < run.engine.get_certified_epsilon(1e-5) == before
    assert before == Run(releases=6, gate=GATE).fast().engine.get_epsilon(1e-5)


def test_a_run_without_a_planned_end_goes_on_and_is_charged_by_stages():
    run = Run(releases=None, sample_rate=0.25)
    assert len(run.loader) == 4
    for _ in range(3):
        for batch in run.loader:
            run.step(batch)
    assert run.engine.released == 12
    planned = Run(releases=12, sample_rate=0.25)
    assert run.engine.get_epsilon(1e-5) == planned.engine.mechanism.epsilon_after(12, delta=1e-5, accountant="rdp")
    # 4, 6, 8, 12 releases: the fourth stage, to which 1/20 of delta belongs.
    assert run.engine.get_certified_epsilon(1e-5) == planned.engine.get_certified_epsilon(1e-5 / 20)
    assert not run.loader.finished
    audited = Run(releases=None, sample_rate=0.25, canaries=Canaries(count=16))
    with pytest.raises(InputError, match="run without a planned end"):
        audited.engine.audit(delta=1e-5)


def test_a_run_without_a_planned_end_has_a_ledger_that_resumes(tmp_path):
    for made in (5, 11):
        run = Run(releases=None, sample_rate=0.25, ledger=tmp_path / "ledger.jsonl")
        run.engine.load(tmp_path / "kept") if made > 5 else None
        run.engine.keep_in(tmp_path / "kept")
        while run.engine.released < made:
            for batch in run.loader:
                run.step(batch)
                if run.engine.released == made:
                    break
        certified = run.engine.get_certified_epsilon(1e-5)
        run.engine.close()
        contents = read_ledger(tmp_path / "ledger.jsonl")
        assert contents.spent == made
        assert spending(contents).epsilon == certified


def test_a_budget_ends_the_loop():
    options = {"target_epsilon": 2.0, "target_delta": 1e-5, "max_grad_norm": 1.0}
    model = small_model()
    engine = PrivacyEngine(seed=0, accountant="rdp")
    _, optimizer, loader = engine.make_private_with_epsilon(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(blobs(), batch_size=30),
        noise_multiplier=3.0,
        **options,
    )
    passes = 0
    while not loader.finished:
        passes += 1
        for x, y in loader:
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    assert passes == math.ceil(engine.released / 4)
    assert engine.get_certified_epsilon(1e-5) == engine.get_epsilon(1e-5) <= 2.0
    assert (
        engine.mechanism.with_releases(engine.released + 1).epsilon_after(
            engine.released + 1, delta=1e-5, accountant="rdp"
        )
        > 2.0
    )
    assert list(loader) == []
    for given in ({"noise_multiplier": 3.0, "epochs": 2}, {}):
        with pytest.raises(InputError, match="releases=None, epochs="):
            PrivacyEngine(seed=0).make_private_with_epsilon(
                module=model,
                optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
                data_loader=DataLoader(blobs(), batch_size=30),
                **options,
                **given,
            )


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


def test_an_attempt_cap_stops_the_run():
    run = Run(gate=ClippingBiasGate(gate_noise=0.3, beta=3.0, reference_noise=4.0, small_norm=0.0, max_attempts=1))
    with pytest.raises(GaveUpError, match="max_attempts=1"):
        run.loop()
    assert run.engine.released < 12


# Misuse, each with a message that says what to do.


def test_stepping_twice_is_refused():
    run = Run()
    batch = next(iter(run.loader))
    run.step(batch)
    with pytest.raises(InputError, match="each batch of the loader allows one step"):
        run.optimizer.step()


def test_a_module_may_be_called_several_times_for_one_batch():
    """A discriminator, on records and on made-up samples; a generator is trained through it in evaluation mode."""
    run = Run(releases=3)
    generator = nn.Linear(2, 4)
    for x, _ in run.loader:
        made_up = generator(torch.randn(len(x), 2))
        loss = F.softplus(-run.model(x)[:, 0]).mean() + F.softplus(run.model(made_up.detach())[:, 0]).mean()
        loss.backward()
        run.optimizer.step()
        with pytest.raises(InputError, match="a generator by its discriminator"):
            run.model(made_up)
        run.model.eval()
        run.model(generator(torch.randn(run.loader.batch_size, 2)))[:, 0].mean().backward()
        run.model.train()
    assert run.engine.released == 3
    assert generator.weight.grad is not None


def test_a_second_backward_is_refused():
    run = Run()
    x, y = next(iter(run.loader))
    loss = F.cross_entropy(run.model(x), y)
    loss.backward(retain_graph=True)
    with pytest.raises(InputError, match=r"backward\(\) ran twice"):
        loss.backward()


def test_a_step_before_backward_is_refused():
    run = Run()
    x, _ = next(iter(run.loader))
    run.model(x)
    with pytest.raises(InputError, match=r"before loss.backward\(\)"):
        run.optimizer.step()


def test_other_data_than_the_batch_is_refused():
    run = Run()
    x, _ = next(iter(run.loader))
    with pytest.raises(InputError, match="another number of samples"):
        run.model(x[:-1])


def test_an_unwatched_copy_is_refused():
    run = Run()
    x, y = next(iter(run.loader))
    F.cross_entropy(copy.deepcopy(run.model)(x), y).backward()
    with pytest.raises(InputError, match="saw no forward pass of the private module"):
        run.optimizer.step()


def test_a_skipped_batch_is_refused():
    run = Run()
    batches = iter(run.loader)
    next(batches)
    with pytest.raises(InputError, match="a batch of the loader was not used"):
        next(batches)


def test_evaluation_in_training_mode_is_refused_and_in_evaluation_mode_is_free():
    run = Run()
    batches = iter(run.loader)
    run.step(next(batches))
    with pytest.raises(InputError, match=r"call model.eval\(\)"):
        run.model(torch.zeros(2, 4))
    with torch.no_grad():
        run.model(torch.zeros(2, 4))
    run.model.eval()
    run.model(torch.zeros(2, 4))
    run.model.train()
    run.step(next(batches))


@pytest.mark.parametrize("how", ["in place", "data", "assignment"])
def test_a_parameter_changed_by_hand_is_refused(how):
    run = Run()
    batches = iter(run.loader)
    run.step(next(batches))
    weight = run.model[0].weight
    if how == "in place":
        with torch.no_grad():
            weight.add_(0.25)
    elif how == "data":
        weight.data.mul_(1.5)
    else:
        weight.data = weight.data * 1.5
    with pytest.raises(InputError, match=r"parameter '0.weight' was changed by hand"):
        run.step(next(batches))
    run.engine.accept_weights()


def test_a_closure_is_refused():
    with pytest.raises(InputError, match=r"step\(closure\) is not allowed"):
        Run().optimizer.step(lambda: None)


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


def test_a_hidden_reference_has_no_epsilon():
    run = Run(gate=ClippingBiasGate(gate_noise=1.0, reference_noise=4.0, hidden_reference=True)).loop()
    with pytest.raises(InputError, match="no epsilon is proved"):
        run.engine.get_epsilon(1e-5)
    with pytest.raises(InputError, match="no epsilon is proved"):
        run.engine.get_certified_epsilon(1e-5)
    assert run.engine.get_claimed_epsilon(1e-5) > 0


def test_calibration_meets_the_target_and_fills_in_the_gate():
    engine = PrivacyEngine(seed=1)
    model = small_model()
    _, _, loader = engine.make_private_with_epsilon(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(blobs(), batch_size=30),
        target_epsilon=2.0,
        target_delta=1e-5,
        releases=20,
        max_grad_norm=1.0,
        scaling=GlobalScaling(bound=8.0),
        gate=ClippingBiasGate(beta=3.0),
    )
    for _ in engine.releases(F.cross_entropy):
        pass
    assert 1.9 < engine.get_epsilon(1e-5) <= 2.0
    gate = engine.mechanism.gate
    assert isinstance(gate, ClippingBiasGate)
    assert gate.small_norm == 8.0
    assert gate.gate_noise is not None
    assert list(loader) == []


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


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_a_seeded_run_continues_bit_for_bit_from_its_state(optimizer):
    options = {
        "optimizer": optimizer,
        "gate": GATE,
        "ema_decay": 0.9,
        "lr_scheduler": lambda inner: torch.optim.lr_scheduler.StepLR(inner, 3, 0.5),
    }
    whole = Run(**options).fast()
    first = Run(**options)
    for number in first.engine.releases(F.cross_entropy):
        if number == 7:
            break
    state = copy.deepcopy(first.engine.state_dict())
    second = Run(**options)
    second.engine.load_state_dict(state)
    second.fast()
    assert torch.equal(second.weights(), whole.weights())
    assert same(second.engine.state_dict(), whole.engine.state_dict())


def test_lost_releases_stay_paid_for():
    run = Run(releases=10)
    for number in run.engine.releases(F.cross_entropy):
        if number == 4:
            break
    again = Run(releases=10)
    again.engine.load_state_dict(run.engine.state_dict(), lost=2)
    assert again.engine.get_epsilon(1e-5) > run.engine.get_epsilon(1e-5)
    again.fast()
    assert again.engine.released == 8
    assert again.engine.get_epsilon(1e-5) == Run(releases=10).fast().engine.get_epsilon(1e-5)


@pytest.mark.parametrize("seed", [3, None], ids=["seeded", "secure"])
def test_a_library_run_survives_a_restart_with_its_ledger(tmp_path, seed):
    """Four releases, a checkpoint, two more releases, and then the process is gone."""
    options = {"seed": seed, "releases": 10, "gate": GATE, "ledger": tmp_path / "ledger.jsonl"}
    first = Run(**options)
    for number in first.engine.releases(F.cross_entropy):
        if number == 4:
            first.engine.save(tmp_path / "checkpoints")
        if number == 6:
            break
    first.close()
    assert read_ledger(tmp_path / "ledger.jsonl").spent == 6

    second = Run(**options)
    assert second.engine.load(tmp_path / "checkpoints") is None
    assert second.engine.released == 4
    second.fast()
    contents = read_ledger(tmp_path / "ledger.jsonl")
    assert contents.spent == 10
    # Seeded noise repeats, so releases 5 and 6 are the logged ones. Fresh noise makes them new: two are lost.
    assert second.engine.released == (10 if seed == 3 else 8)
    assert spending(contents).epsilon == pytest.approx(second.engine.get_epsilon(1e-5))
    if seed == 3:
        assert torch.equal(second.weights(), Run(seed=3, releases=10, gate=GATE).fast().weights())


def test_a_ledger_without_its_checkpoint_counts_everything_as_lost(tmp_path):
    options = {"seed": None, "releases": 5, "ledger": tmp_path / "ledger.jsonl"}
    first = Run(**options)
    for number in first.engine.releases(F.cross_entropy):
        if number == 3:
            break
    first.close()
    second = Run(**options).fast()
    assert second.engine.released == 2
    assert read_ledger(tmp_path / "ledger.jsonl").spent == 5


def test_a_ledger_or_checkpoint_of_another_mechanism_is_refused(tmp_path):
    first = Run(releases=5, ledger=tmp_path / "ledger.jsonl")
    first.engine.save(tmp_path / "checkpoints")
    first.close()
    with pytest.raises(DataError, match="ledger of another mechanism"):
        Run(releases=6, ledger=tmp_path / "ledger.jsonl")
    with pytest.raises(SluiceError, match="configuration"):
        Run(releases=6).engine.load(tmp_path / "checkpoints")
    with pytest.raises(InputError, match="holds no checkpoint"):
        Run(releases=6).engine.load(tmp_path / "nothing")
