from __future__ import annotations

import io

import numpy as np
import pytest
import torch
from scipy import stats

from sluice._base.errors import DataError, InputError
from sluice.mechanism.rates import cyclic_sample_rate
from sluice.randomness.grouped_sampling import BallsInBins, CyclicPoisson, uniform_groups
from sluice.randomness.noise import SeededNoise

ALPHA = 1e-4


def test_groups_are_uniform_and_independent() -> None:
    groups = uniform_groups(60_000, groups=7, source=SeededNoise(1)).numpy()
    assert stats.chisquare(np.bincount(groups, minlength=7)).pvalue > ALPHA
    pairs = np.bincount(groups[::2] * 7 + groups[1::2], minlength=49)
    assert stats.chisquare(pairs).pvalue > ALPHA


def test_a_record_more_changes_no_other_records_group() -> None:
    fewer = uniform_groups(100, groups=7, source=SeededNoise(1))
    more = uniform_groups(101, groups=7, source=SeededNoise(1))
    assert torch.equal(fewer, more[:100])


def test_numbers_beyond_the_last_whole_multiple_are_drawn_again() -> None:
    class Stream:
        def __init__(self) -> None:
            self.blocks = [np.array([2**64 - 1, 5, 2**64 - 2], dtype=np.uint64), np.array([7, 2**64 - 1], np.uint64)]
            self.blocks.append(np.array([11], dtype=np.uint64))

        def read(self, count: int, dtype: object) -> np.ndarray:
            block = self.blocks.pop(0)
            assert len(block) == count
            return block

    class Source(SeededNoise):
        def keystream(self) -> Stream:  # type: ignore[override]
            return Stream()

    # 2^64 = 1 mod 3 and mod 5: of multiples of 3, only 2^64 - 1 is beyond the last whole one; of 7, 2^64 - 2 too.
    assert uniform_groups(3, groups=7, source=Source(0)).tolist() == [0, 5, 4]


def test_balls_in_bins_puts_every_record_in_one_bin_for_good() -> None:
    sampler = BallsInBins(dataset_size=500, bins=6, source=SeededNoise(2))
    first = [sampler.batch_of(step) for step in range(6)]
    second = [sampler.batch_of(step) for step in range(6, 12)]
    assert sorted(torch.cat(first).tolist()) == list(range(500))
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))
    assert all((batch.diff() > 0).all() for batch in first)
    assert sampler.expected_batch_size == pytest.approx(500 / 6)


def test_cyclic_poisson_samples_the_group_in_turn_at_its_rate() -> None:
    sampler = CyclicPoisson(dataset_size=300, groups=3, sample_rate=0.4, source=SeededNoise(3))
    counts, turns = np.zeros(300), np.full(300, -1)
    for step in range(3000):
        batch = sampler.batch_of(step).numpy()
        counts[batch] += 1
        assert np.isin(turns[batch], [-1, step % 3]).all()
        turns[batch] = step % 3
    z = (counts - 400) / np.sqrt(1000 * 0.4 * 0.6)
    assert stats.chi2.sf((z**2).sum(), 300) > ALPHA
    assert stats.chi2.cdf((z**2).sum(), 300) > ALPHA
    assert sampler.expected_batch_size == pytest.approx(40)


@pytest.mark.parametrize("kind", ["bins", "cyclic"])
def test_a_restored_state_continues_with_the_same_groups(kind: str) -> None:
    def start(seed: int) -> BallsInBins | CyclicPoisson:
        source = SeededNoise(seed)
        if kind == "bins":
            return BallsInBins(dataset_size=50, bins=4, source=source)
        return CyclicPoisson(dataset_size=50, groups=4, sample_rate=0.5, source=source)

    whole, other = start(1), start(2)
    for step in range(3):
        whole.batch_of(step)
    buffer = io.BytesIO()
    torch.save(whole.state_dict(), buffer)
    buffer.seek(0)
    saved = torch.load(buffer, weights_only=True)
    expected = [whole.batch_of(step) for step in range(9)]
    other.load_state_dict(saved)
    assert all(torch.equal(other.batch_of(step), batch) for step, batch in enumerate(expected))
    with pytest.raises(InputError, match="saved dataset_size"):
        BallsInBins(dataset_size=51, bins=4).load_state_dict(saved)
    with pytest.raises(DataError, match="damaged"):
        other.load_state_dict({**saved, "group_of": saved["group_of"] + 4})


def test_rates() -> None:
    assert cyclic_sample_rate(batch_size=10, dataset_size=400, groups=8) == 0.2
    with pytest.raises(InputError, match="use fewer bands, at most 40"):
        cyclic_sample_rate(batch_size=10, dataset_size=400, groups=41)
    with pytest.raises(InputError, match="sample_rate"):
        CyclicPoisson(dataset_size=4, groups=2, sample_rate=1.5)
