"""Shrinkage takes off what noise explains, and knows how much noise a training has left."""

from __future__ import annotations

import pytest
import torch

from sluice._base.errors import InputError
from sluice.models import accumulated_noise, shrunk


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_accumulated_noise_is_what_an_optimizer_accumulates(momentum: float) -> None:
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.zeros(100_000))
    optimizer = torch.optim.SGD([weight], lr=3.0, momentum=momentum)
    for _ in range(7):
        weight.grad = 0.2 * torch.randn(100_000)
        optimizer.step()
    wanted = accumulated_noise(lr=3.0, momentum=momentum, releases=7, noise=0.2)
    assert float(weight.detach().std()) == pytest.approx(wanted, rel=0.02)


def test_two_classes_keep_their_difference_but_for_the_threshold() -> None:
    weight = torch.tensor([[1.0, 5.0, -2.0], [3.0, 5.5, 2.0]])
    found = shrunk(weight, noise=0.5, factor=2**0.5)
    torch.testing.assert_close(found, torch.tensor([[-0.5, 0.0, -1.5], [0.5, 0.0, 1.5]]))
    centred = weight - weight.mean(0)
    torch.testing.assert_close(shrunk(weight, noise=0.0, factor=1.0), centred)


@pytest.mark.parametrize("classes", [2, 5])
def test_the_threshold_is_in_units_of_the_noise(classes: int) -> None:
    torch.manual_seed(1)
    kept = shrunk(0.3 * torch.randn(classes, 40_000), noise=0.3, factor=1.0) != 0
    assert float(kept.double().mean()) == pytest.approx(0.3173, abs=0.01)  # P(|normal| > 1)


def test_wrong_numbers_are_named() -> None:
    with pytest.raises(InputError, match=r"momentum=1\.0"):
        accumulated_noise(lr=1.0, momentum=1.0, releases=3, noise=1.0)
    with pytest.raises(InputError, match="factor=-1"):
        shrunk(torch.zeros(2, 2), noise=1.0, factor=-1)
