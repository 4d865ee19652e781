"""The mean of rows is released once for a run, whatever happens in between."""

from __future__ import annotations

import pytest
import torch

from sluice._base.errors import DataError
from sluice.experiments.mean_release import MEAN, released_mean
from sluice.features import private_row_mean
from sluice.mechanism.scaling import Clip
from sluice.mechanism.selective_release import SelectiveRelease
from sluice.randomness.noise import SecureNoise, SeededNoise
from sluice.runs.folder import RunFolder
from sluice.runs.ledger import Ledger, LedgerHeader, read_ledger

NOISE = 5.0


@pytest.fixture
def run(tmp_path):
    mechanism = SelectiveRelease(
        sample_rate=0.5,
        expected_batch_size=50.0,
        scaling=Clip(max_grad_norm=1.0),
        noise_multiplier=2.0,
        releases=3,
        prior_releases=(NOISE,),
    )
    with RunFolder.create(tmp_path / "run", config={}) as folder:
        header = LedgerHeader(mechanism=mechanism.to_dict(), delta=1e-5)
        with Ledger.create(folder.ledger_path, header=header) as ledger:
            yield folder, ledger


def _rows(count: int = 100) -> torch.Tensor:
    rows = torch.randn(count, 4, generator=torch.Generator().manual_seed(0))
    return (rows / rows.norm(dim=1, keepdim=True)).half()


def _released(run, rows=None, *, seed=None) -> torch.Tensor:
    folder, ledger = run
    return released_mean(
        _rows() if rows is None else rows, noise_multiplier=NOISE, seed=seed, folder=folder, ledger=ledger
    )


def test_it_is_drawn_once_logged_and_published(run):
    first = _released(run)
    assert torch.equal(first, _released(run))
    folder, ledger = run
    assert list(read_ledger(ledger.path).published) == [MEAN]
    assert (folder.public / MEAN).read_bytes() == (folder.private / MEAN).read_bytes()


def test_it_is_the_mean_with_noise_of_the_given_size():
    rows = _rows()
    errors = [
        private_row_mean(rows, noise_multiplier=NOISE, public_size=100, noise=SecureNoise()).double() * 100
        - rows.double().sum(0)
        for _ in range(300)
    ]
    assert torch.stack(errors).std() == pytest.approx(NOISE, rel=0.1)


def test_a_mean_that_nobody_has_seen_may_be_drawn_again_and_one_that_was_logged_may_not(run):
    folder, _ = run
    _released(run)
    (folder.private / MEAN).unlink()
    with pytest.raises(DataError, match="missing though it was released"):
        _released(run)


def test_another_mean_than_the_released_one_is_refused(run):
    folder, _ = run
    _released(run)
    content = bytearray((folder.private / MEAN).read_bytes())
    content[-1] ^= 1
    (folder.private / MEAN).write_bytes(bytes(content))
    with pytest.raises(DataError, match="is not the mean that was released"):
        _released(run)


def test_a_seed_repeats_it_and_its_noise_is_not_that_of_training(run):
    folder, _ = run
    first = _released(run, seed=7)
    (folder.private / MEAN).unlink()
    assert torch.equal(first, _released(run, seed=7))
    training = private_row_mean(_rows(), noise_multiplier=NOISE, public_size=100, noise=SeededNoise(7))
    assert not torch.allclose(first, training)


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_one_record_moves_the_sum_by_one_at_most(broken: float):
    rows = _rows().float()
    for extra in (torch.full((1, 4), 1e30), torch.full((1, 4), broken), torch.tensor([[0.0, 3.0, 0.0, 0.0]])):
        sums = [
            private_row_mean(each, noise_multiplier=1e-3, public_size=1, noise=SeededNoise(1)).double()
            for each in (rows, torch.cat([rows, extra]))
        ]
        moved = (sums[1] - sums[0]).norm()
        assert moved <= 1 + 1e-4
        assert (moved < 1e-3) == bool(extra.isnan().any() or extra.isinf().any())
