"""Models with spectral norms train: their vectors follow from the released weights, and a run resumes with them."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.data import TensorDataset

from sluice import PrivacyEngine
from sluice.gradients.spectral import advance
from sluice.mechanism.gates import ClippingBiasGate

RELEASES = 5


class Run:
    def __init__(self, *, rows: int = 16) -> None:
        with torch.random.fork_rng():
            torch.manual_seed(3)
            self.model = nn.Sequential(spectral_norm(nn.Linear(4, 8)), nn.Tanh(), spectral_norm(nn.Linear(8, 3)))
        self.first = copy.deepcopy(self.model)
        y = torch.arange(60) % 3
        x = torch.randn(60, 4, generator=torch.Generator().manual_seed(5)) + y[:, None]
        self.engine = PrivacyEngine(seed=11, accountant="rdp")
        _, self.optimizer, self.loader = self.engine.make_private(
            module=self.model,
            optimizer=torch.optim.SGD(self.model.parameters(), lr=0.5),
            data_loader=TensorDataset(x, y),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            releases=RELEASES,
            sample_rate=0.3,
            gate=ClippingBiasGate(gate_noise=1.0, reference_noise=4.0, small_norm=0.2),
            max_physical_batch_size=rows,
        )

    def loop(self) -> Run:
        for x, y in self.loader:
            self.optimizer.zero_grad()
            F.cross_entropy(self.model(x), y).backward()
            self.optimizer.step()
        return self

    def fast(self) -> Run:
        for _ in self.engine.releases(F.cross_entropy):
            pass
        return self

    def state(self) -> dict[str, Tensor]:
        return {name: value.clone() for name, value in self.model.state_dict().items()}

    def close(self) -> dict[str, Tensor]:
        self.engine.close()
        return self.state()


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor], *, tolerance: float) -> None:
    for name, value in one.items():
        torch.testing.assert_close(value, other[name], rtol=0, atol=tolerance)


def test_vectors_move_once_with_each_release_and_never_else():
    run = Run()
    follower = run.first
    for number in run.engine.releases(F.cross_entropy):
        follower.load_state_dict(dict(run.model.named_parameters()), strict=False)
        advance(follower)
        for name, buffer in follower.named_buffers():
            assert torch.equal(buffer, run.model.get_buffer(name)), f"{name} after release {number}"
    run.close()


@pytest.mark.parametrize("rows", [2, 64])
def test_the_ordinary_loop_in_pieces_of_any_size_does_the_same(rows):
    assert_same(Run(rows=rows).loop().close(), Run().fast().close(), tolerance=1e-5)


def test_a_resumed_run_is_the_uninterrupted_one(tmp_path):
    first = Run()
    for number in first.engine.releases(F.cross_entropy):
        if number == 2:
            first.engine.save(tmp_path)
            break
    first.close()
    second = Run()
    second.engine.load(tmp_path)
    assert_same(second.fast().close(), Run().fast().close(), tolerance=0.0)
