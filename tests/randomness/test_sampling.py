from __future__ import annotations

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from sluice._base.errors import InputError
from sluice.mechanism.rates import exact_sample_rate
from sluice.randomness.noise import SecureNoise, SeededNoise
from sluice.randomness.sampling import PoissonSampler

ALPHA = 1e-4
RECORDS, RATE, BATCHES = 40, 0.3, 20_000


@pytest.fixture(scope="module")
def presence() -> np.ndarray:
    """Which record is in which of many batches."""
    sampler = PoissonSampler(dataset_size=RECORDS, sample_rate=RATE, source=SeededNoise(21))
    result = np.zeros((BATCHES, RECORDS))
    for row, indices in zip(result, sampler, strict=False):
        row[indices.numpy()] = 1
    return result


def test_every_record_has_the_same_probability(presence: np.ndarray) -> None:
    z = (presence.sum(axis=0) - BATCHES * RATE) / math.sqrt(BATCHES * RATE * (1 - RATE))
    assert stats.chi2.sf((z**2).sum(), RECORDS) > ALPHA
    assert stats.chi2.cdf((z**2).sum(), RECORDS) > ALPHA


def test_records_are_pairwise_independent(presence: np.ndarray) -> None:
    centred = (presence - RATE) / math.sqrt(RATE * (1 - RATE))
    z = (centred.T @ centred)[np.triu_indices(RECORDS, 1)] / math.sqrt(BATCHES)
    assert stats.chi2.sf((z**2).sum(), z.size) > ALPHA
    assert stats.chi2.cdf((z**2).sum(), z.size) > ALPHA
    assert np.abs(z).max() < 5


def test_batches_are_independent(presence: np.ndarray) -> None:
    centred = (presence - RATE) / math.sqrt(RATE * (1 - RATE))
    z = (centred[1:].T @ centred[:-1]).ravel() / math.sqrt(BATCHES - 1)
    assert stats.chi2.sf((z**2).sum(), z.size) > ALPHA


def test_sizes_are_binomial(presence: np.ndarray) -> None:
    sizes = presence.sum(axis=1).astype(int)
    expected = stats.binom.pmf(np.arange(RECORDS + 1), RECORDS, RATE) * BATCHES
    observed = np.bincount(sizes, minlength=RECORDS + 1)
    keep = expected > 5
    statistic = (((observed - expected) ** 2) / expected)[keep].sum()
    assert stats.chi2.sf(statistic, keep.sum()) > ALPHA


def test_triples_are_independent() -> None:
    """All eight patterns of three records, on a small data set."""
    sampler = PoissonSampler(dataset_size=3, sample_rate=0.4, source=SeededNoise(2))
    counts = np.zeros(8)
    for indices in itertools.islice(sampler, 10_000):
        counts[sum(1 << int(index) for index in indices)] += 1
    expected = [10_000 * 0.4 ** bin(p).count("1") * 0.6 ** (3 - bin(p).count("1")) for p in range(8)]
    assert stats.chisquare(counts, expected).pvalue > ALPHA


def test_large_data_sets_are_sampled_evenly() -> None:
    records, rate = 3_000_001, 0.01
    sampler = PoissonSampler(dataset_size=records, sample_rate=rate, source=SeededNoise(1))
    indices = sampler.sample().numpy()
    assert (np.diff(indices) > 0).all()
    assert indices[0] >= 0
    assert indices[-1] < records
    assert stats.binomtest(indices.size, records, rate).pvalue > ALPHA
    assert stats.kstest(indices / records, "uniform").pvalue > ALPHA
    # Gaps between neighbours are geometric.
    assert (
        stats.kstest(np.diff(indices) + SeededNoise(3).uniform((indices.size - 1,)).numpy() - 1, _gap_cdf).pvalue
        > ALPHA
    )


def _gap_cdf(x: np.ndarray) -> np.ndarray:
    """A geometric law of rate 0.01, spread evenly over each unit."""
    whole = np.floor(x)
    return np.where(x < 0, 0, 1 - 0.99**whole + (x - whole) * 0.01 * 0.99**whole)


@given(st.floats(2.0**-70, 1.0))
def test_the_rate_is_never_exceeded(rate: float) -> None:
    sampler = PoissonSampler(dataset_size=3, sample_rate=rate, source=SeededNoise(1))
    granted = Fraction(sampler.inclusion_threshold, 2**64)
    assert Fraction(rate) - Fraction(1, 2**64) < granted <= Fraction(rate)


def test_edges() -> None:
    everything = PoissonSampler(dataset_size=5, sample_rate=1.0, source=SeededNoise(1))
    assert everything.sample().tolist() == [0, 1, 2, 3, 4]
    rarely = PoissonSampler(dataset_size=2, sample_rate=1e-12, source=SeededNoise(1))
    empty = rarely.sample()
    assert empty.shape == (0,)
    assert empty.dtype == torch.int64
    assert PoissonSampler(dataset_size=60_000, sample_rate=1024 / 60_000).expected_batch_size == pytest.approx(1024)


def test_randomness_is_secure_unless_asked_otherwise() -> None:
    first, second = (PoissonSampler(dataset_size=1000, sample_rate=0.5) for _ in range(2))
    assert isinstance(first.source, SecureNoise)
    assert not torch.equal(first.sample(), second.sample())


def test_a_seeded_sampler_resumes() -> None:
    sampler = PoissonSampler(dataset_size=500, sample_rate=0.1, source=SeededNoise(9))
    sampler.sample()
    state = sampler.state_dict()
    expected = [sampler.sample() for _ in range(3)]
    resumed = PoissonSampler(dataset_size=500, sample_rate=0.1, source=SeededNoise(0))
    resumed.load_state_dict(state)
    assert all(torch.equal(resumed.sample(), batch) for batch in expected)


def test_a_foreign_state_is_refused() -> None:
    state = PoissonSampler(dataset_size=500, sample_rate=0.1, source=SeededNoise(9)).state_dict()
    with pytest.raises(InputError, match="dataset_size"):
        PoissonSampler(dataset_size=501, sample_rate=0.1, source=SeededNoise(9)).load_state_dict(state)
    with pytest.raises(InputError, match="sample_rate"):
        PoissonSampler(dataset_size=500, sample_rate=0.2, source=SeededNoise(9)).load_state_dict(state)
    with pytest.raises(InputError, match="kind of source"):
        PoissonSampler(dataset_size=500, sample_rate=0.1).load_state_dict(state)


def test_bad_arguments() -> None:
    with pytest.raises(InputError, match="dataset_size=0"):
        PoissonSampler(dataset_size=0, sample_rate=0.1)
    for rate in (0.0, -0.1, 1.1, math.nan):
        with pytest.raises(InputError, match="sample_rate="):
            PoissonSampler(dataset_size=10, sample_rate=rate)


def test_exact_sample_rate() -> None:
    assert exact_sample_rate(batch_size=256, dataset_size=60_000) == 256 / 60_000
    assert exact_sample_rate(batch_size=7, dataset_size=7) == 1.0
    with pytest.raises(InputError, match="batch_size=8"):
        exact_sample_rate(batch_size=8, dataset_size=7)
    with pytest.raises(InputError, match="batch_size=0"):
        exact_sample_rate(batch_size=0, dataset_size=7)
