"""Programs in Opacus's words: what runs by changing the import, what it costs, and what stops with which sentence."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, TensorDataset

from sluice._base.errors import InputError, UnsupportedModuleError
from sluice.compat.opacus import GradSampleModule, PrivacyEngine, schedulers
from sluice.compat.opacus.accountants import PRVAccountant, RDPAccountant, create_accountant
from sluice.compat.opacus.accountants.utils import get_noise_multiplier
from sluice.compat.opacus.data_loader import DPDataLoader
from sluice.compat.opacus.distributed import DifferentiallyPrivateDistributedDataParallel
from sluice.compat.opacus.grad_sample.functorch import make_functional
from sluice.compat.opacus.layers import DPGRU, DPLSTM, DPRNN, DPMultiheadAttention
from sluice.compat.opacus.utils.batch_memory_manager import BatchMemoryManager
from sluice.compat.opacus.validators import ModuleValidator
from sluice.mechanism.clipping import FlatClipping, LayerClipping, QuantileClipping, Schedule
from sluice.runs.ledger import read_ledger
from sluice.runs.privacy_spent import spending

RECORDS, BATCH = 160, 16


def records() -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    y = torch.arange(RECORDS) % 3
    return TensorDataset(torch.randn(RECORDS, 4, generator=generator) + y[:, None], y)


def small_model() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


class Run:
    """A run in Opacus's words; options go to make_private."""

    def __init__(self, *, seed: int | None = 7, accountant: str = "prv", **options: Any) -> None:
        self.model = small_model()
        self.inner = torch.optim.SGD(self.model.parameters(), lr=0.5, momentum=0.9)
        self.engine = PrivacyEngine(accountant=accountant)
        if seed is not None:
            options["noise_generator"] = torch.Generator().manual_seed(seed)
        by_budget = "target_epsilon" in options
        given: dict = {"max_grad_norm": 1.0} if by_budget else {"noise_multiplier": 1.0, "max_grad_norm": 1.0}
        make = self.engine.make_private_with_epsilon if by_budget else self.engine.make_private
        options = {"data_loader": DataLoader(records(), batch_size=BATCH, shuffle=True), **given, **options}
        self.results = make(module=self.model, optimizer=self.inner, **options)
        self.optimizer, self.loader = self.results[1], self.results[-1]

    @property
    def mechanism(self) -> Any:
        return self.engine.engine.mechanism

    def epoch(self, loader: Any = None) -> None:
        for x, y in self.loader if loader is None else loader:
            self.optimizer.zero_grad()
            F.cross_entropy(self.model(x), y).backward()
            self.optimizer.step()

    def weights(self) -> Tensor:
        return torch.cat([p.detach().flatten() for p in self.model.parameters()]).clone()


@pytest.mark.filterwarnings("ignore")
def test_an_ordinary_program_trains_on_and_costs_what_opacus_says():
    run = Run(seed=None)
    assert run.results[0] is run.model
    assert (len(run.loader), run.loader.batch_size, run.loader.sample_rate) == (10, BATCH, BATCH / RECORDS)
    for _ in range(3):
        run.epoch()
    found = run.engine.accountant.get_epsilon(delta=1e-5)
    assert found == run.engine.get_epsilon(1e-5) < run.engine.get_certified_epsilon(1e-5)
    assert len(run.engine.accountant) == 30
    assert run.engine.accountant.history == [(1.0, 0.1, 30)]

    opacus = pytest.importorskip("opacus.accountants")
    for name, mine in (
        ("prv", found),
        ("rdp", Run(accountant="rdp").mechanism.epsilon_after(30, delta=1e-5, accountant="rdp")),
    ):
        theirs = opacus.create_accountant(name)
        for _ in range(30):
            theirs.step(noise_multiplier=1.0, sample_rate=0.1)
        assert mine == pytest.approx(theirs.get_epsilon(1e-5), rel=0.02)


@pytest.mark.filterwarnings("ignore")
def test_the_program_spends_what_it_spends_with_opacus_itself():
    opacus = pytest.importorskip("opacus")
    model = small_model()
    theirs = opacus.PrivacyEngine()
    model, optimizer, loader = theirs.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.5),
        data_loader=DataLoader(records(), batch_size=BATCH),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
    )
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    run = Run()
    run.epoch()
    assert len(run.loader) == len(loader)
    assert run.optimizer.noise_multiplier == optimizer.noise_multiplier
    assert run.optimizer.expected_batch_size == optimizer.expected_batch_size
    assert run.engine.get_epsilon(1e-5) == pytest.approx(theirs.get_epsilon(1e-5), rel=0.02)


def test_a_budget_for_epochs_chooses_the_noise_and_one_for_noise_ends_the_loader():
    run = Run(target_epsilon=3.0, target_delta=1e-5, epochs=2)
    for _ in range(3):
        run.epoch()
    assert len(run.engine.accountant) == 20
    assert 2.9 < run.engine.get_certified_epsilon(1e-5) <= 3.0
    run = Run(target_epsilon=3.0, target_delta=1e-5, noise_multiplier=2.0, accountant="rdp")
    while not run.loader.finished:
        run.epoch()
    assert run.engine.get_epsilon(1e-5) == run.engine.get_certified_epsilon(1e-5) <= 3.0
    for given in ({}, {"epochs": 2, "noise_multiplier": 2.0}):
        with pytest.raises(InputError, match="give epochs to have the noise chosen"):
            Run(target_epsilon=3.0, target_delta=1e-5, **given)


@pytest.mark.filterwarnings("ignore")
def test_get_noise_multiplier_agrees_with_opacus():
    asked = {"target_epsilon": 3.0, "target_delta": 1e-5, "sample_rate": 0.02}
    found = get_noise_multiplier(**asked, epochs=4)
    assert found == get_noise_multiplier(**asked, steps=200)
    with pytest.raises(InputError, match="give exactly one of the two"):
        get_noise_multiplier(**asked)
    theirs = pytest.importorskip("opacus.accountants.utils")
    assert found == pytest.approx(theirs.get_noise_multiplier(**asked, steps=200, accountant="prv"), rel=0.01)


def test_accountants_count_steps():
    for mine, name in ((PRVAccountant(), "prv"), (RDPAccountant(), "rdp")):
        mine.step(noise_multiplier=1.0, sample_rate=0.1)
        other = create_accountant(name)
        other.step(noise_multiplier=1.0, sample_rate=0.1)
        assert mine.get_epsilon(1e-5) == other.get_epsilon(1e-5) > 0
    with pytest.raises(InputError, match="can say less than the true epsilon"):
        create_accountant("gdp")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"poisson_sampling": False}, "epsilon is proved for batches that are Poisson samples"),
        ({"batch_first": False}, "transpose inside the model"),
        ({"grad_sample_mode": "no_op"}, "cannot be checked"),
        ({"grad_sample_mode": "ghost_fsdp"}, "Several processes"),
        ({"clipping": "automatic"}, "clipping='automatic' is not allowed"),
        ({"max_grad_norm": [1.0] * 4}, "it must be one number"),
        ({"clipping": "per_layer", "max_grad_norm": [1.0] * 3}, "the model has 4 trainable parameters"),
        ({"max_clipbound": 3.0}, 'without clipping="adaptive"'),
        ({"clipping": "adaptive", "clip_schedule": Schedule(factors=(1.0,))}, "give one of them"),
        ({"noise_multiplier": 0.0}, "noise_multiplier=0.0 is not allowed"),
        ({"epochs": 0}, "epochs=0 is not allowed"),
        ({"data_loader": records()}, "it must be a torch.utils.data.DataLoader"),
    ],
)
def test_what_cannot_be_kept_stops_with_a_sentence(options, message):
    with pytest.raises(InputError, match=message):
        Run(**options)


def test_a_limit_theorem_is_no_accountant_and_a_known_seed_is_not_secure():
    with pytest.raises(InputError, match='Use "prv"'):
        PrivacyEngine(accountant="gdp")
    engine = PrivacyEngine(secure_mode=True)
    model = small_model()
    with pytest.raises(InputError, match="whoever knows its seed"):
        engine.make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            data_loader=DataLoader(records(), batch_size=BATCH),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            noise_generator=torch.Generator(),
        )
    with pytest.raises(InputError, match="call make_private"):
        engine.get_epsilon(1e-5)


@pytest.mark.parametrize("mode", ["hooks", "functorch", "ew", "ghost"])
def test_modes_change_nothing_but_what_is_returned(mode):
    run = Run(grad_sample_mode=mode, criterion=nn.CrossEntropyLoss(), rand_on_empty=True, epochs=1)
    assert len(run.results) == (4 if mode == "ghost" else 3)
    run.epoch()
    plain = Run(epochs=1)
    plain.epoch()
    assert torch.equal(run.weights(), plain.weights())


def test_without_a_wrapped_model_there_is_something_to_clean_up():
    run = Run(wrap_model=False)
    run.epoch()
    run.results[0].cleanup()
    run.model(torch.zeros(2, 4))


def test_ways_of_clipping():
    assert Run().mechanism.clipping == FlatClipping(max_grad_norm=1.0)
    assert Run(clipping="per_layer", max_grad_norm=[3.0, 4.0, 5.0, 12.0]).mechanism.clipping == LayerClipping.of(
        {"0": 5.0, "2": 13.0}
    )
    layers = Run(clipping="per_layer").mechanism.clipping
    assert math.hypot(*layers.bounds) == pytest.approx(1.0)
    adaptive = Run(clipping="adaptive", unclipped_num_std=2.0, target_unclipped_quantile=0.7, max_clipbound=9.0)
    assert adaptive.mechanism.clipping == QuantileClipping(
        max_grad_norm=1.0, quantile=0.7, noise=2.0, smallest=1e-3, largest=9.0
    )
    for run in (adaptive, Run(clipping="per_layer", noise_schedule=Schedule(factors=(1.0, 0.9), every=5))):
        run.epoch()
        assert sum(count for *_, count in run.engine.accountant.history) == 10


def test_smaller_physical_batches_change_the_pieces_and_little_else():
    whole, pieced = Run(epochs=1), Run(epochs=1)
    whole.epoch()
    largest = 0
    with BatchMemoryManager(data_loader=pieced.loader, max_physical_batch_size=5, optimizer=pieced.optimizer) as loader:
        for x, y in loader:
            largest = max(largest, len(x))
            F.cross_entropy(pieced.model(x), y).backward()
            pieced.optimizer.step()
    assert largest == 5
    assert len(pieced.engine.accountant) == 10
    torch.testing.assert_close(pieced.weights(), whole.weights(), rtol=1e-2, atol=1e-2)
    assert pieced.loader.set_piece_size(10_000) == pieced.loader.set_piece_size(10_000) > 5
    with pytest.raises(InputError, match="is not private"):
        BatchMemoryManager(data_loader=DataLoader(records()), max_physical_batch_size=5, optimizer=pieced.optimizer)


def test_the_optimizer_answers_to_opacus_names():
    run = Run()
    steps = []
    run.optimizer.attach_step_hook(lambda optimizer: steps.append(optimizer.noise_multiplier))
    run.epoch()
    assert steps == [1.0] * 10
    assert (run.optimizer.max_grad_norm, run.optimizer.accumulated_iterations) == (1.0, 1)
    assert run.optimizer.original_optimizer is run.inner
    for name, schedule in (("noise_multiplier", "noise_schedule"), ("max_grad_norm", "clip_schedule")):
        with pytest.raises(InputError, match=schedule):
            setattr(run.optimizer, name, 2.0)
    with pytest.raises(AttributeError, match=r"Call optimizer.step\(\) alone"):
        run.optimizer.add_noise()
    with pytest.raises(AttributeError, match="PerSampleGradients"):
        _ = run.optimizer.grad_samples
    assert not hasattr(run.optimizer, "anything_else")
    with pytest.raises(InputError, match="by its engine"):
        run.engine.accountant.step(noise_multiplier=1.0, sample_rate=0.1)


def test_what_is_private_already_may_be_given_again():
    run = Run()
    model = small_model()
    engine = PrivacyEngine()
    _, optimizer, loader = engine.make_private(
        module=run.model,
        optimizer=run.optimizer,
        data_loader=run.loader,
        noise_multiplier=1.0,
        max_grad_norm=1.0,
    )
    assert loader.batch_size == BATCH
    assert optimizer.original_optimizer is run.inner
    with pytest.raises(InputError, match="make a new PrivacyEngine"):
        engine.make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            data_loader=loader,
            noise_multiplier=1.0,
            max_grad_norm=1.0,
        )


def test_a_checkpoint_goes_on_bit_for_bit(tmp_path):
    whole = Run(clipping="adaptive", unclipped_num_std=2.0)
    whole.epoch()
    path = tmp_path / "checkpoint.pt"
    whole.engine.save_checkpoint(path=path, module=whole.model, optimizer=whole.optimizer, checkpoint_dict={"epoch": 1})
    whole.epoch()
    resumed = Run(clipping="adaptive", unclipped_num_std=2.0)
    assert resumed.engine.load_checkpoint(path=path, module=resumed.model)["epoch"] == 1
    assert len(resumed.engine.accountant) == 10
    resumed.epoch()
    assert torch.equal(resumed.weights(), whole.weights())
    torch.save({"module_state_dict": {}}, path)
    with pytest.raises(InputError, match="not a checkpoint of this engine"):
        resumed.engine.load_checkpoint(path=path, module=resumed.model)


def test_releases_are_logged(tmp_path):
    run = Run(ledger=tmp_path / "ledger.jsonl", accountant="rdp")
    run.epoch()
    run.engine.engine.close()
    contents = read_ledger(tmp_path / "ledger.jsonl")
    assert contents.spent == 10
    assert spending(contents).epsilon == run.engine.get_certified_epsilon(1e-5)


def test_layers_are_those_of_pytorch():
    assert (DPLSTM, DPGRU, DPRNN, DPMultiheadAttention) == (nn.LSTM, nn.GRU, nn.RNN, nn.MultiheadAttention)


def test_modules_are_validated_and_fixed():
    mixing = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4))
    engine = PrivacyEngine()
    assert not ModuleValidator.is_valid(mixing)
    assert not engine.is_compatible(module=mixing)
    assert len(ModuleValidator.validate(mixing)) == 1
    with pytest.raises(UnsupportedModuleError, match="GroupNorm"):
        engine.validate(module=mixing, optimizer=None, data_loader=None)
    fixed = engine.get_compatible_module(mixing)
    assert ModuleValidator.is_valid(fixed)
    assert isinstance(fixed[1], nn.GroupNorm)
    assert not ModuleValidator.is_valid(fixed.eval())
    with pytest.raises(UnsupportedModuleError, match="InstanceNorm"):
        ModuleValidator.fix(mixing, replace_bn_with_in=True)


class Names(nn.Module):
    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 6)
        self.rnn = kind(6, 5, num_layers=1, batch_first=True)
        self.out = nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden, _ = self.rnn(self.table(x), None)
        return self.out(hidden[:, -1])


def padded(batch: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    return pad_sequence([x for x, _ in batch], batch_first=True), torch.stack([y for _, y in batch])


def padded_to_eight(batch: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    return torch.stack([F.pad(x, (0, 8 - len(x))) for x, _ in batch]), torch.stack([y for _, y in batch])


@pytest.mark.parametrize(
    "kind", [DPLSTM, pytest.param(DPGRU, marks=pytest.mark.slow), pytest.param(DPRNN, marks=pytest.mark.slow)]
)
def test_recurrent_layers_train(kind):
    words = [(torch.randint(1, 20, (3 + i % 5,)), torch.tensor(i % 2)) for i in range(60)]
    model = Names(kind)
    engine = PrivacyEngine()
    options: dict = {
        "module": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "noise_multiplier": 1.0,
        "max_grad_norm": 1.0,
    }
    _, optimizer, loader = engine.make_private(
        data_loader=DataLoader(words, batch_size=30, collate_fn=padded_to_eight), **options
    )
    for x, y in loader:
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    assert len(engine.accountant) == 2
    _, _, other = PrivacyEngine().make_private(
        data_loader=DataLoader(words, batch_size=30, collate_fn=padded), **options
    )
    with pytest.raises(InputError, match="pads records to the longest of their batch"):
        list(other)


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (lambda: GradSampleModule(small_model()), "model._module is model"),
        (lambda: DPDataLoader.from_data_loader(DataLoader(records())), "Give an ordinary DataLoader"),
        (lambda: DifferentiallyPrivateDistributedDataParallel(small_model()), "the model as it is"),
        (lambda: make_functional(small_model()), "any module works"),
        (lambda: schedulers.ExponentialNoise(None, gamma=0.9), r"noise_schedule=Schedule.exponential"),
        (lambda: schedulers.StepGradClip(None, step_size=2, gamma=0.9), r"clip_schedule=Schedule.exponential"),
    ],
)
def test_names_that_are_not_offered_say_what_to_write(use, message):
    with pytest.raises(InputError, match=message):
        use()
