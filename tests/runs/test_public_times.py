"""No file or folder in ``public/`` shows when it was written: how long a run took tells how many attempts it needed."""

from __future__ import annotations

import os
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest

from sluice._base.errors import DataError
from sluice._base.files import PUBLIC_TIME
from sluice.data import DataSplits
from sluice.experiments.run import Progress, Training, recorded_run
from sluice.experiments.settings import settings_from
from sluice.mechanism.scaling import Clip
from sluice.mechanism.selective_release import SelectiveRelease
from sluice.runs.certificate import write_certificate
from sluice.runs.folder import RunFolder
from sluice.runs.ledger import Ledger, LedgerHeader
from sluice.runs.verify import verify_run


def training(digits: DataSplits, **options: Any) -> Training:
    settings = settings_from({"releases": 6, "noise_multiplier": 2.0, "accountant": "rdp", "evaluate_every": 2})
    return Training(settings=settings, splits=digits, **options)


def times(run: Path) -> dict[str, set[float]]:
    """Of last change and last access. Listing the folder is an access of our own, which is undone."""
    public = run / "public"
    status = public.stat()
    found = {path.name: {path.stat().st_mtime, path.stat().st_atime} for path in public.rglob("*")}
    os.utime(public, ns=(status.st_atime_ns, status.st_mtime_ns))
    return found | {"": {status.st_mtime, status.st_atime}}


def shown(run: Path) -> dict[str, set[float]]:
    return {name: found for name, found in times(run).items() if found != {PUBLIC_TIME}}


def stop(progress: Progress) -> None:
    if progress.release == 3:
        raise KeyboardInterrupt


def test_a_whole_run_shows_no_time_not_even_after_it_is_verified(digits, tmp_path):
    training(digits).start(tmp_path)
    assert shown(tmp_path) == {}
    assert len(times(tmp_path)) == 12
    assert verify_run(tmp_path).holds
    assert recorded_run(tmp_path).result is not None
    assert shown(tmp_path) == {}
    write_certificate(RunFolder.look(tmp_path))
    assert shown(tmp_path) == {}


def test_an_interrupted_and_a_resumed_run_show_no_time_though_somebody_looked(digits, tmp_path):
    def look(progress: Progress) -> None:
        assert [path.read_bytes() for path in (tmp_path / "public").iterdir()]
        stop(progress)

    with pytest.raises(KeyboardInterrupt):
        training(digits, report=look).start(tmp_path)
    assert shown(tmp_path) == {}
    (tmp_path / "public" / ".accuracy.jsonl.left.partial").touch()
    training(digits, mechanism=recorded_run(tmp_path).mechanism).resume(tmp_path)
    assert shown(tmp_path) == {}


def test_a_torn_ledger_is_restored_without_a_time(digits, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        training(digits, report=stop).start(tmp_path)
    ledger = tmp_path / "public" / "ledger.jsonl"
    ledger.write_bytes(ledger.read_bytes()[:-5])
    assert "ledger.jsonl" in shown(tmp_path)
    training(digits, mechanism=recorded_run(tmp_path).mechanism).resume(tmp_path)
    assert shown(tmp_path) == {}


def test_a_ledger_of_its_own_shows_no_time_and_its_folder_is_left_alone(tmp_path, monkeypatch):
    mechanism = SelectiveRelease(
        sample_rate=0.1, expected_batch_size=10, scaling=Clip(max_grad_norm=1.0), noise_multiplier=1.0, releases=9
    )
    path = tmp_path / "ledger.jsonl"
    with Ledger.create(path, header=LedgerHeader(mechanism=mechanism.to_dict(), delta=1e-5)) as ledger:
        assert path.stat().st_mtime == PUBLIC_TIME
        ledger.append_release(1)
        assert path.stat().st_mtime == PUBLIC_TIME
        monkeypatch.setattr(os, "fsync", lambda descriptor: (_ for _ in ()).throw(OSError("failed")))
        with pytest.raises(DataError, match="failed"):
            ledger.append_release(2)
    assert path.stat().st_mtime == PUBLIC_TIME
    assert abs(tmp_path.stat().st_mtime - time.time()) < 3600


def test_each_write_hides_its_own_time_so_a_kill_shows_none(digits, tmp_path, monkeypatch):
    """As if killed: nothing is put in order when the run ends."""
    monkeypatch.setattr(RunFolder, "close", lambda self: None)
    monkeypatch.setattr(RunFolder, "hide_times", lambda self: None)
    with pytest.raises(KeyboardInterrupt):
        training(digits, report=stop).start(tmp_path)
    assert shown(tmp_path) == {}


@pytest.mark.parametrize("zone", ["Etc/GMT+12", "UTC", "Etc/GMT-14"])
def test_the_time_fits_into_a_zip_archive_everywhere(tmp_path, monkeypatch, zone):
    monkeypatch.setenv("TZ", zone)
    time.tzset()
    try:
        file = tmp_path / "file"
        file.touch()
        os.utime(file, (PUBLIC_TIME, PUBLIC_TIME))
        assert zipfile.ZipInfo.from_file(file).date_time >= (1980, 1, 1, 0, 0, 0)
    finally:
        monkeypatch.undo()
        time.tzset()
