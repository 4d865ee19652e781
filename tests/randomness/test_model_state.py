from __future__ import annotations

import random
import signal
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from sluice.mechanism.gates import ClippingBiasGate
from sluice.randomness import numpy_state
from sluice.randomness.model_state import ModelRandomness, _torch_state
from sluice.randomness.noise import SecureNoise, SeededNoise
from sluice.training.engine import PrivacyEngine

GATE = ClippingBiasGate(beta=1.0, gate_noise=0.5, reference_noise=20.0, small_norm=0.1, large_norm=1.0)


def draws() -> tuple[float, float, float]:
    return float(torch.rand(())), float(np.random.random()), random.random()  # noqa: NPY002


def seed_everything() -> None:
    torch.manual_seed(0)
    np.random.seed(0)  # noqa: NPY002
    random.seed(0)


@pytest.mark.parametrize("number", [1, 2], ids=["entering", "leaving"])
def test_an_interruption_amid_an_exchange_changes_nothing_outside(number, monkeypatch):
    """Ctrl-C comes when numpy's state is exchanged already and the others' are not."""
    exchange, calls = numpy_state.exchanged, []

    def interrupted(state):
        before = exchange(state)
        calls.append(state)
        if len(calls) == number:
            signal.raise_signal(signal.SIGINT)
        return before

    monkeypatch.setattr(numpy_state, "exchanged", interrupted)
    seed_everything()
    outside = draws(), draws()
    seed_everything()
    first = draws()
    with pytest.raises(KeyboardInterrupt), ModelRandomness(SecureNoise()):
        draws()
    assert (first, draws()) == outside


def test_nothing_inside_depends_on_the_global_seed_or_changes_what_is_drawn_outside():
    seed_everything()
    outside = draws(), draws()
    inside = []
    for _ in range(2):
        seed_everything()
        first = draws()
        with ModelRandomness(SecureNoise()):
            inside.append(draws())
        assert (first, draws()) == outside
    assert all(one != other for one, other in zip(*inside, strict=True))


def test_entering_again_goes_on_where_the_last_block_ended():
    seeded = ModelRandomness(SeededNoise(1))
    with seeded:
        first = draws()
    with seeded:
        second = draws()
    with ModelRandomness(SeededNoise(1)):
        assert (draws(), draws()) == (first, second)
    assert first != second
    source = SeededNoise(1)
    source.uniform((1,))
    with ModelRandomness(source):
        assert draws() != first


def test_the_state_comes_back_after_an_exception():
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    with pytest.raises(ZeroDivisionError), ModelRandomness(SecureNoise()):
        torch.rand(5)
        raise ZeroDivisionError
    assert torch.equal(torch.rand(2), expected)


def test_all_words_of_torchs_generator_are_set():
    """The same words give the same numbers in numpy, whose layout is documented, so they stand where they should."""
    words = SeededNoise(5).side_keystream("model").read(624, np.uint32)
    generator = torch.Generator()
    generator.set_state(_torch_state(words))
    numbers = torch.randint(0, 2**31, (2000,), generator=generator, dtype=torch.int64)
    other = np.random.RandomState()
    other.set_state(("MT19937", words, 624, 0, 0.0))
    words_drawn = other.randint(0, 2**32, 4000, dtype=np.uint32)
    assert numbers.tolist() == (words_drawn[1::2] & 0x7FFFFFFF).tolist()  # torch makes each of two words


class Masked(nn.Module):
    """Dropout in front of a linear layer; notes the masks that it used."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3)
        self.masks: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        kept = F.dropout(torch.ones_like(x), 0.5, self.training)
        if self.training and torch.is_grad_enabled():
            self.masks.append(kept)
        return self.linear(x * kept)


class Augmented(Dataset[Any]):
    """Records that are disturbed when they are read, by all three global generators."""

    def __init__(self) -> None:
        self.seen: list[tuple[float, float, float]] = []

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        drawn = draws()
        self.seen.append(drawn)
        return torch.full((6,), float(index)) + drawn[0], index % 3


def engine_loop(model: nn.Module, data: Any, seed: int | None) -> None:
    engine = PrivacyEngine(seed=seed)
    engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=data,
        noise_multiplier=2.0,
        max_grad_norm=1.0,
        sample_rate=0.5,
        releases=3,
        gate=GATE,
    )
    for _ in engine.releases(F.cross_entropy):
        pass
    engine.close()


def ordinary_loop(model: nn.Module, data: Any, seed: int | None) -> None:
    engine = PrivacyEngine(seed=seed)
    _, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=data,
        noise_multiplier=2.0,
        max_grad_norm=1.0,
        sample_rate=0.5,
        releases=3,
        gate=GATE,
        max_physical_batch_size=8,
    )
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    engine.close()


LOOPS = [engine_loop, ordinary_loop]


@pytest.mark.parametrize("loop", LOOPS)
def test_dropout_is_not_drawn_from_the_users_seed(loop: Callable[..., None]):
    x, y = torch.randn(40, 6), torch.arange(40) % 3
    runs = []
    for _ in range(2):
        model = Masked()
        seed_everything()
        loop(model, TensorDataset(x, y), None)
        runs.append((model.masks[-1].flatten()[:40], draws()))
    (first, after), (second, after_too) = runs
    assert not torch.equal(first, second)
    seed_everything()
    # However many attempts were forgotten, nothing of them is left in the generators.
    assert after == after_too == draws()


@pytest.mark.parametrize("loop", LOOPS)
def test_a_seeded_run_repeats_its_dropout(loop: Callable[..., None]):
    x, y = torch.randn(40, 6), torch.arange(40) % 3
    runs = []
    for global_seed in (1, 2):
        model = Masked()
        nn.init.zeros_(model.linear.weight)
        nn.init.zeros_(model.linear.bias)
        torch.manual_seed(global_seed)
        loop(model, TensorDataset(x, y), 7)
        runs.append(model)
    assert torch.equal(runs[0].linear.weight, runs[1].linear.weight)
    masks = [mask.flatten()[:12] for mask in runs[0].masks[-2:]]
    assert not torch.equal(masks[0], masks[1])  # pieces of one batch differ, too


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("workers", [0, 1])
def test_augmentation_is_not_drawn_from_the_users_seed(loop: Callable[..., None], workers: int):
    runs = []
    for _ in range(2):
        model = nn.Sequential(nn.Linear(6, 3))
        data = Augmented()
        seed_everything()
        loop(model, DataLoader(data, batch_size=8, num_workers=workers), None)
        runs.append((data.seen[:3], draws()))
    seed_everything()
    assert runs[0][1] == runs[1][1] == draws()
    if not workers:
        assert runs[0][0] != runs[1][0]
