"""The guide's method of one's own, DP-FTRL: it trains, stops, resumes and verifies like those that come with Sluice."""

from __future__ import annotations

import importlib.util
import itertools
import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from sluice import PrivacyEngine
from sluice._base.errors import InputError
from sluice.mechanism.registry import KINDS, mechanism_from_dict, register
from sluice.runs.ledger import read_ledger
from sluice.runs.privacy_spent import spending
from sluice.training.executor import Draft
from sluice.training.options import TrainingOptions

ROOT = Path(__file__).parents[2]
RECORDS, BATCHES, EPOCHS = 60, 6, 2


@pytest.fixture(scope="module")
def ftrl():
    """The example as a module; its kind is forgotten afterwards."""
    spec = importlib.util.spec_from_file_location("dp_ftrl", ROOT / "examples" / "dp_ftrl.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["dp_ftrl"] = module
    spec.loader.exec_module(module)
    yield module
    del KINDS[module.TreeAggregation.kind], sys.modules["dp_ftrl"]


@pytest.fixture
def mechanism(ftrl):
    return ftrl.planned(RECORDS, batches=BATCHES, epochs=EPOCHS, epsilon=3.0, delta=1e-5)


def engine_for(mechanism: Any, *, seed: int | None = None, **options: Any) -> tuple[PrivacyEngine, nn.Module]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(RECORDS, 4, generator=generator)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = nn.Linear(4, 3)
    engine = PrivacyEngine(seed=seed)
    engine.make_private_by(
        mechanism,
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.5),
        data_loader=TensorDataset(x, x[:, :3].argmax(1)),
        options=TrainingOptions(**options),
    )
    return engine, model


def make(engine: PrivacyEngine, releases: int) -> None:
    for _ in itertools.islice(engine.releases(F.cross_entropy), releases):
        pass


def test_it_learns_when_there_is_little_noise(mechanism):
    engine, model = engine_for(replace(mechanism, noise_multiplier=0.01, releases=10 * BATCHES), seed=3)
    generator = torch.Generator().manual_seed(9)
    x = torch.randn(500, 4, generator=generator)
    make(engine, 10 * BATCHES)
    assert (model(x).argmax(1) == x[:, :3].argmax(1)).float().mean() > 0.8


def test_the_account_is_the_composition_of_the_nodes_of_a_record(mechanism):
    # Six batches: nodes of 1, 2 and 4 of them; two epochs. n Gaussian releases are one with noise sigma / sqrt(n).
    for releases, nodes in [(1, 3), (BATCHES, 3), (BATCHES + 1, 6), (2 * BATCHES, 6)]:
        found = mechanism.epsilon_after(releases, delta=1e-5, accountant="pld")
        assert found == pytest.approx(gaussian_epsilon(mechanism.noise_multiplier / math.sqrt(nodes)), rel=2e-3)
    assert mechanism.epsilon_after(0, delta=1e-5, accountant="pld") == 0
    assert 2.9 < mechanism.epsilon_after(mechanism.releases, delta=1e-5, accountant="pld") <= 3.0


def gaussian_epsilon(sigma: float, delta: float = 1e-5) -> float:
    """By the exact formula of the Gaussian mechanism (Balle and Wang, 2018)."""
    normal = torch.distributions.Normal(torch.tensor(0.0, dtype=torch.float64), 1.0)

    def delta_of(epsilon: float) -> float:
        first = normal.cdf(torch.tensor(0.5 / sigma - epsilon * sigma, dtype=torch.float64))
        second = normal.cdf(torch.tensor(-0.5 / sigma - epsilon * sigma, dtype=torch.float64))
        return float(first - math.exp(epsilon) * second)

    low, high = 0.0, 50.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if delta_of(middle) > delta else (low, middle)
    return high


@pytest.mark.parametrize("lost", [(), (1,), (3, 4), (0, 5, 6, 7, 11)])
def test_every_step_is_in_the_promised_number_of_published_nodes(mechanism, ftrl, monkeypatch, lost):
    """Steps with gradients of their own, no noise: what is published says which steps are in it."""
    published: list[torch.Tensor] = []

    def without_noise(raw_sum: Any, **options: Any) -> None:
        published.append(raw_sum[1].clone())

    monkeypatch.setattr(ftrl, "noisy_sum", without_noise)
    steps = EPOCHS * BATCHES

    def crash(number: int) -> None:
        if number - 1 in lost:
            published.append(torch.tensor([0.0, math.nan, 0.0]))
            raise RuntimeError

    engine, model = engine_for(mechanism, before_release=crash)
    executor: Any = engine._executor
    for step in range(steps):
        value = torch.tensor([2.0**step, 0.0, 0.0], dtype=torch.float64)
        content = {"weight": torch.zeros(3, 4, dtype=torch.float64), "bias": value}
        before = model.bias.detach().double().clone()
        try:
            executor.commit(Draft(content=content, measured=0))
        except RuntimeError:
            assert torch.equal(model.bias.detach().double(), before)
            continue
        # Nothing is noisy, so each change is the step's own gradient.
        moved = (before - model.bias.detach().double())[0] * mechanism.expected_batch_size / 0.5
        assert moved == pytest.approx(2.0**step, rel=1e-3)
    assert len(published) == steps
    for step in range(steps):
        # The node of a lost step may have been seen: it is the one that the step would have completed.
        times = 0
        for place, node in enumerate(published):
            if place in lost:
                within = place % BATCHES + 1
                times += place - (within & -within) < step <= place
            else:
                times += int(node[0]) >> step & 1
        assert 1 <= times <= ftrl.nodes_of_a_record(BATCHES)


def test_a_seeded_run_that_was_stopped_ends_like_one_that_was_not(mechanism, tmp_path):
    whole, expected = engine_for(mechanism, seed=5)
    make(whole, 2 * BATCHES)
    for stop in (1, 5, 6, 9):
        first, _ = engine_for(mechanism, seed=5)
        make(first, stop)
        first.save(tmp_path / str(stop))
        second, model = engine_for(mechanism, seed=5)
        second.load(tmp_path / str(stop))
        make(second, 2 * BATCHES)
        assert second.released == 2 * BATCHES
        assert torch.equal(model.weight, expected.weight)


def test_a_crash_is_charged_and_the_ledger_verifies(mechanism, tmp_path):
    ledger = tmp_path / "ledger.jsonl"
    crashed, _ = engine_for(mechanism, ledger=ledger)
    make(crashed, 3)
    crashed.save(tmp_path / "checkpoints")
    make(crashed, 2)  # these are gone
    crashed.close()
    resumed, _ = engine_for(mechanism, ledger=ledger)
    resumed.load(tmp_path / "checkpoints")
    make(resumed, 2 * BATCHES)
    assert resumed.released == 2 * BATCHES - 2
    resumed.close()
    contents = read_ledger(ledger)
    assert contents.spent == 2 * BATCHES
    spent = spending(contents)
    assert spent.epsilon == resumed.get_certified_epsilon(1e-5)
    assert spent.epsilon is not None
    assert spent.epsilon <= 3.0


def test_a_loop_of_ones_own_is_refused(mechanism):
    engine, _ = engine_for(mechanism)
    with pytest.raises(InputError, match=r"not allowed for tree aggregation.*engine\.releases"):
        engine.ordinary_loop()


def test_ledgers_give_the_mechanism_back(mechanism):
    assert mechanism_from_dict(json.loads(json.dumps(mechanism.to_dict()))) == mechanism


def test_a_kind_belongs_to_one_class(ftrl, mechanism):
    register(ftrl.TreeAggregation, executor=ftrl.TreeExecutor)  # again: nothing changes

    class Other(ftrl.TreeAggregation):
        pass

    class Impostor(ftrl.TreeAggregation):
        kind: ClassVar[str] = "selective release"

    for refused in (Other, Impostor):
        with pytest.raises(InputError, match="Choose another"):
            register(refused, executor=ftrl.TreeExecutor)
    assert type(mechanism_from_dict(mechanism.to_dict())) is ftrl.TreeAggregation


def test_the_example_is_short():
    assert len((ROOT / "examples" / "dp_ftrl.py").read_text("utf-8").splitlines()) < 200
