"""No record, whatever its values are, stops a run, counts for more than the bound, or changes what the others add."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from sluice import PrivacyEngine
from sluice.gradients import NonFiniteGradientWarning, PerSampleGradients
from sluice.gradients.loop import LoopCapture
from sluice.mechanism.gates import ClippingBiasGate
from sluice.mechanism.scaling import Clip

VALUES = [
    1e-45,
    1e-38,
    1e-30,
    1e-19,
    1e-10,
    1e3,
    1e6,
    1e9,
    1e12,
    1e15,
    1e19,
    1e22,
    1e30,
    3.4028235e38,
    float("inf"),
    float("nan"),
]


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1),
        nn.GroupNorm(2, 4),
        nn.ReLU(),
        nn.Conv2d(4, 4, 3),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(64, 3),
    )


def mlp() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(36, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 3))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.norm, self.head = nn.LSTM(6, 5, batch_first=True), nn.LayerNorm(5), nn.Linear(5, 3)

    def forward(self, x):
        return self.head(self.norm(self.lstm(x[:, 0])[0])).mean(1)


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(6, 2, 12, dropout=0.0, batch_first=True)
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        return self.head(self.layer(x[:, 0])).mean(1)


MODELS = [cnn, mlp, Recurrent, Attending]
BOUND = 0.5


def hostile(x: torch.Tensor, value: float) -> torch.Tensor:
    """The batch with a sample all of whose values are of this size."""
    x = x.clone()
    x[0] = value * torch.where(x[0] > 0, 1.0, -1.0)
    return x


def by_chunks(engine, x, y):
    total = engine.zeros()
    for chunk in engine.chunks(x, y, functional.cross_entropy):
        chunk.add_weighted_sum(Clip(max_grad_norm=BOUND)(chunk.norms), into=total)
    return total


def by_loop(engine, x, y):
    capture, total = LoopCapture(engine, rows=8), engine.zeros()
    capture.attach()
    try:
        capture.expect(len(x))
        functional.cross_entropy(engine.module(x), y).backward()
        chunk = capture.collect()
        chunk.add_weighted_sum(Clip(max_grad_norm=BOUND)(chunk.norms), into=total)
    finally:
        capture.detach()
    return total


@pytest.fixture(autouse=True)
def _quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NonFiniteGradientWarning)
        yield


@pytest.mark.parametrize("run", [by_chunks, by_loop])
@pytest.mark.parametrize("make", MODELS)
def test_a_record_of_any_scale_leaves_the_run_alive_and_its_share_bounded(make, run):
    """Compared with a batch in which that record adds nothing. Large ones are in the first batch that an engine sees."""
    model, x, y = make(), torch.randn(5, 1, 6, 6), torch.randint(0, 3, (5,))
    engine = PerSampleGradients(model, loss_reduction="mean")
    torch.manual_seed(0)
    rest = run(engine, hostile(x, float("nan")), y)
    for value in VALUES:
        if 1e6 <= value <= 1e19:
            engine = PerSampleGradients(model, loss_reduction="mean")
        torch.manual_seed(0)
        total = run(engine, hostile(x, value), y)
        share = torch.cat([(total[name].double() - rest[name].double()).flatten() for name in total])
        assert share.isfinite().all()
        assert float(share.norm()) <= BOUND + 1e-5, value


@pytest.mark.parametrize("make", MODELS)
def test_such_a_record_does_not_change_what_the_others_add(make):
    model, x, y = make(), torch.randn(5, 1, 6, 6), torch.randint(0, 3, (5,))
    engine = PerSampleGradients(model, loss_reduction="mean")
    others = torch.tensor([1, 2, 3, 4])
    torch.manual_seed(0)
    expected = engine.norms(x, y, functional.cross_entropy)[others]
    for value in VALUES:
        torch.manual_seed(0)
        found = engine.norms(hostile(x, value), y, functional.cross_entropy)
        torch.testing.assert_close(found[others], expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("ordinary_loop", [False, True])
def test_a_whole_run_survives_such_records(ordinary_loop):
    """With a gate, and with the record in nearly every batch, the first one included."""
    for value in (1e-38, 1e6, 1e12, 1e19, 3e38, float("nan")):
        x, y = torch.randn(30, 1, 6, 6), torch.randint(0, 3, (30,))
        model = cnn()
        engine = PrivacyEngine(seed=3, accountant="rdp")
        _, optimizer, loader = engine.make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            data_loader=TensorDataset(hostile(x, value), y),
            noise_multiplier=1.0,
            max_grad_norm=BOUND,
            releases=2,
            sample_rate=0.9,
            gate=ClippingBiasGate(gate_noise=1.0, reference_noise=4.0, small_norm=0.2),
        )
        try:
            if ordinary_loop:
                for inputs, target in loader:
                    functional.cross_entropy(model(inputs), target).backward()
                    optimizer.step()
            else:
                list(engine.releases(functional.cross_entropy))
        finally:
            engine.close()
        assert engine.released == 2
        assert all(p.isfinite().all() for p in model.parameters())
