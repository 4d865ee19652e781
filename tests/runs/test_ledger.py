from __future__ import annotations

import errno
import inspect
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sluice._base.errors import DataError, InputError
from sluice.runs.ledger import Ledger, LedgerHeader, read_ledger
from sluice.runs.ledger_entries import GENESIS, encode_line

PLAN = 6


def header(**changes: object) -> LedgerHeader:
    settings = {"mechanism": {"releases": PLAN, "sample_rate": 0.25}, "delta": 1e-5, "versions": {"sluice": "0.1"}}
    return LedgerHeader(**(settings | changes))


def make_ledger(path: Path, releases: int = 0) -> Path:
    with Ledger.create(path, header=header()) as ledger:
        for number in range(1, releases + 1):
            ledger.append_release(number)
    return path


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.jsonl"


def test_what_is_written_is_read_back(path):
    given = header(
        noise="seeded",
        accountant="rdp",
        target_epsilon=2.0,
        configuration="ab" * 32,
    )
    with Ledger.create(path, header=given) as ledger:
        ledger.append_release(1)
        ledger.append_release(2)
        ledger.append_published("model.safetensors", sha256="cd" * 32)
        assert (ledger.spent, ledger.remaining()) == (2, PLAN - 2)
        head = ledger.head
    contents = read_ledger(path)
    assert contents.header == given
    assert (contents.counted, contents.recovered, contents.torn, contents.spent) == (2, 0, False, 2)
    assert contents.published == {"model.safetensors": "cd" * 32}
    assert contents.head == head


def test_the_same_releases_give_the_same_bytes(tmp_path):
    first, second = make_ledger(tmp_path / "a", 3), make_ledger(tmp_path / "b", 3)
    assert first.read_bytes() == second.read_bytes()


def test_a_line_is_on_the_disk_before_append_returns(path, monkeypatch):
    """The order of system calls is what counts: everything written is flushed before the call comes back."""
    calls: list[str] = []
    real_write, real_fsync = os.write, os.fsync
    with Ledger.create(path, header=header()) as ledger:
        monkeypatch.setattr(os, "write", lambda *a: (calls.append("write"), real_write(*a))[1])
        monkeypatch.setattr(os, "fsync", lambda *a: (calls.append("fsync"), real_fsync(*a))[1])
        ledger.append_release(1)
    assert calls == ["write", "fsync"]


def test_creation_flushes_file_and_folder_before_it_returns(path, monkeypatch):
    flushed: list[bool] = []
    real_fsync = os.fsync

    def fsync(descriptor: int) -> None:
        flushed.append(os.path.isdir(f"/proc/self/fd/{descriptor}"))
        real_fsync(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    Ledger.create(path, header=header()).close()
    assert flushed == [False, True, True]  # the file and its first name, then the name that counts


def test_power_loss_at_any_byte_never_loses_a_release(tmp_path, monkeypatch):
    """Cut the file anywhere: what is left counts every release of which a single byte was written."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # slow, and no power is lost here
    whole = make_ledger(tmp_path / "whole", PLAN).read_bytes()
    ends = [index + 1 for index, byte in enumerate(whole) if byte == ord("\n")]
    cut = tmp_path / "cut"
    for length in range(ends[0], len(whole) + 1):
        cut.write_bytes(whole[:length])
        begun = sum(end < length for end in ends)
        contents = read_ledger(cut)
        assert contents.spent == begun
        with Ledger.open(cut) as ledger:
            assert ledger.spent == begun
            assert (ledger.note is None) == (not contents.torn)
        reopened = read_ledger(cut)
        assert (reopened.spent, reopened.torn) == (begun, False)
        assert reopened.recovered == int(contents.torn)


@pytest.mark.parametrize("length", range(0, 400, 7))
def test_a_torn_header_is_an_error(path, length):
    whole = make_ledger(path).read_bytes()
    path.write_bytes(whole[: min(length, len(whole) - 1)])
    with pytest.raises(DataError, match="no release was ever logged"):
        read_ledger(path)


def test_null_bytes_left_by_power_loss_count_as_one_release(path):
    make_ledger(path, 2)
    with path.open("ab") as stream:
        stream.write(bytes(50) + b'e","number":3}\n')
    assert read_ledger(path).spent == 3


def test_recovery_is_atomic(path, monkeypatch):
    """A crash while a torn line is repaired leaves the torn file, whose count is the same."""
    make_ledger(path, 2)
    path.write_bytes(path.read_bytes()[:-5])
    before = path.read_bytes()

    def crash(self: Path, target: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", crash)
    with pytest.raises(KeyboardInterrupt):
        Ledger.open(path)
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]
    monkeypatch.undo()
    with Ledger.open(path) as ledger:
        assert ledger.spent == 2
        assert "release 2 is counted as spent" in ledger.note
        ledger.append_release(3)
    assert read_ledger(path).recovered == 1


def test_a_line_torn_after_the_last_release_costs_nothing(path):
    """When the plan is used up, only the entry of a published file can have been torn."""
    make_ledger(path, PLAN)
    with path.open("ab") as stream:
        stream.write(b'{"fi')
    assert read_ledger(path).spent == PLAN
    with Ledger.open(path) as ledger:
        assert (ledger.spent, ledger.remaining()) == (PLAN, 0)


def rewritten(path: Path, change) -> None:
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(change(lines)))


@pytest.mark.parametrize(
    ("change", "line", "problem"),
    [
        (lambda lines: [lines[0].replace(b"0.25", b"0.05"), *lines[1:]], 1, "chain is broken"),
        (lambda lines: [*lines[:2], *lines[3:]], 3, "chain is broken"),
        (lambda lines: [lines[0], lines[2], lines[1], *lines[3:]], 2, "chain is broken"),
        (lambda lines: [*lines[:2], lines[1], *lines[2:]], 3, "chain is broken"),
        (lambda lines: lines[1:], 1, "chain is broken"),
        (lambda lines: [*lines[:2], b"\n", *lines[2:]], 3, "not strict JSON"),
        (lambda lines: [*lines[:2], b"nonsense\n", *lines[2:]], 3, "not strict JSON"),
        (lambda lines: [*lines[:2], lines[2].replace(b",", b", "), *lines[3:]], 3, "not in canonical form"),
        (lambda lines: [*lines[:2], lines[2].replace(b"\n", b"\r\n"), *lines[3:]], 3, "not in canonical form"),
    ],
)
def test_damage_is_named_by_its_line(path, change, line, problem):
    make_ledger(path, 4)
    rewritten(path, change)
    before = path.read_bytes()
    with pytest.raises(DataError, match=f"line {line}: .*{problem}"):
        read_ledger(path)
    with pytest.raises(DataError, match=problem):
        Ledger.open(path)
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ({"kind": "release", "number": 1}, "release 3 comes next"),
        ({"kind": "release", "number": 4}, "release 3 comes next"),
        ({"kind": "release", "number": 3.0}, "must be an integer"),
        ({"kind": "release", "number": True}, "must be an integer"),
        ({"kind": "release", "number": 3, "attempts": 9}, "unknown keys attempts"),
        ({"kind": "release"}, "lacks number"),
        ({"kind": "refund", "number": 3}, "kind='refund'"),
        ({"kind": "published", "file": "x", "sha256": "short"}, "64 hex digits"),
        ({"kind": "published", "file": "", "sha256": "ab" * 32}, "must be a string"),
        ({"kind": "header", "format": 1}, "first line and nowhere else"),
    ],
)
def test_a_well_chained_line_that_says_something_wrong_is_refused(path, body, problem):
    make_ledger(path, 2)
    line, _ = encode_line(body, previous=read_ledger(path).head)
    with path.open("ab") as stream:
        stream.write(line)
    with pytest.raises(DataError, match=f"line 4: .*{problem}"):
        read_ledger(path)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("format", 2),
        ("delta", 0),
        ("delta", "small"),
        ("noise", "none"),
        ("noise", ["secure"]),
        ("accountant", "paper"),
        ("target_epsilon", -1),
        ("configuration", "short"),
        ("mechanism", {"releases": 0}),
        ("mechanism", {}),
        ("mechanism", [1]),
        ("versions", {"sluice": 1}),
        ("seconds", 12),
    ],
)
def test_a_bad_header_is_refused(path, key, value):
    line, _ = encode_line({**header().to_dict(), key: value}, previous=GENESIS)
    path.write_bytes(line)
    with pytest.raises(DataError, match="line 1: "):
        read_ledger(path)


def test_more_releases_than_planned_are_refused(path):
    make_ledger(path, PLAN)
    line, _ = encode_line({"kind": "release", "number": PLAN + 1}, previous=read_ledger(path).head)
    with path.open("ab") as stream:
        stream.write(line)
    with pytest.raises(DataError, match=f"line {PLAN + 2}: .*beyond the releases of the mechanism"):
        read_ledger(path)


def test_numbers_have_to_follow_and_the_plan_is_a_limit(path):
    with Ledger.create(path, header=header()) as ledger:
        for wrong in (0, 2, -1, 1.0, True, "1"):
            with pytest.raises(InputError, match="number="):
                ledger.append_release(wrong)
        for number in range(1, PLAN + 1):
            ledger.append_release(number)
        with pytest.raises(InputError, match=f"has {PLAN} releases, all logged"):
            ledger.append_release(PLAN + 1)
    assert read_ledger(path).spent == PLAN


@pytest.mark.parametrize("failing", ["write", "fsync"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EIO])
def test_a_failing_disk_is_explained_and_changes_nothing(path, monkeypatch, failing, code):
    make_ledger(path, 2)
    before = path.read_bytes()
    real_write = os.write
    ledger = Ledger.open(path)
    calls = []

    def fail(descriptor: int, content: bytes = b"") -> int:
        calls.append(failing)
        if failing == "write" and len(calls) == 1:  # part of the line still fits
            return real_write(descriptor, content[:10])
        if len(calls) > 2 or (failing == "fsync" and len(calls) > 1):
            return 0
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, failing, fail)
    with pytest.raises(DataError, match=f"cannot write .*{os.strerror(code)}"):
        ledger.append_release(3)
    monkeypatch.undo()
    assert path.read_bytes() == before
    with pytest.raises(InputError, match="open it again"):
        ledger.append_release(3)
    with Ledger.open(path) as again:
        again.append_release(3)
    assert read_ledger(path).spent == 3


def test_where_not_even_taking_back_works_the_torn_line_counts(path, monkeypatch):
    make_ledger(path, 2)
    ledger = Ledger.open(path)
    real_write = os.write
    written = []

    def full(descriptor: int, content: bytes) -> int:
        if written:
            raise OSError(errno.ENOSPC, "No space left on device")
        written.append(True)
        return real_write(descriptor, content[:10])

    def broken(descriptor: int, size: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "write", full)
    monkeypatch.setattr(os, "ftruncate", broken)
    with pytest.raises(DataError, match="No space left"):
        ledger.append_release(3)
    monkeypatch.undo()
    assert read_ledger(path).spent == 3


def test_ctrl_c_in_the_middle_leaves_a_ledger_that_writes_no_more(path, monkeypatch):
    ledger = Ledger.open(make_ledger(path, 1))

    def interrupt(descriptor: int) -> None:
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        ledger.append_release(2)
    with pytest.raises(InputError, match="open it again"):
        ledger.append_release(2)
    with Ledger.open(path) as again:
        again.append_release(again.spent + 1)
    assert read_ledger(path).spent >= 2


def test_ctrl_c_just_after_the_record_leaves_a_ledger_that_writes_no_more(path):
    """The entry is on disk and the object does not know yet: continuing would break the chain."""
    ledger = Ledger.open(make_ledger(path, 1))
    lines, first = inspect.getsourcelines(Ledger._append)
    (offset,) = [index for index, line in enumerate(lines) if "self._spent, self._head" in line]

    def interrupt(frame, event, _):
        if frame.f_code is Ledger._append.__code__ and event == "line" and frame.f_lineno == first + offset:
            raise KeyboardInterrupt
        return interrupt

    previous = sys.gettrace()
    sys.settrace(interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            ledger.append_release(2)
    finally:
        sys.settrace(previous)
    with pytest.raises(InputError, match="open it again"):
        ledger.append_release(2)
    ledger.close()
    with Ledger.open(path) as again:
        assert again.spent == 2
        again.append_release(3)
    assert read_ledger(path).spent == 3


def test_a_second_writer_is_refused_and_a_dead_one_is_not_in_the_way(path):
    make_ledger(path, 1)
    program = (
        "import sys, os, pathlib\nfrom sluice.runs.ledger import Ledger\n"
        "ledger = Ledger.open(pathlib.Path(sys.argv[1]))\n"
        "print('open', flush=True)\nsys.stdin.read()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with process:
        assert process.stdout.readline() == "open\n"
        with pytest.raises(InputError, match="in use by another process"):
            Ledger.open(path)
        process.kill()
        process.wait()
    with Ledger.open(path) as ledger:
        ledger.append_release(2)


def test_an_existing_ledger_is_not_overwritten(path):
    make_ledger(path, 1)
    with pytest.raises(InputError, match="it exists"):
        Ledger.create(path, header=header())
    assert read_ledger(path).spent == 1


BEGIN = """
import os, sys
from pathlib import Path
from sluice._base.errors import InputError
from sluice.runs.ledger import Ledger, LedgerHeader

def refuse(*paths):
    raise PermissionError(1, "Operation not permitted")

def flush_when_told(descriptor):
    os.fsync = flush
    print("flushing", flush=True)
    sys.stdin.readline()
    flush(descriptor)

if sys.argv[2] == "no-links":
    os.link = refuse
flush, os.fsync = os.fsync, flush_when_told
try:
    with Ledger.create(Path(sys.argv[1]), header=LedgerHeader(mechanism={"releases": 1}, delta=1e-5)) as ledger:
        ledger.append_release(1)
    print("began", flush=True)
except InputError as error:
    assert "it exists" in str(error), error
    print("refused", flush=True)
"""


@pytest.mark.parametrize("call", [1, 2, 3])
def test_a_disk_that_fails_when_a_ledger_is_begun_leaves_no_other_file(path, monkeypatch, call):
    calls: list[int] = []
    real_fsync = os.fsync

    def fsync(descriptor: int) -> None:
        calls.append(descriptor)
        if len(calls) >= call:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real_fsync(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(DataError, match="No space left on device: free some space"):
        Ledger.create(path, header=header())
    assert set(path.parent.iterdir()) <= {path}


@pytest.mark.parametrize("links", ["links", "no-links"])
def test_of_processes_at_once_one_begins_a_ledger(path, links):
    """Each has seen that there is none, and has written its header, before any goes on."""
    command = [sys.executable, "-c", BEGIN, str(path), links]
    processes = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    assert [process.stdout.readline() for process in processes] == ["flushing\n"] * 4
    for process in processes:
        process.stdin.write("go\n")
        process.stdin.flush()
    assert sorted(process.communicate()[0] for process in processes) == ["began\n", *["refused\n"] * 3]
    assert read_ledger(path).spent == 1
    assert list(path.parent.iterdir()) == [path]


def test_a_file_system_without_links_takes_the_name_first(path, monkeypatch):
    def refuse(*paths: Path) -> None:
        raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))

    monkeypatch.setattr(os, "link", refuse)
    make_ledger(path, 2)
    assert read_ledger(path).spent == 2
    assert list(path.parent.iterdir()) == [path]


def test_a_failing_link_is_explained_and_leaves_nothing(path, monkeypatch):
    def fail(*paths: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "link", fail)
    with pytest.raises(DataError, match="No space left on device: free some space"):
        Ledger.create(path, header=header())
    assert list(path.parent.iterdir()) == []


def test_resuming_with_fresh_noise_pays_again(path):
    make_ledger(path, 3)
    with Ledger.open(path) as ledger:
        before_release = ledger.resume(applied=2, repeats_noise=False)
        before_release(3)
        before_release(4)
        assert ledger.spent == 5
        before_release(5)
        with pytest.raises(InputError, match="all logged"):
            before_release(6)


def test_resuming_with_the_same_noise_repeats_what_is_logged(path):
    make_ledger(path, 3)
    with Ledger.open(path) as ledger:
        before_release = ledger.resume(applied=1, repeats_noise=True)
        before_release(2)
        before_release(3)
        assert ledger.spent == 3
        before_release(4)
        assert ledger.spent == 4


def test_a_checkpoint_ahead_of_the_ledger_is_refused(path):
    """Somebody cut whole lines off the ledger: the chain is fine, the checkpoint knows better."""
    make_ledger(path, 3)
    rewritten(path, lambda lines: lines[:-1])
    with Ledger.open(path) as ledger, pytest.raises(DataError, match="entries were removed"):
        ledger.resume(applied=3, repeats_noise=False)


def test_lines_hold_nothing_but_public_values(path):
    """The keys of the lines are all there is; anything about time or attempts would have to be one of them."""
    make_ledger(path, 2)
    for line in path.read_text().splitlines()[1:]:
        assert set(json.loads(line)) == {"kind", "number", "hash"}


def test_missing_ledger(path):
    with pytest.raises(DataError, match=r"cannot read .*ledger\.jsonl.*No such file"):
        read_ledger(path)
    with pytest.raises(DataError, match=r"cannot write .*ledger\.jsonl.*No such file"):
        Ledger.open(path)
