from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

accelerate = pytest.importorskip("accelerate", reason="needs pip install 'sluice[accelerate]'")

import torch.nn.functional as F  # noqa: E402
from accelerate.state import AcceleratorState, GradientState  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402

from sluice import PrivacyEngine  # noqa: E402
from sluice._base.errors import InputError  # noqa: E402
from sluice.integrations.accelerate import prepare  # noqa: E402
from sluice.mechanism.gates import CoinGate  # noqa: E402
from sluice.runs.ledger import read_ledger  # noqa: E402

RELEASES = 6


@pytest.fixture(autouse=True)
def _fresh_state() -> Iterator[None]:
    """Accelerate keeps one state for the process."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def engine_and_model(*, seed: int | None = 3, ledger=None) -> tuple[PrivacyEngine, nn.Module]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    y = torch.arange(60) % 3
    records = TensorDataset(torch.randn(60, 4, generator=torch.Generator().manual_seed(5)) + y[:, None], y)
    inner = torch.optim.Adam(model.parameters(), lr=0.05)
    engine = PrivacyEngine(accountant="rdp", seed=seed)
    engine.make_private(
        module=model,
        optimizer=inner,
        data_loader=DataLoader(records, batch_size=20),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        releases=RELEASES,
        gate=CoinGate(probability=0.5),
        max_physical_batch_size=8,
        lr_scheduler=torch.optim.lr_scheduler.LinearLR(inner, 1.0, 0.1, total_iters=RELEASES),
        ledger=ledger,
    )
    return engine, model


def weights(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def trained(engine: PrivacyEngine, *, state=None, until: int = RELEASES, saved=None) -> torch.Tensor:
    accelerator = accelerate.Accelerator(cpu=True)
    model, optimizer, loader = prepare(accelerator, engine)
    if state is not None:
        accelerator.load_state(str(state))
    for x, y in loader:
        optimizer.zero_grad()
        accelerator.backward(F.cross_entropy(model(x), y))
        optimizer.step()
        if engine.released == until:
            break
    assert loader.finished == (until == RELEASES)
    if saved is not None:
        accelerator.save_state(str(saved))
    engine.close()
    return weights(model)


def test_the_loop_is_the_ordinary_one():
    engine, model = engine_and_model()
    _, optimizer, loader = engine.ordinary_loop()
    for x, y in loader:
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    engine.close()
    other, _ = engine_and_model()
    assert torch.equal(trained(other), weights(model))


@pytest.mark.parametrize("seed", [3, None])
def test_a_run_resumes_from_a_saved_state(tmp_path, seed):
    ledger = tmp_path / "ledger.jsonl"
    first, _ = engine_and_model(seed=seed, ledger=ledger)
    trained(first, until=3, saved=tmp_path / "state")
    second, _ = engine_and_model(seed=seed, ledger=ledger)
    found = trained(second, state=tmp_path / "state")
    assert second.released == RELEASES
    assert read_ledger(ledger).spent == RELEASES
    assert second.get_certified_epsilon(1e-3) == second.get_epsilon(1e-3)
    if seed is not None:
        whole, _ = engine_and_model(seed=seed)
        assert torch.equal(found, trained(whole))


def test_a_saved_state_without_a_ledger_is_refused(tmp_path):
    """What was released since it was saved would be free."""
    first, _ = engine_and_model(seed=None)
    trained(first, until=3, saved=tmp_path / "state")
    second, _ = engine_and_model(seed=None)
    with pytest.raises(InputError, match="would not be charged"):
        trained(second, state=tmp_path / "state")
    second.close()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"gradient_accumulation_steps": 2}, "cut into pieces already"),
        ({"mixed_precision": "bf16"}, "norms are measured"),
    ],
)
def test_settings_that_would_be_wrong_are_refused(settings, message):
    engine, _ = engine_and_model()
    with pytest.raises(InputError, match=message):
        prepare(accelerate.Accelerator(cpu=True, **settings), engine)
    engine.close()
