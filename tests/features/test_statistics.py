from __future__ import annotations

import math

import dp_accounting
import pytest
import torch
from dp_accounting.rdp import RdpAccountant
from hypothesis import given
from hypothesis import strategies as st

from sluice._base.errors import InputError
from sluice.features import private_channel_statistics
from sluice.features.statistics import PrivateStatistics, _contributions, _spatial_means
from sluice.randomness.noise import SecureNoise, SeededNoise


def release(features: torch.Tensor, **changes: object) -> PrivateStatistics:
    settings = {
        "mean_clip_norm": 100.0,
        "square_clip_norm": 100.0,
        "noise_multiplier": 1e-9,
        "public_size": max(len(features), 1),
        "noise": SeededNoise(0),
    }
    return private_channel_statistics(features, **(settings | changes))


def random_features(samples: int, channels: int = 5) -> torch.Tensor:
    return torch.rand(samples, channels, 3, 4, generator=torch.Generator().manual_seed(samples))


def test_without_clipping_and_noise_they_are_the_moments():
    features = random_features(3000)
    statistics = release(features).statistics
    torch.testing.assert_close(statistics.mean, features.mean(dim=(0, 2, 3)), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(statistics.mean_square, features.square().mean(dim=(0, 2, 3)), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(statistics.variance, features.var(dim=(0, 2, 3)), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_the_features_are_left_as_they_are(dtype):
    features = random_features(5).to(dtype)
    before = features.clone()
    release(features)
    assert torch.equal(features, before)


def test_float16_is_read_as_it_is():
    features = random_features(50).half()
    assert torch.equal(release(features).statistics.mean, release(features.float()).statistics.mean)


def test_the_event_costs_what_two_gaussians_cost():
    event = release(random_features(3), noise_multiplier=8.0).event
    gaussian = dp_accounting.GaussianDpEvent(8.0)
    assert event == dp_accounting.ComposedDpEvent([gaussian, gaussian])
    accountant = RdpAccountant()
    accountant.compose(event)
    assert accountant.get_epsilon(1e-5) == pytest.approx(0.695, abs=5e-4)


def test_the_noise_has_the_stated_deviation():
    features = torch.zeros(0, 20_000, 1, 1)
    statistics = release(
        features, mean_clip_norm=3.0, square_clip_norm=5.0, noise_multiplier=2.0, public_size=10
    ).statistics
    # The deviation of 20,000 draws is within 2 % of the true one, except once in 10^4 seeds.
    assert float(statistics.mean.std()) == pytest.approx(3.0 * 2.0 / 10, rel=0.02)
    assert float(statistics.mean_square.std()) == pytest.approx(5.0 * 2.0 / 10, rel=0.02)
    correlation = torch.corrcoef(torch.stack([statistics.mean, statistics.mean_square]))[0, 1]
    assert abs(float(correlation)) < 0.03


def test_secure_noise_differs_from_call_to_call():
    features = random_features(10)
    first, second = (release(features, noise_multiplier=1.0, noise=SecureNoise()).statistics for _ in range(2))
    assert not torch.equal(first.mean, second.mean)


@given(
    scale=st.floats(1e-150, 1e150) | st.floats(0.1, 10),
    clip_norm=st.floats(1e-3, 1e3),
    seed=st.integers(0, 1000),
    channels=st.integers(1, 243),
)
def test_no_contribution_exceeds_the_clip_norm(scale, clip_norm, seed, channels):
    vectors = torch.randn(6, channels, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * scale
    contributions = _contributions(vectors, clip_norm)
    assert all(math.sqrt(math.fsum(x * x for x in row)) <= clip_norm for row in contributions.tolist())


def test_removing_a_record_moves_the_exact_sum_by_its_contribution():
    features = random_features(2500).double() * 3
    means, _ = _spatial_means(features)
    contributions = _contributions(means, 2.0)
    assert (means.norm(dim=1) > 2.0).any()
    for left_out in (0, 1023, 1024, 2499):
        kept = torch.cat([features[:left_out], features[left_out + 1 :]])
        difference = contributions.sum(dim=0) - _contributions(_spatial_means(kept)[0], 2.0).sum(dim=0)
        assert torch.equal(difference, contributions[left_out])


def test_a_long_vector_keeps_its_direction():
    vector = torch.tensor([[3.0, -4.0]], dtype=torch.float64)
    torch.testing.assert_close(_contributions(vector, 1.0), vector / 5, rtol=0, atol=1e-6)
    torch.testing.assert_close(_contributions(vector, 6.0), vector, rtol=0, atol=1e-6)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_record_that_is_not_finite_counts_as_nothing(bad):
    features = random_features(8)
    features[3, 2, 0, 0] = bad
    kept = torch.cat([features[:3], features[4:]])
    found, expected = release(features).statistics, release(kept, public_size=8).statistics
    assert torch.equal(found.mean, expected.mean)
    assert torch.equal(found.mean_square, expected.mean_square)


def test_a_channel_without_variance():
    features = random_features(100)
    features[:, 1] = 0.0
    statistics = release(features).statistics
    assert float(statistics.variance[1]) == pytest.approx(0.0, abs=1e-6)
    assert (statistics.variance >= 0).all()


def test_division_is_by_the_public_number():
    features = random_features(10)
    found = release(features, public_size=40).statistics.mean
    torch.testing.assert_close(found, features.mean(dim=(0, 2, 3)) / 4, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "change",
    [
        {"mean_clip_norm": 0.0},
        {"square_clip_norm": math.inf},
        {"noise_multiplier": -1.0},
        {"noise_multiplier": 0.0},
        {"public_size": 0},
        {"public_size": 2.5},
    ],
)
def test_bad_settings_are_refused(change):
    with pytest.raises(InputError, match=next(iter(change))):
        release(random_features(2), **change)


@pytest.mark.parametrize("bad", [torch.zeros(3, 5), torch.zeros(3, 5, 2, 2, dtype=torch.uint8)])
def test_other_features_are_refused(bad):
    with pytest.raises(InputError, match="features"):
        release(bad)
