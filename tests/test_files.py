from __future__ import annotations

import pytest

from sluice.files import replaced_atomically


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
