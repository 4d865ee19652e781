from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from sluice._base.errors import DataError, InputError
from sluice.data.fingerprint import fingerprint
from sluice.runs.folder import RunFolder, configuration_hash

CONFIG = {"data": "digits", "releases": 10, "bound": 1.5}

HOLD_THE_LOCK = """
import sys
from sluice.runs.folder import RunFolder
folder = RunFolder.open(sys.argv[1])
print("locked", flush=True)
sys.stdin.read()
"""

HOLD_AND_FORK = """
import os, sys, time
from sluice.runs.folder import RunFolder
folder = RunFolder.open(sys.argv[1])
if os.fork() == 0:
    print(os.getpid(), flush=True)  # the worker speaks for itself: by then it has let go of the lock
    time.sleep(60)
    os._exit(0)
sys.stdin.read()
"""


def test_a_run_folder_separates_public_from_private(tmp_path):
    with RunFolder.create(tmp_path / "run", config=CONFIG) as folder:
        assert stat.S_IMODE(folder.private.stat().st_mode) == 0o700
        assert sorted(path.name for path in folder.public.iterdir()) == ["config.json"]
        umask = os.umask(0o022)
        os.umask(umask)
        assert stat.S_IMODE(folder.config_path.stat().st_mode) == 0o666 & ~umask
    with RunFolder.open(tmp_path / "run") as again:
        assert again.config == CONFIG
        assert again.config_hash == configuration_hash(CONFIG)


def test_a_private_folder_that_was_opened_up_is_closed_again(tmp_path):
    RunFolder.create(tmp_path / "run", config=CONFIG).close()
    (tmp_path / "run" / "private").chmod(0o755)
    with RunFolder.open(tmp_path / "run") as folder:
        assert stat.S_IMODE(folder.private.stat().st_mode) == 0o700


def test_a_used_folder_is_refused_and_untouched(tmp_path):
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(InputError, match="not an empty folder"):
        RunFolder.create(tmp_path, config=CONFIG)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_looking_changes_nothing_and_needs_no_private_part(tmp_path):
    RunFolder.create(tmp_path / "run", config=CONFIG).close()
    (tmp_path / "run" / "private" / "lock").unlink()
    (tmp_path / "run" / "private").rmdir()
    assert RunFolder.look(tmp_path / "run").config == CONFIG
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["public"]


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b'{"a": NaN}', b'{"a": 1, "a": 2}', b"\xff", b"[" * 100_000])
def test_a_damaged_configuration_is_an_error(tmp_path, content):
    RunFolder.create(tmp_path / "run", config=CONFIG).close()
    (tmp_path / "run" / "public" / "config.json").write_bytes(content)
    with pytest.raises(DataError, match=r"config\.json"):
        RunFolder.open(tmp_path / "run")


@pytest.mark.parametrize("config", [{"a": float("nan")}, {"a": object()}, {"a": {1, 2}}])
def test_a_configuration_that_is_not_plain_json_is_refused_before_anything_is_made(tmp_path, config):
    with pytest.raises(InputError, match="config is not allowed"):
        RunFolder.create(tmp_path / "run", config=config)
    assert not (tmp_path / "run").exists()


def test_no_run_folder(tmp_path):
    with pytest.raises(InputError, match=r"not a run folder"):
        RunFolder.open(tmp_path / "missing")


def test_the_configuration_hash_does_not_depend_on_spelling():
    assert configuration_hash({"a": 1, "b": 2}) == configuration_hash({"b": 2, "a": 1})
    assert configuration_hash({"a": 1}) != configuration_hash({"a": 2})


def start(program: str, folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", program, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def test_a_second_process_is_refused_by_name_until_the_first_is_killed(tmp_path):
    RunFolder.create(tmp_path / "run", config=CONFIG).close()
    with start(HOLD_THE_LOCK, tmp_path / "run") as process:
        assert process.stdout.readline() == "locked\n"
        with pytest.raises(InputError, match=f"run is in use by process {process.pid}:"):
            RunFolder.open(tmp_path / "run")
        process.kill()
        process.wait()
    RunFolder.open(tmp_path / "run").close()


def test_a_worker_that_outlives_its_killed_parent_does_not_keep_the_lock(tmp_path):
    RunFolder.create(tmp_path / "run", config=CONFIG).close()
    with start(HOLD_AND_FORK, tmp_path / "run") as process:
        worker = int(process.stdout.readline())
        try:
            process.kill()
            process.wait()
            os.kill(worker, 0)
            RunFolder.open(tmp_path / "run").close()
        finally:
            os.kill(worker, 9)


@pytest.mark.parametrize(("code", "remedy"), [(errno.ENOSPC, "free some space"), (errno.EROFS, "read-only")])
@pytest.mark.parametrize("call", ["fsync", "open", "mkdir"])
def test_a_disk_that_cannot_be_written_is_explained(tmp_path, monkeypatch, code, remedy, call):
    def fail(*arguments: object, **options: object) -> int:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, call, fail)
    with pytest.raises(DataError, match=f"cannot .*{os.strerror(code)}.*{remedy}"):
        RunFolder.create(tmp_path / "run", config=CONFIG)
    monkeypatch.undo()
    assert not list(tmp_path.rglob("config.json"))
    assert not list(tmp_path.rglob("*.partial"))


class Plain:
    def __init__(self, records: list[object]) -> None:
        self.records = records

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, index: int) -> object:
        return self.records[index]


RECORDS = [(torch.arange(4.0) + k, k % 2) for k in range(5)]


def test_the_fingerprint_sees_every_change():
    base = fingerprint(Plain(RECORDS))
    assert fingerprint(Plain(list(RECORDS))) == base
    changed = [
        RECORDS[:-1],
        RECORDS[::-1],
        [*RECORDS[:4], (RECORDS[4][0] + 1e-6, RECORDS[4][1])],
        [*RECORDS[:4], (RECORDS[4][0], 1 - RECORDS[4][1])],
        [(x.double(), y) for x, y in RECORDS],
        [(x.reshape(2, 2), y) for x, y in RECORDS],
    ]
    assert len({base, *(fingerprint(Plain(records)) for records in changed)}) == len(changed) + 1


def test_the_fingerprint_takes_all_kinds_of_records():
    kinds = [
        {"text": "é", "ids": np.arange(3)},
        [b"raw", None, True],
        (torch.zeros(0), torch.ones(2, dtype=torch.bfloat16), np.float32(1.5)),
    ]
    assert len(fingerprint(Plain(kinds))) == 64
    with pytest.raises(InputError, match=r"examples\[0\] holds a set"):
        fingerprint(Plain([{1, 2}]))


def test_data_in_batches_is_hashed_by_value():
    from sluice.data.examples import TensorExamples

    def examples(last: int) -> TensorExamples:
        inputs = torch.zeros(5000, 2, dtype=torch.uint8)
        inputs[-1, 0] = last
        return TensorExamples(inputs, torch.zeros(5000), lambda batch: batch.float())

    assert fingerprint(examples(0)) == fingerprint(examples(0)) != fingerprint(examples(1))


def test_a_run_that_has_lost_the_fingerprint_of_its_data_takes_no_data(tmp_path):
    with RunFolder.create(tmp_path / "run", config=CONFIG) as folder:
        folder.check_data(fingerprint(Plain(RECORDS)))
        folder.fingerprint_path.unlink()
        folder.check_data(fingerprint(Plain(RECORDS)))  # nothing was released: it may begin
        folder.ledger_path.touch()
        folder.check_data(fingerprint(Plain(RECORDS)))
        folder.fingerprint_path.unlink()
        with pytest.raises(DataError, match=r"data\.sha256 is missing though the run had begun.*restore it"):
            folder.check_data(fingerprint(Plain(RECORDS[1:])))
        assert not folder.fingerprint_path.exists()


def test_changed_data_is_refused_and_the_fingerprint_stays_private(tmp_path):
    with RunFolder.create(tmp_path / "run", config=CONFIG) as folder:
        folder.check_data(fingerprint(Plain(RECORDS)))
        folder.check_data(fingerprint(Plain(RECORDS)))
        with pytest.raises(DataError, match="training data is not what") as refusal:
            folder.check_data(fingerprint(Plain(RECORDS[1:])))
        known = fingerprint(Plain(RECORDS))
        assert known not in str(refusal.value)
        assert fingerprint(Plain(RECORDS[1:])) not in str(refusal.value)
        assert known in folder.fingerprint_path.read_text()
        assert folder.fingerprint_path.parent == folder.private
        assert not any(known.encode() in path.read_bytes() for path in folder.public.iterdir())
