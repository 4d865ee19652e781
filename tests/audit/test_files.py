"""What an audit keeps in a run folder."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from sluice._base.errors import DataError, InputError
from sluice.audit import files
from sluice.audit.files import kept_coins, read_audit
from sluice.runs.folder import RunFolder


@pytest.fixture
def folder(tmp_path):
    with RunFolder.create(tmp_path / "run", config={}) as created:
        yield created


def test_coins_are_those_that_a_run_began_with(folder):
    assert kept_coins(folder, drawn=b"first") == b"first"
    assert kept_coins(folder, drawn=b"other") == b"first"
    assert folder.coins_path.parent == folder.private
    assert folder.coins_path.stat().st_mode & 0o077 == 0


def test_coins_of_another_number_of_canaries_are_refused(folder):
    kept_coins(folder, drawn=b"first")
    with pytest.raises(DataError, match="does not hold the coins"):
        kept_coins(folder, drawn=b"more coins")


def test_a_run_that_has_released_cannot_get_new_coins(folder, monkeypatch):
    folder.ledger_path.touch()
    monkeypatch.setattr(files, "read_ledger", lambda path: SimpleNamespace(spent=1))
    with pytest.raises(DataError, match="though the run had begun"):
        kept_coins(folder, drawn=b"first")


@pytest.mark.parametrize("text", ["[]", "{}", '{"format": 1}', '{"format": 1, "result": {}}', '{"format": 2}'])
def test_what_is_no_audit_is_refused(folder, text):
    folder.audit_path.write_text(text)
    with pytest.raises(DataError):
        read_audit(folder)


def test_no_audit_yet(folder):
    with pytest.raises(InputError, match="has not been audited"):
        read_audit(folder)
