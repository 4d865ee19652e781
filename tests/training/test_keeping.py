"""What a folder keeps of a run leads back to the very state that the run was in."""

from __future__ import annotations

import copy
import errno
import itertools
import os
import time
from concurrent import futures
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler
from torch.utils.data import TensorDataset

from sluice._base.errors import DataError, InputError
from sluice.accounting.matrix.strategy import BandedToeplitz, BufferedLinearToeplitz
from sluice.mechanism.base import Mechanism
from sluice.mechanism.selective_release import SelectiveRelease
from sluice.methods.matrix import MatrixMechanism
from sluice.runs import checkpoint, record_writer
from sluice.runs.checkpoint import checkpoint_releases
from sluice.runs.journal import Journal
from sluice.runs.ledger import Ledger, read_ledger
from sluice.training import keeping
from sluice.training.engine import PrivacyEngine
from sluice.training.options import TrainingOptions
from small_mechanisms import SIZE, plain, small_mechanisms

RELEASES = 14


def matrix(strategy: Any, batches: str = "poisson") -> MatrixMechanism:
    return MatrixMechanism(
        strategy=strategy,
        batches=batches,
        groups=1 if batches == "poisson" else 4,
        sample_rate=0.5,
        expected_batch_size=20.0 if batches == "poisson" else 5.0,
        max_grad_norm=1.0,
        noise_multiplier=2.0,
        releases=RELEASES,
    )


MECHANISMS: dict[str, Mechanism] = {
    **small_mechanisms(RELEASES, rho=10.0, budgeted=RELEASES),
    "matrix": matrix(BandedToeplitz(diagonals=(1.0, 0.5, 0.3, 0.1)), "cyclic-poisson"),
    "matrix, long memory": matrix(BandedToeplitz(diagonals=tuple(0.8**d for d in range(12)))),
    "matrix, buffers": matrix(BufferedLinearToeplitz(decay=(0.8, 0.3), scale=(0.2, 0.1))),
}
REPLAYED = [name for name in MECHANISMS if name != "non-private"]


def sgd(net: nn.Module) -> tuple[torch.optim.Optimizer, LRScheduler]:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    return optimizer, CosineAnnealingLR(optimizer, RELEASES)


def adam(net: nn.Module) -> tuple[torch.optim.Optimizer, None]:
    return torch.optim.Adam(net.parameters(), lr=0.1, amsgrad=True), None


class Run:
    """A small run with secure noise, a ledger, averaged weights and a folder."""

    def __init__(
        self, mechanism: Mechanism, folder: Path, *, rule: Any = None, ledger: bool = True, seed: int | None = None
    ) -> None:
        generator = torch.Generator().manual_seed(0)
        data = TensorDataset(torch.randn(SIZE, 4, generator=generator), torch.arange(SIZE) % 3)
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
        # DPAGD moves weights past the optimizer, of which schedules complain.
        optimizer, schedule = (rule or (adam if mechanism is MECHANISMS["dpagd"] else sgd))(self.net)
        self.folder = folder
        self.ledger = folder.parent / "ledger.jsonl"
        self.engine = PrivacyEngine(seed=seed)
        self.engine.make_private_by(
            mechanism,
            module=self.net,
            optimizer=optimizer,
            data_loader=data,
            options=TrainingOptions(lr_scheduler=schedule, ema_decay=0.9, ledger=self.ledger if ledger else None),
        )
        self.optimizer = optimizer

    def kept(self) -> Run:
        self.engine.keep_in(self.folder)
        return self

    def train(self, releases: int = 10**6) -> Run:
        list(itertools.islice(self.engine.releases(F.cross_entropy), releases))
        return self

    def state(self) -> dict[str, Any]:
        return copy.deepcopy(self.engine.state_dict())


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(same(*pair) for pair in zip(a, b, strict=True))
    return bool(a == b)


@pytest.fixture(params=[1, 3, 64], ids=["often", "sometimes", "rarely"])
def checkpoints(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Entries between two checkpoints."""
    monkeypatch.setattr(keeping, "_MOST_ENTRIES", request.param)
    return request.param


def after_a_crash(run: Run, mechanism: Mechanism, **options: Any) -> Run:
    """Another process: what the first had in memory is gone, and its locks with it."""
    run.engine.close()
    return Run(mechanism, run.folder, **options)


@pytest.mark.parametrize(("name", "rule"), [*((name, None) for name in MECHANISMS), ("dpsgd", adam), ("matrix", adam)])
def test_the_state_comes_back_bit_for_bit(name, rule, checkpoints, tmp_path):
    mechanism = MECHANISMS[name]
    run = Run(mechanism, tmp_path / "kept", rule=rule).kept().train(7)
    before = run.state()
    again = after_a_crash(run, mechanism, rule=rule)
    assert again.engine.load(again.folder) is None
    assert same(again.state(), before)
    again.kept().train(3)
    before = again.state()
    third = after_a_crash(again, mechanism, rule=rule)
    assert third.engine.load(third.folder) is None
    assert same(third.state(), before)
    third.kept().train()
    assert third.engine.released == read_ledger(third.ledger).spent <= RELEASES
    third.engine.close()


@pytest.mark.parametrize("name", REPLAYED)
def test_lost_releases_are_replayed_as_lost(name, checkpoints, tmp_path, monkeypatch):
    """A release is lost between entries of the journal; what is in the state of that comes back too."""
    mechanism = MECHANISMS[name]
    run = Run(mechanism, tmp_path / "kept").kept().train(3)
    with monkeypatch.context() as patch:
        patch.setattr(Journal, "append", _fail)
        with pytest.raises(OSError, match="planted"):
            run.train(1)
    second = after_a_crash(run, mechanism)
    second.engine.load(second.folder)
    assert (second.engine.released, second.engine._executor.spent) == (3, 4)
    second.kept().train(2)
    context = second.engine._executor.context
    log = context.before_release
    object.__setattr__(context, "before_release", lambda number: (log(number), _fail()))
    with pytest.raises(OSError, match="planted"):
        second.train(1)
    object.__setattr__(context, "before_release", log)
    second.train(2)
    before = second.state()
    assert (before["releases"]["released"], before["releases"]["spent"]) == (7, 9)
    third = after_a_crash(second, mechanism)
    third.engine.load(third.folder)
    assert same(third.state(), before)
    third.engine.close()


def _fail(*args: Any, **options: Any) -> Any:
    raise OSError("planted")


@pytest.mark.parametrize("name", REPLAYED)
@pytest.mark.parametrize("place", ["append", "update"])
def test_a_crash_costs_one_release_at_most(name, place, checkpoints, tmp_path, monkeypatch):
    mechanism, made = MECHANISMS[name], 0
    run = Run(mechanism, tmp_path / "kept").kept()
    owner = Journal if place == "append" else type(run.engine._executor)
    for crash in range(1, 4):
        run.train(2)
        made = run.engine.released
        with monkeypatch.context() as patch, pytest.raises(OSError, match="planted"):
            patch.setattr(owner, place, _fail)
            run.train(1)
        run = after_a_crash(run, mechanism)
        run.engine.load(run.folder)
        assert run.engine.released == (made if place == "append" else made + 1)
        assert read_ledger(run.ledger).spent == run.engine.released + (crash if place == "append" else 0)
        run.kept()
    run.engine.close()


@pytest.mark.parametrize("name", ["dpsgd", "matrix", "matrix, long memory"])
def test_the_spare_and_the_journal_lead_to_the_same_state(name, checkpoints, tmp_path):
    mechanism = MECHANISMS[name]
    run = Run(mechanism, tmp_path / "kept").kept().train(9)
    before = run.state()
    run.engine.close()
    max(run.folder.glob("*.checkpoint")).write_bytes(b"")
    again = after_a_crash(run, mechanism)
    if checkpoints == 64:
        with pytest.raises(DataError, match="no checkpoint"):
            again.engine.load(again.folder)
        again.engine.close()
        return
    note = again.engine.load(again.folder)
    assert note is not None
    assert f"The journal has {9 - min(checkpoint_releases(run.folder))} more." in note
    assert same(again.state(), before)
    again.engine.close()


def test_rows_that_are_damaged_count_as_lost(tmp_path, monkeypatch):
    monkeypatch.setattr(keeping, "_MOST_ENTRIES", 2)
    mechanism = MECHANISMS["matrix"]
    run = Run(mechanism, tmp_path / "kept").kept().train(8)
    before = run.state()
    run.engine.close()
    journal = Journal(run.folder, config_hash=run.engine._mechanism_hash())
    damaged = journal._path(next(slot for slot, release in journal._slots.items() if release == 7))
    damaged.write_bytes(damaged.read_bytes()[:-1])
    again = after_a_crash(run, mechanism)
    note = again.engine.load(again.folder)
    assert note is not None
    assert "1 entries of the journal are damaged" in note
    assert again.engine.released == 8
    found, wanted = (state["releases"]["correlated"] for state in (again.state(), before))
    assert [row is None for row in found["raw_past"]] == [False, True, False]
    assert same(found["raw_past"][::2], wanted["raw_past"][::2])
    again.kept().train()
    assert again.engine.released == RELEASES
    again.engine.close()


def test_a_checkpoint_does_not_repeat_what_the_journal_has(tmp_path, monkeypatch):
    monkeypatch.setattr(keeping, "_MOST_ENTRIES", 4)
    run = Run(MECHANISMS["matrix, long memory"], tmp_path / "kept").kept().train(12)
    run.engine.close()
    brief = max(run.folder.glob("*.checkpoint")).stat().st_size
    slots = len(list(run.folder.glob("*.journal")))
    assert slots <= 2 * 4 + 11
    run.engine._keeping._keeper.finish()
    assert max(run.folder.glob("*.checkpoint")).stat().st_size > 2 * brief
    assert not list(run.folder.glob("*.journal"))
    assert not list(run.folder.glob(".*"))
    run.engine.close()


def test_the_journal_keeps_its_size(tmp_path, monkeypatch):
    monkeypatch.setattr(keeping, "_MOST_ENTRIES", 2)
    run = Run(MECHANISMS["dpsgd"], tmp_path / "kept").kept().train()
    run.engine.close()
    assert len(list(run.folder.glob("*.journal"))) <= 6
    assert len(checkpoint_releases(run.folder)) == 2
    assert {path.stat().st_mode & 0o777 for path in run.folder.iterdir()} == {0o600}
    run.engine.close()


def test_learning_rates_set_by_hand_come_back(tmp_path):
    mechanism = MECHANISMS["dpsgd"]
    run = Run(mechanism, tmp_path / "kept", rule=adam).kept()
    for release in range(5):
        run.optimizer.param_groups[0]["lr"] = 0.1 / (1 + release)
        run.train(1)
    before = run.state()
    again = after_a_crash(run, mechanism, rule=adam)
    assert again.engine.load(again.folder) is None
    assert same(again.state(), before)
    again.engine.close()


def test_weights_that_were_accepted_are_kept(tmp_path):
    mechanism = MECHANISMS["dpsgd"]
    run = Run(mechanism, tmp_path / "kept").kept().train(3)
    with torch.no_grad():
        run.net[0].weight.mul_(0.5)
    run.engine.accept_weights()
    run.train(2)
    before = run.state()
    again = after_a_crash(run, mechanism)
    assert again.engine.load(again.folder) is None
    assert same(again.state(), before)
    again.engine.close()


def test_an_optimizer_that_draws_is_noticed(tmp_path):
    class Shaky(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            super().step()
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.data.add_(torch.randn_like(parameter), alpha=1e-3)

    def shaky(net: nn.Module) -> tuple[torch.optim.Optimizer, None]:
        return Shaky(net.parameters(), lr=0.1), None

    mechanism = MECHANISMS["dpsgd"]
    run = Run(mechanism, tmp_path / "kept", rule=shaky).kept().train(4)
    again = after_a_crash(run, mechanism, rule=shaky)
    assert "did not repeat its steps" in again.engine.load(again.folder)
    assert again.engine.released == 4
    again.engine.close()


def test_another_state_begins_another_history(tmp_path):
    """A state that was loaded by hand does not lead on from the entries that are there."""
    mechanism = MECHANISMS["dpsgd"]
    other = Run(mechanism, tmp_path / "other", ledger=False).train(3)
    run = Run(mechanism, tmp_path / "kept", ledger=False).kept().train(5)
    run.engine.load_state_dict(other.state())
    run.train(2)
    before = run.state()
    assert (before["releases"]["released"], before["releases"]["spent"]) == (5, 7)
    again = after_a_crash(run, mechanism, ledger=False)
    assert again.engine.load(again.folder) is None
    assert same(again.state(), before)


def test_a_seeded_run_goes_on_with_the_noise_that_comes_next(tmp_path):
    """The journal does not tell the place in a seeded stream: beginning it again would repeat noise."""
    mechanism = SelectiveRelease(**plain(RELEASES))
    whole = Run(mechanism, tmp_path / "whole" / "kept", ledger=False, seed=5).train()
    stopped = Run(mechanism, tmp_path / "parts" / "kept", ledger=False, seed=5).kept().train(6)
    stopped.engine.close()
    resumed = Run(mechanism, stopped.folder, ledger=False, seed=5)
    resumed.engine.load(resumed.folder)
    resumed.train()
    assert all(map(torch.equal, whole.net.parameters(), resumed.net.parameters()))


def test_a_folder_that_holds_another_run_is_refused(tmp_path):
    mechanism = MECHANISMS["dpsgd"]
    run = Run(mechanism, tmp_path / "kept").kept().train(2)
    again = after_a_crash(run, mechanism)
    with pytest.raises(InputError, match=r"call engine\.load with it first"):
        again.kept()
    again.engine.close()


def test_the_ordinary_loop_is_kept_too(tmp_path):
    def loop(run: Run, releases: int) -> None:
        net, optimizer, loader = run.engine.ordinary_loop()
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(net(x), y).backward()
            optimizer.step()
            if run.engine.released >= releases:
                break

    mechanism = MECHANISMS["dpsr-cg"]
    run = Run(mechanism, tmp_path / "kept").kept()
    loop(run, 5)
    before = run.state()
    again = after_a_crash(run, mechanism)
    again.engine.load(again.folder)
    assert same(again.state(), before)
    again.kept()
    loop(again, RELEASES)
    assert again.engine.released == RELEASES
    again.engine.close()


def test_the_next_release_is_logged_only_when_the_last_entry_is_on_disk(tmp_path, monkeypatch):
    """What a loss of power can take is what the ledger's last line says, and nothing before it."""
    events: list[str] = []
    flush, append = record_writer.flush_data, Ledger.append_release

    def slowly(descriptor: int) -> None:
        time.sleep(0.02)
        flush(descriptor)
        events.append("flushed")

    def logged(self: Ledger, number: int) -> None:
        events.append(f"logged {number}")
        append(self, number)

    monkeypatch.setattr(record_writer, "flush_data", slowly)
    monkeypatch.setattr(Ledger, "append_release", logged)
    run = Run(MECHANISMS["dpsgd"], tmp_path / "kept").kept()
    events.clear()
    run.train(4)
    run.engine.close()
    assert events == [event for number in range(1, 5) for event in (f"logged {number}", "flushed")]


@pytest.mark.parametrize("what", ["entry", "checkpoint"])
def test_what_goes_wrong_in_the_background_ends_the_run_before_the_next_release(what, tmp_path, monkeypatch):
    mechanism = MECHANISMS["dpsgd"]
    if what == "checkpoint":
        monkeypatch.setattr(keeping, "_MOST_ENTRIES", 3)
    run = Run(mechanism, tmp_path / "kept").kept().train(2)
    run.engine._keeping._keeper._journal.wait()  # only what is written from now on goes wrong

    def full(place: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        owner = record_writer if what == "entry" else checkpoint
        patch.setattr(owner, "flush_data" if what == "entry" else "flush", full)
        run.train(1)
        if what == "checkpoint":
            futures.wait([run.engine._keeping._keeper._saving._job])
        with pytest.raises(DataError, match="free some space"):
            run.train(1)
    before = run.state()
    again = after_a_crash(run, mechanism)
    again.engine.load(again.folder)
    assert read_ledger(run.ledger).spent == 3
    assert again.engine.released == 3
    assert same(again.state()["module"], before["module"])
    again.kept().train()
    assert again.engine.released == RELEASES
    again.engine.close()
