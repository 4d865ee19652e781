"""Runs that are kept and resumed by their engine."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F

from sluice._base.errors import DataError, InputError, SluiceError
from sluice.runs.ledger import read_ledger
from sluice.runs.privacy_spent import spending
from small_runs import GATE, Run, same


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_a_seeded_run_continues_bit_for_bit_from_its_state(optimizer):
    options = {
        "optimizer": optimizer,
        "gate": GATE,
        "ema_decay": 0.9,
        "lr_scheduler": lambda inner: torch.optim.lr_scheduler.StepLR(inner, 3, 0.5),
    }
    whole = Run(**options).fast()
    first = Run(**options)
    for number in first.engine.releases(F.cross_entropy):
        if number == 7:
            break
    state = copy.deepcopy(first.engine.state_dict())
    second = Run(**options)
    second.engine.load_state_dict(state)
    second.fast()
    assert torch.equal(second.weights(), whole.weights())
    assert same(second.engine.state_dict(), whole.engine.state_dict())


def test_lost_releases_stay_paid_for():
    run = Run(releases=10)
    for number in run.engine.releases(F.cross_entropy):
        if number == 4:
            break
    again = Run(releases=10)
    again.engine.load_state_dict(run.engine.state_dict(), lost=2)
    assert again.engine.get_epsilon(1e-5) > run.engine.get_epsilon(1e-5)
    again.fast()
    assert again.engine.released == 8
    assert again.engine.get_epsilon(1e-5) == Run(releases=10).fast().engine.get_epsilon(1e-5)


@pytest.mark.parametrize("seed", [3, None], ids=["seeded", "secure"])
def test_a_library_run_survives_a_restart_with_its_ledger(tmp_path, seed):
    """Four releases, a checkpoint, two more releases, and then the process is gone."""
    options = {"seed": seed, "releases": 10, "gate": GATE, "ledger": tmp_path / "ledger.jsonl"}
    first = Run(**options)
    for number in first.engine.releases(F.cross_entropy):
        if number == 4:
            first.engine.save(tmp_path / "checkpoints")
        if number == 6:
            break
    first.close()
    assert read_ledger(tmp_path / "ledger.jsonl").spent == 6

    second = Run(**options)
    assert second.engine.load(tmp_path / "checkpoints") is None
    assert second.engine.released == 4
    second.fast()
    contents = read_ledger(tmp_path / "ledger.jsonl")
    assert contents.spent == 10
    # Seeded noise repeats, so releases 5 and 6 are the logged ones. Fresh noise makes them new: two are lost.
    assert second.engine.released == (10 if seed == 3 else 8)
    assert spending(contents).epsilon == pytest.approx(second.engine.get_epsilon(1e-5))
    if seed == 3:
        assert torch.equal(second.weights(), Run(seed=3, releases=10, gate=GATE).fast().weights())


def test_a_ledger_without_its_checkpoint_counts_everything_as_lost(tmp_path):
    options = {"seed": None, "releases": 5, "ledger": tmp_path / "ledger.jsonl"}
    first = Run(**options)
    for number in first.engine.releases(F.cross_entropy):
        if number == 3:
            break
    first.close()
    second = Run(**options).fast()
    assert second.engine.released == 2
    assert read_ledger(tmp_path / "ledger.jsonl").spent == 5


def test_a_ledger_or_checkpoint_of_another_mechanism_is_refused(tmp_path):
    first = Run(releases=5, ledger=tmp_path / "ledger.jsonl")
    first.engine.save(tmp_path / "checkpoints")
    first.close()
    with pytest.raises(DataError, match="ledger of another mechanism"):
        Run(releases=6, ledger=tmp_path / "ledger.jsonl")
    with pytest.raises(SluiceError, match="configuration"):
        Run(releases=6).engine.load(tmp_path / "checkpoints")
    with pytest.raises(InputError, match="holds no checkpoint"):
        Run(releases=6).engine.load(tmp_path / "nothing")


@pytest.mark.parametrize(("first_seed", "then_seed"), [(None, 3), (3, None)])
def test_a_ledger_is_not_continued_with_another_kind_of_noise(tmp_path, first_seed, then_seed):
    # The ledger of secure noise would certify releases of a known seed, and count none of those that it took for repeated ones.
    options = {"releases": 5, "ledger": tmp_path / "ledger.jsonl"}
    first = Run(seed=first_seed, **options)
    for number in first.engine.releases(F.cross_entropy):
        if number == 3:
            break
    first.close()
    with pytest.raises(DataError, match="noise, and this engine's is"):
        Run(seed=then_seed, **options)
    Run(seed=first_seed, **options).close()  # the refusal left the ledger unlocked
