"""What `sluice train` says, and leaves, when a run is interrupted, its disk fails or its folder was tampered with."""

from __future__ import annotations

import errno
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sluice.cli import main
from sluice.cli.train_output import Screen
from sluice.experiments import judge
from sluice.experiments import run as training
from sluice.runs import public_files as publication
from sluice.runs.folder import RunFolder
from sluice.runs.ledger import read_ledger
from sluice.runs.verify import verify_run
from sluice.training import keeping

RELEASES = 6
UNSEEDED = [
    "train", "--releases", str(RELEASES), "--noise-multiplier", "2", "--accountant", "rdp", "--evaluate-every", "4",
    "--batch-size", "64",
]  # fmt: skip
SEEDED = [*UNSEEDED, "--seed", "3"]


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def sluice(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    out, err = capsys.readouterr()
    return int(stop.value.code or 0), out, err


def contents(path: Path) -> dict[str, bytes]:
    return {str(file.relative_to(path)): file.read_bytes() for file in sorted(path.rglob("*")) if file.is_file()}


def stopped(arguments: list[str], name: str, capsys: Any, monkeypatch: pytest.MonkeyPatch, *, at: int = 3) -> Path:
    """A run that Ctrl-C stopped after a release."""
    original = Screen.report

    def report(self: Screen, progress: Any) -> None:
        original(self, progress)
        if progress.release == at:
            os.kill(os.getpid(), signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(Screen, "report", report)
        code, _, err = sluice([*arguments, "--run", name], capsys)
    assert code == 130
    assert err.endswith(f"sluice: interrupted. Resume with: sluice train --resume runs/{name}\n")
    return Path("runs") / name


def refused(arguments: list[str], run: Path, capsys: Any) -> str:
    """The message of a command that fails; it changes nothing in the run."""
    before = contents(run)
    code, out, err = sluice(arguments, capsys)
    assert code == 2
    assert "Result" not in out
    lines = [line for line in err.splitlines() if not line.startswith("release ")]
    assert len(lines) <= 2
    assert "Traceback" not in err
    after = contents(run)
    assert after.pop("private/lock", b"") is not None
    before.pop("private/lock", None)
    assert after == before
    return " ".join(lines)


PLACES = [
    (keeping, "draft_checkpoint"),
    (judge, "share_right"),
    (publication, "write_certificate"),
    (training, "encoded_model"),
    (RunFolder, "check_data"),
]


@pytest.mark.parametrize(("owner", "name"), PLACES, ids=[name for _, name in PLACES])
def test_ctrl_c_in_every_phase(owner, name, capsys, monkeypatch):
    """Seeded, so that the end can be compared; twice in the same phase, the second time while resuming."""

    def interrupted(*args: Any, **options: Any) -> Any:
        os.kill(os.getpid(), signal.SIGINT)
        return original(*args, **options)

    sluice([*SEEDED, "--run", "whole"], capsys)
    original = getattr(owner, name)
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, interrupted)
        assert sluice([*SEEDED, "--run", "run"], capsys)[0] == 130
        assert sluice(["train", "--resume", "run"], capsys)[0] == 130
    assert sluice(["train", "--resume", "run"], capsys)[0] == 0
    assert contents(Path("runs/run/public")) == contents(Path("runs/whole/public"))


def test_ctrl_c_costs_nothing_where_noise_is_secure(capsys, monkeypatch):
    run = stopped(UNSEEDED, "run", capsys, monkeypatch)
    code, out, _ = sluice(["train", "--resume", "run"], capsys)
    assert code == 0
    assert "Note:" not in out
    assert f"{RELEASES} of {RELEASES}" in out
    assert verify_run(run).holds


@pytest.mark.parametrize(("call", "code"), [*((call, errno.ENOSPC) for call in (2, 6, 9, 16, 20, 33)), (11, errno.EIO)])
def test_a_disk_that_fails_is_explained_and_resuming_goes_on(call, code, capsys, monkeypatch):
    sluice([*SEEDED, "--run", "whole"], capsys)
    original, calls = os.fsync, 0

    def failing(descriptor: int) -> None:
        nonlocal calls
        calls += 1
        if calls >= call:
            raise OSError(code, os.strerror(code))
        original(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", failing)
        status, _, err = sluice([*SEEDED, "--run", "run"], capsys)
    assert status == 2
    last = err.splitlines()[-1]
    assert last.startswith("sluice: cannot ")
    assert os.strerror(code) in last
    if code == errno.ENOSPC:
        assert "free some space and resume" in last
    assert not list(Path("runs/run").rglob("*.partial"))
    again = ["train", "--resume", "run"] if Path("runs/run/public/config.json").exists() else [*SEEDED, "--run", "run"]
    assert sluice(again, capsys)[0] == 0
    assert contents(Path("runs/run/public")) == contents(Path("runs/whole/public"))


@pytest.mark.parametrize("call", ["mkdir", "open"])
def test_a_read_only_place_is_explained_and_left_alone(call, capsys, monkeypatch, tmp_path):
    original = getattr(os, call)

    def read_only(path: Any, *args: Any, **options: Any) -> Any:
        writes = call == "mkdir" or args[0] & (os.O_WRONLY | os.O_RDWR)
        if writes and "runs" in str(path):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
        return original(path, *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(os, call, read_only)
        code, _, err = sluice([*SEEDED, "--run", "new"], capsys)
    assert code == 2
    assert "Read-only file system" in err
    assert "copy the folder" in err or "choose another" in err
    assert not list(tmp_path.rglob("config.json"))
    if call == "open":
        run = stopped(SEEDED, "run", capsys, monkeypatch)
        with monkeypatch.context() as patch:
            patch.setattr(os, call, read_only)
            assert "Read-only file system" in refused(["train", "--resume", "run"], run, capsys)
        assert sluice(["train", "--resume", "run"], capsys)[0] == 0


@pytest.mark.skipif(os.geteuid() == 0, reason="nothing is read-only for the administrator")
def test_a_folder_without_permission_is_refused(capsys, monkeypatch):
    run = stopped(SEEDED, "run", capsys, monkeypatch)
    (run / "public" / "ledger.jsonl").chmod(0o400)
    assert "fix the permissions" in refused(["train", "--resume", "run"], run, capsys)
    Path("shut").mkdir(mode=0o500)
    code, _, err = sluice([*SEEDED, "--run", "shut/run"], capsys)
    assert code == 2
    assert "fix the permissions" in err


def test_a_run_in_use_is_refused(capsys, monkeypatch):
    run = stopped(SEEDED, "run", capsys, monkeypatch)
    with RunFolder.open(run):
        message = refused(["train", "--resume", "run"], run, capsys)
    assert f"in use by process {os.getpid()}" in message


def test_other_records_are_refused(capsys, monkeypatch):
    chance = np.random.default_rng(1)
    records = {"x": chance.normal(size=(300, 5)).astype(np.float32), "y": chance.integers(0, 2, 300)}
    np.savez("own.npz", **records)
    run = stopped([*SEEDED, "--dataset", "own.npz"], "run", capsys, monkeypatch)
    np.savez("own.npz", **records | {"x": records["x"] + np.float32(1e-3)})
    assert "the training data is not what runs/run began with" in refused(["train", "--resume", "run"], run, capsys)
    np.savez("own.npz", **records)
    assert sluice(["train", "--resume", "run"], capsys)[0] == 0


def test_a_checkpoint_of_another_configuration_is_refused(capsys, monkeypatch):
    run = stopped(SEEDED, "run", capsys, monkeypatch)
    other = stopped([*SEEDED, "--lr", "0.01"], "other", capsys, monkeypatch)
    newest = max((other / "private" / "checkpoints").glob("*.checkpoint"))
    shutil.copy(newest, run / "private" / "checkpoints" / newest.name)
    message = refused(["train", "--resume", "run"], run, capsys)
    assert "belongs to another configuration" in message


def test_a_damaged_checkpoint_is_passed_over_with_a_note(capsys, monkeypatch):
    run = stopped(UNSEEDED, "run", capsys, monkeypatch)
    newest = max((run / "private" / "checkpoints").glob("*.checkpoint"))
    newest.write_bytes(newest.read_bytes()[:-9])
    code, out, _ = sluice(["train", "--resume", "run"], capsys)
    assert code == 0
    text = " ".join(out.split())
    assert "release-0000000003.checkpoint is damaged" in text
    assert "Resuming from the one before, which contains 0 releases. The journal has 3 more." in text
    assert "Releases lost" not in text
    assert read_ledger(run / "public" / "ledger.jsonl").spent == RELEASES
    assert verify_run(run).holds


@pytest.mark.parametrize("damage", ["cut", "flipped", "zeros", "missing"])
def test_a_damaged_entry_of_the_journal_costs_what_follows_it(damage, capsys, monkeypatch):
    run = stopped(UNSEEDED, "run", capsys, monkeypatch)
    newest = max((run / "private" / "checkpoints").glob("*.checkpoint"))
    newest.unlink()
    second = run / "private" / "checkpoints" / "slot-0001.journal"
    content = second.read_bytes()
    if damage == "missing":
        second.unlink()
    else:
        damaged = {"cut": content[:-9], "flipped": content[:-9] + b"flipped!?", "zeros": bytes(len(content))}
        second.write_bytes(damaged[damage])
    code, out, _ = sluice(["train", "--resume", "run"], capsys)
    assert code == 0
    assert "Releases lost when the run was interrupted, which stay charged: 2" in " ".join(out.split())
    assert read_ledger(run / "public" / "ledger.jsonl").spent == RELEASES
    assert verify_run(run).holds
    assert not list((run / "private" / "checkpoints").glob("*.journal"))


def test_two_damaged_checkpoints_end_the_run(capsys, monkeypatch):
    run = stopped(UNSEEDED, "run", capsys, monkeypatch)
    for file in (run / "private" / "checkpoints").iterdir():
        file.write_bytes(b"")
    assert "no checkpoint in runs/run/private/checkpoints can be read" in refused(
        ["train", "--resume", "run"], run, capsys
    )
    shutil.rmtree(run / "private" / "checkpoints")
    assert "holds no checkpoint: the run cannot be resumed" in refused(["train", "--resume", "run"], run, capsys)


def test_a_missing_ledger_is_not_begun_anew(capsys, monkeypatch):
    run = stopped(UNSEEDED, "run", capsys, monkeypatch)
    (run / "public" / "ledger.jsonl").unlink()
    assert "what it spent is unknown" in refused(["train", "--resume", "run"], run, capsys)


def test_a_shortened_ledger_is_refused(capsys, monkeypatch):
    run = stopped(UNSEEDED, "run", capsys, monkeypatch)
    ledger = run / "public" / "ledger.jsonl"
    ledger.write_bytes(b"".join(ledger.read_bytes().splitlines(keepends=True)[:-1]))
    assert "entries were removed from the ledger" in refused(["train", "--resume", "run"], run, capsys)


def test_a_torn_line_is_counted_and_noted(capsys, monkeypatch):
    run = stopped(UNSEEDED, "run", capsys, monkeypatch)
    with (run / "public" / "ledger.jsonl").open("ab") as stream:
        stream.write(b'{"hash":"12')
    code, out, _ = sluice(["train", "--resume", "run"], capsys)
    assert code == 0
    assert "release 4 is counted as spent though it was not applied" in " ".join(out.split())
    found = read_ledger(run / "public" / "ledger.jsonl")
    assert (found.spent, found.recovered) == (RELEASES, 1)
    assert verify_run(run).holds


def test_a_run_that_never_began_says_how_to_start_it(capsys):
    (Path("runs/run/private")).mkdir(parents=True)
    (Path("runs/run/public")).mkdir()
    Path("runs/run/public/.config.json.abc.partial").write_bytes(b"{")
    message = refused(["train", "--resume", "run"], Path("runs/run"), capsys)
    assert "nothing was spent. Start it again" in message
    assert sluice([*SEEDED, "--run", "run"], capsys)[0] == 0
    assert verify_run(Path("runs/run")).holds
    assert not list(Path("runs").rglob("*.partial"))


def test_a_certificate_of_a_part_does_not_end_a_run(capsys, monkeypatch):
    """It was written by hand while the run was stopped; the run was stopped again just before its own."""
    run = stopped(SEEDED, "run", capsys, monkeypatch)
    assert sluice(["certificate", str(run)], capsys)[0] == 0

    def interrupted(folder: RunFolder) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(publication, "write_certificate", interrupted)
        assert sluice(["train", "--resume", "run"], capsys)[0] == 130
    assert not verify_run(run).holds
    assert sluice(["train", "--resume", "run"], capsys)[0] == 0
    assert verify_run(run).holds
