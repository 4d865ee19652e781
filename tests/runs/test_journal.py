from __future__ import annotations

import errno
import os
import threading
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch

from sluice._base.errors import DataError, InputError
from sluice.runs import records
from sluice.runs.journal import Journal
from sluice.runs.records import decode_record, encode_record

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


def record_of(payload: dict[str, Any]) -> bytes:
    return b"".join(bytes(part) for part in encode_record(MAGIC, payload, config_hash=CONFIG, release=3))


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
    whole = record_of({"t": torch.randn(5), "n": 1})
    for position in range(len(whole)):
        changed = whole[:position] + bytes([whole[position] ^ 0x20]) + whole[position + 1 :]
        for damaged in (whole[:position], changed, whole[:position] + bytes(len(whole) - position)):
            with pytest.raises((DataError, InputError)):
                decode_record(MAGIC, damaged, what="it", config_hash=CONFIG)
    with pytest.raises(DataError, match="is damaged"):
        decode_record(MAGIC, whole + b"x", what="it", config_hash=CONFIG)


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
        second.write_bytes(content[:-1] if damage == "torn" else content[:-30] + bytes(30))
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
    cut = {"begin": 10, "middle": len(new) // 2, "end": len(new) - 5}[place]
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


def test_an_entry_is_flushed_in_the_background_and_errors_come_with_the_wait(tmp_path, monkeypatch):
    may_fail = threading.Event()

    def full(descriptor: int) -> None:
        may_fail.wait()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(records, "flush_data", full)
    journal = journal_in(tmp_path)
    journal.append(1, {"number": 1})
    # The process may die now: the system has the entry.
    assert numbers(journal_in(tmp_path), after=0) == [1]
    may_fail.set()
    with pytest.raises(DataError, match="free some space"):
        journal.wait()
