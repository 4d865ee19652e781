"""What is released has one type, so that its digits do not tell how its sum was added up, and thereby how large the batch was."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from sluice.accounting.matrix.strategy import BandedToeplitz
from sluice.gradients import GradientOptions
from sluice.mechanism.base import Mechanism
from sluice.methods.matrix import MatrixMechanism
from sluice.training import context
from sluice.training.engine import PrivacyEngine
from sluice.training.options import TrainingOptions
from small_mechanisms import SIZE, small_mechanisms

RELEASES = 3
DIVISOR = 20.3  # not a float32 number, so that dividing by it in another type gives other digits
MECHANISMS: dict[str, Any] = {
    **{
        name: replace(mechanism, expected_batch_size=DIVISOR)
        if hasattr(mechanism, "expected_batch_size")
        else mechanism
        for name, mechanism in small_mechanisms(RELEASES, rho=1.0, budgeted=8).items()
    },
    "matrix": MatrixMechanism(
        strategy=BandedToeplitz(diagonals=(1.0, 0.5)),
        batches="cyclic-poisson",
        groups=2,
        sample_rate=0.5,
        expected_batch_size=DIVISOR,
        max_grad_norm=1.0,
        noise_multiplier=2.0,
        releases=RELEASES,
    ),
}


def output_itself(output: Tensor, y: Tensor) -> Tensor:
    """Its gradients are the records: quarters, which add up exactly in either type."""
    return output.sum()


def weights_after(mechanism: Mechanism) -> list[Tensor]:
    x = torch.randint(-1, 2, (SIZE, 4), generator=torch.Generator().manual_seed(0)) / 4
    model = nn.Linear(4, 1, bias=False)
    nn.init.zeros_(model.weight)
    engine = PrivacyEngine(seed=5)
    engine.make_private_by(
        mechanism,
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.25),
        data_loader=TensorDataset(x, torch.zeros(SIZE)),
        options=TrainingOptions(loss_reduction="sum", gradient_options=GradientOptions(chunk_size=4)),
    )
    return [model.weight.detach().clone() for _ in engine.releases(output_itself)]


@pytest.mark.parametrize("name", [name for name in MECHANISMS if name != "non-private"])
def test_digits_do_not_tell_whether_a_batch_was_added_up_in_double_precision(name, monkeypatch):
    """Up to BLOCK_ROWS records sums are float32 and beyond it float64: a public number of a secret one of records."""
    in_one_block = weights_after(MECHANISMS[name])
    monkeypatch.setattr(context, "BLOCK_ROWS", 4)
    in_many = weights_after(MECHANISMS[name])
    assert len(in_one_block) >= RELEASES
    for one, many in zip(in_one_block, in_many, strict=True):
        assert torch.equal(one, many)
