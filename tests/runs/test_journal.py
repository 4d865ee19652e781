from __future__ import annotations

import errno
import fcntl
import os
import tempfile
import threading
import time
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch

from sluice._base.background import Background
from sluice._base.errors import DataError, InputError
from sluice.runs import record_writer
from sluice.runs.journal import Journal
from sluice.runs.record_writer import RecordWriter
from sluice.runs.records import BLOCK, decode_record, encode_record

CONFIG = "ab" * 32
MAGIC = b"magic\n"


def journal_in(folder: Path) -> Journal:
    return Journal(folder, config_hash=CONFIG)


def written(folder: Path, *releases: int) -> Journal:
    journal = journal_in(folder)
    for release in releases:
        journal.append(release, {"value": torch.full((3,), float(release)), "number": release})
    journal.wait()
    return journal


def numbers(journal: Journal, *, after: int) -> list[int]:
    return [entry["number"] for entry in journal.entries(after=after)]


def record_of(payload: dict[str, Any], *, most_room: int = 1 << 20) -> bytes:
    record = encode_record(MAGIC, payload, config_hash=CONFIG, release=3)
    with tempfile.NamedTemporaryFile() as file:
        RecordWriter(most_room=most_room).write_over(Path(file.name), record)()
        return Path(file.name).read_bytes()


def content_end(record: bytes) -> int:
    """Where the zeros begin that fill up the last block."""
    return len(record.rstrip(b"\0"))


DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (1,), (3,), (2, 3), (4, 0)], ids=str)
def test_tensors_of_all_types_come_back(dtype, shape):
    tensor = torch.arange(1, 1 + torch.Size(shape).numel()).reshape(shape).to(dtype)
    _, found = decode_record(MAGIC, record_of({"before": 1, "t": tensor}), what="it", config_hash=CONFIG)
    assert found["t"].dtype == dtype
    assert found["t"].shape == tensor.shape
    assert torch.equal(found["t"], tensor)


def test_views_and_structures_come_back():
    base = torch.arange(24.0).reshape(4, 6)
    payload = {
        "parts": [base.t(), base[1:3, ::2], base[2, 3]],
        "conjugate": torch.tensor([1 + 2j]).conj(),
        "weight": torch.nn.Parameter(torch.ones(2)),
        "sparse": torch.eye(3).to_sparse(),
        "plain": (None, True, 2**70, 0.1, "x", b"y", [(), {}, []]),
        "ordered": OrderedDict([(2, "b"), (1, "a")]),
    }
    release, found = decode_record(MAGIC, record_of(payload), what="it", config_hash=CONFIG)
    assert release == 3
    assert all(torch.equal(a, b) for a, b in zip(found["parts"], payload["parts"], strict=True))
    assert torch.equal(found["conjugate"], payload["conjugate"])
    assert torch.equal(found["weight"], payload["weight"])
    assert torch.equal(found["sparse"].to_dense(), torch.eye(3))
    assert found["plain"] == payload["plain"]
    assert found["ordered"] == {2: "b", 1: "a"}


def test_every_cut_and_every_changed_byte_is_noticed():
    whole = record_of({"t": torch.arange(1.0, 6.0), "n": 1})
    end = content_end(whole)
    assert len(whole) % BLOCK == 0
    for position in range(len(whole)):
        changed = whole[:position] + bytes([whole[position] ^ 0x20]) + whole[position + 1 :]
        zeros = [whole[:position] + bytes(len(whole) - position)] if position < end else []
        for damaged in (whole[:position], changed, *zeros):
            with pytest.raises((DataError, InputError)):
                decode_record(MAGIC, damaged, what="it", config_hash=CONFIG)
    with pytest.raises(DataError, match="is damaged"):
        decode_record(MAGIC, whole + b"x", what="it", config_hash=CONFIG)


@pytest.mark.parametrize("size", [1, BLOCK, 5 * BLOCK, 100_003])
@pytest.mark.parametrize("blocks", [2, 3, 1000])
def test_records_that_are_larger_than_the_room_come_back(size, blocks):
    tensors = [torch.arange(size) % 251, torch.arange(3 * size).to(torch.uint8)]
    _, found = decode_record(MAGIC, record_of({"t": tensors}, most_room=blocks * BLOCK), what="it", config_hash=CONFIG)
    assert all(map(torch.equal, found["t"], tensors))


def test_a_record_is_that_of_the_state_when_it_was_copied(tmp_path, monkeypatch):
    start = Background.start
    monkeypatch.setattr(Background, "start", lambda self, job: start(self, lambda: (time.sleep(0.02), job())[1]))
    tensor = torch.zeros(1000)
    journal = journal_in(tmp_path)
    for release in (1, 2, 3):
        journal.append(release, {"t": tensor})
        tensor += 1
    journal.wait()
    found = [entry["t"].unique().tolist() for entry in journal_in(tmp_path).entries(after=0)]
    assert found == [[0.0], [1.0], [2.0]]


@pytest.mark.parametrize("refused", ["open", "write"])
def test_file_systems_that_want_their_own_memory_used_get_their_way(tmp_path, monkeypatch, refused):
    """Some refuse O_DIRECT at once, others once blocks do not suit them."""
    system_open, system_write, tried = os.open, os.pwrite, []

    def opening(path: Any, flags: int, *args: Any, **options: Any) -> int:
        if refused == "open" and flags & os.O_DIRECT:
            tried.append(path)
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return system_open(path, flags, *args, **options)

    def writing(descriptor: int, content: Any, place: int) -> int:
        if refused == "write" and fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            tried.append(descriptor)
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return system_write(descriptor, content, place)

    monkeypatch.setattr(os, "open", opening)
    monkeypatch.setattr(os, "pwrite", writing)
    journal = journal_in(tmp_path)
    for release in (1, 2):
        journal.append(release, {"number": release})
    journal.wait()
    assert tried
    assert numbers(journal_in(tmp_path), after=0) == [1, 2]


def test_what_cannot_be_read_back_is_refused():
    with pytest.raises(InputError, match=r"payload\['x'\]\[0\] is a object"):
        encode_record(MAGIC, {"x": [object()]}, config_hash=CONFIG, release=0)


def test_entries_follow_each_other(tmp_path):
    written(tmp_path, 1, 2, 3)
    assert numbers(journal_in(tmp_path), after=0) == [1, 2, 3]
    assert numbers(journal_in(tmp_path), after=2) == [3]
    assert numbers(journal_in(tmp_path), after=3) == []
    assert journal_in(tmp_path).holds(range(1, 4))
    assert not journal_in(tmp_path).holds([4])
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o600}


@pytest.mark.parametrize("damage", ["torn", "zeros", "missing"])
def test_entries_end_before_a_damaged_one(tmp_path, damage):
    written(tmp_path, 1, 2, 3)
    second = tmp_path / "slot-0001.journal"
    content = second.read_bytes()
    if damage == "missing":
        second.unlink()
    else:
        end = content_end(content) - 10
        second.write_bytes(content[:-1] if damage == "torn" else content[:end] + bytes(len(content) - end))
    assert numbers(journal_in(tmp_path), after=0) == [1]
    assert journal_in(tmp_path).read(2) is None
    assert numbers(journal_in(tmp_path), after=2) == [3]


def test_entries_that_are_not_needed_are_written_over(tmp_path):
    journal = written(tmp_path, 1, 2, 3)
    journal.keep(after=2, up_to=3)
    journal.append(4, {"number": 4})
    journal.append(5, {"number": 5, "longer": torch.zeros(100)})
    journal.wait()
    assert len(list(tmp_path.iterdir())) == 3
    assert numbers(journal_in(tmp_path), after=2) == [3, 4, 5]


@pytest.mark.parametrize("place", ["begin", "middle", "end"])
def test_a_torn_entry_over_another_is_neither(tmp_path, place):
    """A crash while slot 0 is written over: part of the new entry, then the rest of the old one."""
    journal = written(tmp_path, 1, 2, 3)
    old = (tmp_path / "slot-0000.journal").read_bytes()
    journal.keep(after=1, up_to=3)
    journal.append(4, {"value": torch.full((3,), 4.0), "number": 4})
    journal.wait()
    new = (tmp_path / "slot-0000.journal").read_bytes()
    cut = {"begin": 10, "middle": content_end(new) // 2, "end": content_end(new) - 1}[place]
    (tmp_path / "slot-0000.journal").write_bytes(new[:cut] + old[cut:])
    found = journal_in(tmp_path)
    assert numbers(found, after=1) == [2, 3]
    found.keep(after=1, up_to=3)
    found.append(4, {"number": 4})
    found.wait()
    assert numbers(journal_in(tmp_path), after=1) == [2, 3, 4]


def test_entries_of_another_history_are_removed(tmp_path):
    written(tmp_path, 1, 2, 3, 4)
    (tmp_path / "slot-0001.journal").write_bytes(b"")
    journal = journal_in(tmp_path)
    journal.keep(after=-1, up_to=1)
    assert numbers(journal, after=0) == [1]
    journal.append(2, {"number": 22})
    journal.wait()
    assert numbers(journal_in(tmp_path), after=0) == [1, 22]


def test_an_entry_of_another_configuration_is_refused(tmp_path):
    written(tmp_path, 1)
    with pytest.raises(InputError, match="belongs to another configuration"):
        list(Journal(tmp_path, config_hash="cd" * 32).entries(after=0))


def test_an_entry_is_written_in_the_background_and_errors_come_with_the_wait(tmp_path, monkeypatch):
    may_fail = threading.Event()

    def full(descriptor: int) -> None:
        may_fail.wait()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(record_writer, "flush_data", full)
    journal = journal_in(tmp_path)
    journal.append(1, {"number": 1})
    may_fail.set()
    with pytest.raises(DataError, match="free some space"):
        journal.wait()
