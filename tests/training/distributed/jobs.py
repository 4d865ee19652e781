"""What the workers of a test do: small runs, whose results are told as plain numbers."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

from sluice import ClippingBiasGate, GlobalScaling, PrivacyEngine
from sluice.mechanism.selective_release import SelectiveRelease
from sluice.training.options import TrainingOptions

RECORDS = 300


def data(records: int = RECORDS) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(records, 6, generator=generator)
    return TensorDataset(x, (x[:, 0] + 0.3 * x[:, 1] > 0).long())


def model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def selective(*, gate: bool, releases: int, rate: float = 0.1) -> SelectiveRelease:
    return SelectiveRelease(
        expected_batch_size=rate * RECORDS,
        sample_rate=rate,
        scaling=GlobalScaling(bound=2.0, max_grad_norm=1.0),
        noise_multiplier=1.0,
        gate=ClippingBiasGate(beta=0.5, gate_noise=1.0, reference_noise=5.0, small_norm=0.5, large_norm=2.0)
        if gate
        else None,
        releases=releases,
    )


def weights_of(module: nn.Module) -> list[float]:
    return [float(x) for p in module.parameters() for x in p.detach().double().flatten()]


def digest(module: nn.Module) -> str:
    return hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in module.parameters())).hexdigest()


def told(engine: PrivacyEngine, module: nn.Module) -> dict[str, Any]:
    trace = engine._executor.trace
    return {
        "weights": weights_of(module),
        "digest": digest(module),
        "attempts": trace.attempts,
        "measured": trace.measured,
        "metrics": trace.metrics,
        "released": engine.released,
    }


def set_up(
    mechanism: Any, *, seed: int | None, lr: float = 0.5, options: TrainingOptions | None = None, own: bool = False
) -> tuple[PrivacyEngine, nn.Module]:
    module = model(rank() if own else 0)
    engine = PrivacyEngine(seed=seed)
    optimizer = torch.optim.SGD(module.parameters(), lr=lr, momentum=0.5)
    engine.make_private_by(mechanism, module=module, optimizer=optimizer, data_loader=data(), options=options)
    return engine, module


def train(
    *,
    gate: bool = True,
    releases: int = 100,
    seed: int | None = 3,
    rate: float = 0.1,
    chunk: int | None = None,
    own: bool = False,
    ledger: str | None = None,
) -> dict[str, Any]:
    """A run by `engine.releases`."""
    from sluice.gradients import GradientOptions

    options = TrainingOptions(gradient_options=GradientOptions(chunk_size=chunk) if chunk else None, ledger=ledger)
    engine, module = set_up(selective(gate=gate, releases=releases, rate=rate), seed=seed, options=options, own=own)
    for _ in engine.releases(nn.functional.cross_entropy):
        pass
    engine.close()
    return told(engine, module)


def warm_up() -> None:
    train(releases=1)
