from __future__ import annotations

import os
import stat

import pytest

from sluice._base.files import replaced_atomically


def test_a_failed_write_leaves_the_old_file_and_no_debris(tmp_path):
    target = tmp_path / "ledger.jsonl"
    target.write_text("old")
    with pytest.raises(RuntimeError, match="disk"), replaced_atomically(target) as temporary:
        temporary.write_text("half")
        raise RuntimeError("disk full")
    assert target.read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]


def test_a_good_write_replaces_and_creates_folders(tmp_path):
    target = tmp_path / "a" / "b" / "file"
    with replaced_atomically(target) as temporary:
        temporary.write_text("new")
    assert target.read_text() == "new"
    assert list(target.parent.iterdir()) == [target]


def test_files_follow_the_umask_unless_they_are_the_owners(tmp_path):
    previous = os.umask(0o022)
    try:
        for owner_only, mode in ((False, 0o644), (True, 0o600)):
            with replaced_atomically(tmp_path / "file", owner_only=owner_only) as temporary:
                temporary.write_text("x")
            assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == mode
    finally:
        os.umask(previous)
