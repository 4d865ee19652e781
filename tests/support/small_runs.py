"""Small private runs of an engine."""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from sluice import PrivacyEngine
from sluice.mechanism.gates import ClippingBiasGate
from sluice.mechanism.thinning import ThinningGate

RECORDS = 120
GATE = ClippingBiasGate(gate_noise=1.0, reference_noise=4.0, small_norm=0.2)
THINNING = ThinningGate(strength=2.0, small_norm=0.2, large_norm=2.0)


def blobs(records: int = RECORDS) -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    y = torch.arange(records) % 3
    return TensorDataset(torch.randn(records, 4, generator=generator) + y[:, None], y)


def small_model() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


class Run:
    """A small private run; ``options`` go to make_private. Those that are open are closed after each test."""

    open_runs: ClassVar[list[Run]] = []

    def __init__(
        self, *, seed: int | None = 11, optimizer: str = "sgd", data: object = None, **options: object
    ) -> None:
        self.model = small_model()
        makers = {
            "sgd": lambda p: torch.optim.SGD(p, lr=0.5, momentum=0.9),
            "adam": lambda p: torch.optim.Adam(p, lr=0.02),
            "adamw": lambda p: torch.optim.AdamW(p, lr=0.02),
        }
        self.inner = makers[optimizer](self.model.parameters())
        self.engine = PrivacyEngine(seed=seed, accountant="rdp")
        self.open_runs.append(self)
        settings: dict = {"noise_multiplier": 1.0, "max_grad_norm": 1.0, "releases": 12, "sample_rate": 0.3, **options}
        if "lr_scheduler" in settings:
            settings["lr_scheduler"] = settings["lr_scheduler"](self.inner)
        _, self.optimizer, self.loader = self.engine.make_private(
            module=self.model, optimizer=self.inner, data_loader=blobs() if data is None else data, **settings
        )

    def step(self, batch: tuple[Tensor, Tensor]) -> None:
        x, y = batch
        self.optimizer.zero_grad()
        F.cross_entropy(self.model(x), y).backward()
        self.optimizer.step()

    def loop(self) -> Run:
        for batch in self.loader:
            self.step(batch)
        return self

    def fast(self) -> Run:
        for _ in self.engine.releases(F.cross_entropy):
            pass
        return self

    def weights(self) -> Tensor:
        return torch.cat([p.detach().flatten() for p in self.model.parameters()])

    def close(self) -> None:
        self.engine.close()


def same(first: object, second: object) -> bool:
    if isinstance(first, Tensor):
        return isinstance(second, Tensor) and torch.equal(first, second)
    if isinstance(first, dict):
        return (
            isinstance(second, dict) and first.keys() == second.keys() and all(same(first[k], second[k]) for k in first)
        )
    if isinstance(first, list | tuple):
        return len(first) == len(second) and all(map(same, first, second))
    return first == second
