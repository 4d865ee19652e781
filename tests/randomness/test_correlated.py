from __future__ import annotations

import io
import math

import numpy as np
import pytest
import torch
from scipy import linalg, stats

from sluice._base.errors import DataError, InputError
from sluice.accounting.matrix.optimise import optimise_banded, optimise_blt
from sluice.accounting.matrix.strategy import BandedToeplitz, BufferedLinearToeplitz, identity
from sluice.accounting.matrix.workload import prefix_sums
from sluice.randomness.correlated import CorrelatedNoise, CorrelatedRelease
from sluice.randomness.noise import SeededNoise
from sluice.randomness.rounded_normal import Entries

STEPS = 24
STRATEGIES = [
    optimise_banded(prefix_sums(STEPS), bands=5),
    optimise_blt(prefix_sums(STEPS), buffers=3),
    BandedToeplitz((1.0, -0.3, 0.4)),
    identity(),
]


def dense(strategy: BandedToeplitz | BufferedLinearToeplitz) -> np.ndarray:
    return linalg.toeplitz(strategy.coefficients(STEPS), np.zeros(STEPS))


def streamed_matrix(strategy: BandedToeplitz | BufferedLinearToeplitz) -> np.ndarray:
    """The matrix that the stream is: its answers to unit impulses, one for each place of a tensor."""
    stream = CorrelatedNoise(strategy)
    return torch.stack([stream.next([row])[0] for row in torch.eye(STEPS, dtype=torch.float64)]).numpy()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_streamed_noise_has_the_promised_covariance(strategy: BandedToeplitz | BufferedLinearToeplitz) -> None:
    applied = streamed_matrix(strategy)
    np.testing.assert_allclose(applied, np.linalg.inv(dense(strategy)), atol=1e-12)
    promised = np.linalg.inv(dense(strategy).T @ dense(strategy))
    np.testing.assert_allclose(applied @ applied.T, promised, atol=1e-11)


@pytest.mark.parametrize("strategy", STRATEGIES[:2])
def test_released_noise_has_the_promised_covariance(strategy: BandedToeplitz | BufferedLinearToeplitz) -> None:
    entries, std = 40_000, 1.5 * 2.0 * strategy.column_norm(STEPS)
    mechanism = CorrelatedRelease(strategy, steps=STEPS, noise_multiplier=1.5, max_grad_norm=2.0, source=SeededNoise(5))
    raw = torch.linspace(-3, 3, STEPS)
    rows = [mechanism.release([torch.full((entries,), float(value))])[0] - value for value in raw]
    # Whitened by C the noise must be independent with the promised deviation.
    white = dense(strategy) @ torch.stack(rows).double().numpy() / std
    z = (white @ white.T / entries - np.eye(STEPS)) * math.sqrt(entries)
    diagonal = np.diag(z) / math.sqrt(2)
    others = z[np.triu_indices(STEPS, 1)]
    for values in (diagonal, others):
        assert stats.chi2.sf((values**2).sum(), values.size) > 1e-4
        assert np.abs(values).max() < 5


def test_release_without_correlation_is_noisy_sum() -> None:
    from sluice.randomness.noise import noisy_sum

    mechanism = CorrelatedRelease(identity(), steps=3, noise_multiplier=2.0, max_grad_norm=0.5, source=SeededNoise(3))
    source = SeededNoise(3)
    for _ in range(3):
        found = mechanism.release([torch.ones(4, 5), torch.zeros(3)])
        expected = noisy_sum([torch.ones(4, 5), torch.zeros(3)], noise_multiplier=2.0, sensitivity=0.5, noise=source)
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("strategy", STRATEGIES[:2])
def test_later_raw_sums_are_recovered_where_noise_is_tiny(strategy: BandedToeplitz | BufferedLinearToeplitz) -> None:
    mechanism = CorrelatedRelease(
        strategy, steps=STEPS, noise_multiplier=1e-6, max_grad_norm=1.0, source=SeededNoise(7)
    )
    for step in range(STEPS):
        raw = [torch.randn(6, generator=torch.Generator().manual_seed(step))]
        expected = raw[0].clone()
        mechanism.release(raw)
        torch.testing.assert_close(raw[0], expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("strategy", STRATEGIES[:2])
def test_a_restored_state_continues(strategy: BandedToeplitz | BufferedLinearToeplitz) -> None:
    def start() -> CorrelatedRelease:
        return CorrelatedRelease(strategy, steps=STEPS, noise_multiplier=1.0, max_grad_norm=1.0, source=SeededNoise(9))

    def raw(step: int) -> list[torch.Tensor]:
        return [torch.full((3,), float(step)), torch.zeros(2, 2)]

    whole, first, second = start(), start(), start()
    expected = [whole.release(raw(step)) for step in range(9)]
    for step in range(4):
        first.release(raw(step))
    buffer = io.BytesIO()
    torch.save({"noise": first.state_dict(), "source": first.source.state_dict()}, buffer)
    buffer.seek(0)
    saved = torch.load(buffer, weights_only=True)
    first.release(raw(4))
    second.load_state_dict(saved["noise"])
    second.source.load_state_dict(saved["source"])
    for step in range(4, 9):
        for one, other in zip(second.release(raw(step)), expected[step], strict=True):
            assert torch.equal(one, other)
    with pytest.raises(InputError, match="saved strategy"):
        CorrelatedNoise(identity()).load_state_dict(saved["noise"])


@pytest.mark.parametrize("strategy", STRATEGIES[:2])
def test_what_a_skipped_step_held_never_comes_back(strategy: BandedToeplitz | BufferedLinearToeplitz) -> None:
    """The lost step is rolled back to the state before it; later rows of C G are those without its sum."""

    class Silent(SeededNoise):
        def add_rounded_normal(self, entries: Entries, *, scale: float, step: float) -> None:
            pass

    mechanism = CorrelatedRelease(strategy, steps=6, noise_multiplier=1.0, max_grad_norm=1.0, source=Silent(0))
    sums = [3.0, 5.0, 0.0, 7.0, 11.0]
    rows = []
    for step, value in enumerate(sums):
        if step == 2:
            mechanism.skip()
            rows.append(0.0)
        else:
            rows.append(mechanism.release([torch.tensor([value], dtype=torch.float64)])[0].item())
    np.testing.assert_allclose(rows, sums, atol=1e-3)
    mechanism.release([torch.zeros(1)])
    with pytest.raises(InputError, match="all steps=6"):
        mechanism.release([torch.zeros(1)])
    with pytest.raises(InputError, match="all steps=6"):
        mechanism.skip()


def test_skipping_noise_is_a_row_of_zeros() -> None:
    for strategy in STRATEGIES:
        one, other = CorrelatedNoise(strategy), CorrelatedNoise(strategy)
        rows = torch.randn(8, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        past: list[torch.Tensor] = []
        for step, row in enumerate(rows):
            if step == 3:
                one.skip()
                echo = sum(c * x for c, x in zip(strategy.coefficients(9)[1:], reversed(past), strict=False))
                other.next([torch.zeros(3, dtype=torch.float64) + echo])
                past.append(torch.zeros(3, dtype=torch.float64))
            else:
                left, right = one.next([row])[0], other.next([row])[0]
                torch.testing.assert_close(left, right, atol=1e-12, rtol=0)
                past.append(left)


def test_memory_is_that_of_bands_or_buffers() -> None:
    for strategy, rows in ((BandedToeplitz((1.0, 0.5, 0.2)), 2), (STRATEGIES[1], 3)):
        stream = CorrelatedNoise(strategy)
        for _ in range(20):
            stream.next([torch.ones(7)])
        assert sum(tensor.numel() for row in stream.state_dict()["past"] for tensor in row) == 7 * rows


def test_sums_that_are_not_finite_are_refused_and_change_nothing() -> None:
    mechanism = CorrelatedRelease(
        STRATEGIES[0], steps=3, noise_multiplier=1.0, max_grad_norm=1.0, source=SeededNoise(1)
    )
    with pytest.raises(DataError, match="NaN"):
        mechanism.release([torch.tensor([float("nan")])])
    assert mechanism.position == 0
    assert mechanism.state_dict()["raw_past"] == []
