from __future__ import annotations

import warnings
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from sluice._base.errors import InputError
from sluice.integrations import Privacy
from sluice.integrations.privacy import Plan, refuse_settings
from sluice.integrations.steps import FixedShapes, ReleaseNumbers, ReleaseOptimizer, by_loss


def small_run(releases: int = 3) -> tuple[nn.Module, torch.optim.Optimizer, object]:
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    data = TensorDataset(torch.randn(20, 4), torch.arange(20) % 2)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    privacy = Privacy(noise_multiplier=1.0, delta=1e-3, max_grad_norm=1.0, accountant="rdp", seed=3)
    engine = privacy.engine(data, Plan(module=model, optimizer=inner, batch_size=5, releases=releases))
    return model, inner, engine


def test_a_step_is_a_release_and_steps_beyond_the_last_do_nothing():
    model, inner, engine = small_run()
    optimizer = ReleaseOptimizer(engine, by_loss(engine, F.cross_entropy))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    called = []
    for number in range(1, 4):
        optimizer.step(lambda: called.append(1))
        scheduler.step()
        assert engine.released == number
    assert inner.param_groups[0]["lr"] == pytest.approx(0.1 / 8)
    assert len(called) == 3
    assert not optimizer.done
    before = model.weight.detach().clone()
    optimizer.step()
    assert optimizer.done
    assert engine.released == 3
    assert torch.equal(before, model.weight)
    engine.close()


def test_schedulers_of_the_original_optimizer_can_be_moved():
    _, inner, engine = small_run()
    scheduler = torch.optim.lr_scheduler.StepLR(inner, 1)
    optimizer = ReleaseOptimizer(engine, by_loss(engine, F.cross_entropy))
    scheduler.optimizer = optimizer
    optimizer.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scheduler.step()
    assert inner.param_groups[0]["lr"] == pytest.approx(0.01)
    engine.close()


def test_batches_of_other_shapes_are_refused():
    collate = FixedShapes(lambda rows: torch.stack([torch.tensor(row) for row in rows]))
    assert collate([[1, 2], [3, 4]]).shape == (2, 2)
    assert collate([[1, 2]]).shape == (1, 2)
    with pytest.raises(InputError, match="Pad all records to one length"):
        collate([[1, 2, 3]])


def test_release_numbers_are_an_ordinary_loader():
    loader = ReleaseNumbers(3).loader()
    assert len(loader) == 3
    assert [int(batch["release"]) for batch in loader] == [0, 1, 2]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "exactly one of the two"),
        ({"target_epsilon": 1.0, "noise_multiplier": 1.0}, "exactly one of the two"),
        ({"target_epsilon": 1.0, "delta": 1.0}, "delta=1"),
        ({"target_epsilon": 1.0, "max_grad_norm": 0.0}, "max_grad_norm=0"),
        ({"target_epsilon": 1.0, "accountant": "guess"}, "accountant="),
    ],
)
def test_bad_budgets_are_refused(fields, message):
    with pytest.raises(InputError, match=message):
        Privacy(**{"delta": 1e-5, "max_grad_norm": 1.0, **fields})


def test_a_refused_setting_is_named_with_its_reason():
    with pytest.raises(InputError, match=r"steps=4 is not allowed in private training: they add up\. Set steps=1"):
        refuse_settings(SimpleNamespace(steps=4), {"steps": (1, "they add up.")})
    refuse_settings(SimpleNamespace(), {"steps": (1, "they add up.")})
