"""The ordinary loop of a model that is called several times for one batch, against a loop over single records."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sluice._base.errors import InputError
from sluice.gradients import PerSampleGradients
from sluice.gradients.loop import LoopCapture

ROWS = 6


class Scaled(nn.Module):
    """A parameter outside any layer, and a table of positions that is looked up once for the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 4))
        self.inner = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x * self.scale)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(2, 3, batch_first=True)
        self.out = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.rnn(x.view(-1, 2, 2))[0][:, -1])


MODELS: dict[str, Callable[[], nn.Module]] = {
    "layers": lambda: nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)),
    "functional": Scaled,
    "recurrent": Recurrent,
    "convolution": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 2, 2)), nn.Conv2d(1, 3, 2, padding=1), nn.GroupNorm(1, 3), nn.Flatten(), nn.Linear(27, 3)
    ),
}


def loss_of(model: nn.Module, pair: tuple[Tensor, Tensor], reduction: str) -> Tensor:
    """Of a siamese net: not a sum of functions of one call's output."""
    distances = (model(pair[0]) - model(pair[1])).square().sum(1) + F.softplus(model(pair[0] + 1)[:, 0])
    return getattr(distances, reduction)()


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("name", MODELS)
def test_gradients_of_all_calls_are_added_up_before_norms_are_taken(name, reduction):
    torch.manual_seed(0)
    model = MODELS[name]().double()
    pair = torch.randn(ROWS, 4).double(), torch.randn(ROWS, 4).double()
    gradients = PerSampleGradients(model, loss_reduction=reduction, expected_batch_size=8.0)
    capture = LoopCapture(gradients, rows=8)
    capture.attach()
    try:
        capture.expect(ROWS)
        loss_of(model, pair, reduction).backward()
        chunk = capture.collect()
    finally:
        capture.detach()
    weights = torch.linspace(0.1, 1.0, ROWS).double()
    found = gradients.zeros()
    norms = chunk.norms
    chunk.add_weighted_sum(weights, into=found)

    expected = {key: torch.zeros_like(p) for key, p in model.named_parameters()}
    for i in range(ROWS):
        single = torch.autograd.grad(
            loss_of(model, (pair[0][i : i + 1], pair[1][i : i + 1]), "sum"), list(model.parameters())
        )
        assert norms[i].item() == pytest.approx(torch.cat([g.flatten() for g in single]).norm().item(), rel=1e-6)
        for key, gradient in zip(expected, single, strict=True):
            expected[key] += weights[i] * gradient
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=1e-6, atol=1e-9)


def test_a_call_that_the_loss_does_not_use_adds_nothing():
    torch.manual_seed(0)
    model, x = MODELS["layers"](), torch.randn(ROWS, 4)
    gradients = PerSampleGradients(model, loss_reduction="sum", expected_batch_size=8.0)
    capture = LoopCapture(gradients, rows=8)
    capture.attach()
    norms = []
    try:
        for more in (0, 1):
            capture.expect(ROWS)
            loss = model(x).square().sum()
            for _ in range(more):
                model(x + 1)
            loss.backward()
            norms.append(capture.collect().norms)
    finally:
        capture.detach()
    torch.testing.assert_close(norms[0], norms[1])


def test_a_second_call_with_another_number_of_samples_is_refused():
    model, x = MODELS["layers"](), torch.randn(ROWS, 4)
    capture = LoopCapture(PerSampleGradients(model, loss_reduction="sum", expected_batch_size=8.0), rows=8)
    capture.attach()
    try:
        capture.expect(ROWS)
        model(x)
        with pytest.raises(InputError, match="another number of samples"):
            model(x[:-1])
    finally:
        capture.detach()
