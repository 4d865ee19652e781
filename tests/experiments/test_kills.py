"""Training processes are killed (SIGKILL) at every phase of a run; afterwards nothing is under-counted and every run resumes.

Two kinds of instants: chosen at random over the duration of a run, and enumerated, before and after each call that
changes a file or the weights (half-way through it for the ledger's lines). The default run makes at least 57 kills; with
``-m slow`` there are 300 random ones and every enumerated instant.
"""

from __future__ import annotations

import json
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from child_server import ChildServer
from sluice._base.files import PUBLIC_TIME
from sluice.experiments.run import recorded_run
from sluice.runs.checkpoint import load_checkpoint
from sluice.runs.folder import RunFolder
from sluice.runs.journal import Journal
from sluice.runs.ledger import read_ledger
from sluice.runs.verify import verify_run

RELEASES = 3
TARGET = 2.0
SECURE = {"releases": RELEASES, "epsilon": TARGET, "accountant": "rdp", "evaluate_every": 2, "batch_size": 64}
SEEDED = SECURE | {"seed": 7}


class Server(ChildServer):
    """The process that trains in children and kills them: see kill_server.py."""

    def __init__(self) -> None:
        super().__init__(Path(__file__).with_name("kill_server.py"))

    def train(self, run: Path, settings: dict[str, Any], **order: Any) -> dict[str, Any]:
        """Start the run, or go on with it if it has begun; ``code`` of the answer is -9 if it was killed."""
        answer: dict[str, Any] = self.ask(order | {"run": str(run), "settings": settings, "log": str(log_of(run))})
        assert answer["threads"] == 1, "forking is only safe from a process with one thread"
        assert answer["code"] in (0, -signal.SIGKILL), "training failed: its traceback is on standard error"
        return answer


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.close()


@pytest.fixture(scope="module")
def whole(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A seeded run that nobody killed."""
    path = tmp_path_factory.mktemp("whole") / "run"
    assert server.train(path, SEEDED)["code"] == 0
    return path


@pytest.fixture(scope="module")
def instants(server: Server, tmp_path_factory: pytest.TempPathFactory) -> dict[bool, list[str]]:
    """The names of all instants at which a run can be killed, of a seeded run and of another."""
    folder = tmp_path_factory.mktemp("instants")
    return {
        seeded: server.train(folder / f"run-{seeded}", SEEDED if seeded else SECURE, watch=True)["calls"]
        for seeded in (True, False)
    }


def log_of(run: Path) -> Path:
    """Where the children note what they are about to apply, one line for each update."""
    return run.with_name(f"{run.name}.updates")


def updates_of(run: Path) -> list[str]:
    return log_of(run).read_text().splitlines() if log_of(run).exists() else []


def public_files(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted((path / "public").iterdir())}


def lost_releases(run: Path, *, seeded: bool) -> int:
    """Check a run that was killed, or has ended; how many releases are counted and not in the newest state that is kept."""
    config = run / "public" / "config.json"
    if not config.exists():
        assert not updates_of(run)
        return 0
    folder = RunFolder.look(run)
    if folder.accuracy_path.exists():
        assert all(json.loads(line) for line in folder.accuracy_path.read_text().splitlines())
    if not folder.ledger_path.exists():
        assert not updates_of(run)
        return 0
    spent = read_ledger(folder.ledger_path).spent
    assert spent <= RELEASES
    # With fresh noise each update that was ever applied is another one; a seed repeats the same ones.
    applied = set(updates_of(run))
    assert len(applied) <= spent
    if not seeded:
        assert len(applied) == len(updates_of(run)), "noise was used twice"
    checkpoint = load_checkpoint(folder.checkpoints, config_hash=folder.config_hash)
    if checkpoint is None:
        assert spent == 0
        return 0
    assert checkpoint.note is None
    journal = Journal(folder.checkpoints, config_hash=folder.config_hash)
    kept = checkpoint.release + sum(1 for _ in journal.entries(after=checkpoint.release))
    assert kept <= spent
    return spent - kept


def check_ended(run: Path) -> None:
    result = recorded_run(run).result
    assert result is not None
    assert result.epsilon is not None
    assert result.epsilon <= TARGET
    assert result.releases == RELEASES
    verification = verify_run(run)
    assert verification.holds, verification.checks
    assert not list(run.rglob("*.partial"))
    assert {path.stat().st_mtime for path in (run / "public").iterdir()} == {PUBLIC_TIME}
    assert len(list((run / "private" / "checkpoints").iterdir())) <= 2


def check_same(run: Path, whole: Path, *, torn: bool) -> None:
    """The seeded run ends as the one that nobody killed; a torn line of the ledger stays recorded as such."""
    found, expected = public_files(run), public_files(whole)
    if not torn:
        assert found == expected
    assert found.keys() == expected.keys()
    assert found["model.safetensors"] == expected["model.safetensors"]
    assert found["accuracy.jsonl"] == expected["accuracy.jsonl"]
    assert set(updates_of(run)) == set(updates_of(whole))


def kill_at_random(server: Server, folder: Path, *, kills: int, seeded: bool, whole: Path) -> None:
    settings = SEEDED if seeded else SECURE
    chance = random.Random(f"{kills} {seeded}")
    duration = server.train(folder / "measured", settings)["seconds"]
    done = 0
    for number in range(10 * kills):
        if done >= kills:
            return
        run = folder / f"run-{number}"
        lost = 0
        for _ in range(chance.randint(1, 4)):
            ended = server.train(run, settings, kill_after=chance.uniform(0, 1.05 * duration))["code"] == 0
            done += not ended
            before, lost = lost, lost_releases(run, seeded=seeded)
            assert lost <= (1 if seeded else before + 1)
            if ended:
                break
        server.train(run, settings)
        assert lost_releases(run, seeded=seeded) == (0 if seeded else lost)
        check_ended(run)
        if seeded:
            check_same(run, whole, torn=False)
        else:
            published = read_ledger(run / "public" / "ledger.jsonl").published
            assert list(published) == ["features.json", "accuracy.jsonl", "classes.json", "model.safetensors"]
    raise AssertionError(f"only {done} processes were killed in time")


def kill_at(server: Server, folder: Path, instant: int, *, seeded: bool, whole: Path) -> None:
    settings = SEEDED if seeded else SECURE
    run = folder / f"run-{instant}"
    answer = server.train(run, settings, watch=True, kill_at_call=instant)
    if answer["code"] == 0:
        # How often the disk is waited for varies a little, so a run may end before the last of the instants.
        assert instant - 10 < len(answer["calls"]) < instant
        check_ended(run)
        return
    assert answer["code"] == -signal.SIGKILL
    assert lost_releases(run, seeded=seeded) <= 1
    torn = False
    if (run / "public" / "ledger.jsonl").exists():
        torn = read_ledger(run / "public" / "ledger.jsonl").torn
    assert server.train(run, settings)["code"] == 0
    lost = lost_releases(run, seeded=seeded)
    assert lost <= (0 if seeded else 1)
    check_ended(run)
    if seeded:
        check_same(run, whole, torn=torn)


@pytest.mark.parametrize("seeded", [True, False], ids=["seeded", "secure"])
def test_kills_at_random_instants(server, whole, tmp_path, seeded):
    kill_at_random(server, tmp_path, kills=16, seeded=seeded, whole=whole)


@pytest.mark.slow
@pytest.mark.parametrize("seeded", [True, False], ids=["seeded", "secure"])
def test_many_kills_at_random_instants(server, whole, tmp_path, seeded):
    kill_at_random(server, tmp_path, kills=150, seeded=seeded, whole=whole)


def test_the_instants_cover_all_phases(instants):
    for seeded, names in instants.items():
        assert {
            *("before planned_mechanism", "half of write", "half of pwrite", "after fsync", "after fdatasync"),
            *("before replace", "before apply"),
        } < set(names), seeded
        assert names.count("after apply") == RELEASES
        assert names.count("after replace") > 10
        assert names.count("half of write") >= RELEASES + 1  # lines of the ledger, the published weights' too
    assert instants[False].count("half of pwrite") >= RELEASES + 3


STRIDE = 13
"""Every so many instants in the default run; prime to the number of calls that writing a file takes."""


@pytest.mark.parametrize("seeded", [True, False], ids=["seeded", "secure"])
def test_kills_at_enumerated_instants(server, whole, instants, tmp_path, seeded):
    for instant in range(1, len(instants[seeded]) + 1, STRIDE):
        kill_at(server, tmp_path, instant, seeded=seeded, whole=whole)


def test_kills_around_each_release(server, whole, instants, tmp_path):
    """Where noise is secure, the instants between a release's line in the ledger and its entry are the ones that cost."""
    first = instants[False].index("before apply") + 1
    for instant in range(first - 16, first + 6, 2):
        kill_at(server, tmp_path, instant, seeded=False, whole=whole)


@pytest.mark.slow
@pytest.mark.parametrize("seeded", [True, False], ids=["seeded", "secure"])
def test_kills_at_every_instant(server, whole, instants, tmp_path, seeded):
    for instant in range(1, len(instants[seeded]) + 1):
        kill_at(server, tmp_path, instant, seeded=seeded, whole=whole)
