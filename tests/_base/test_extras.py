from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest

from sluice._base.extras import EXTRAS, MissingPackageError, needing_extras
from sluice.cli import main

ROOT = Path(__file__).parents[2]


def test_every_extra_exists_and_none_of_its_packages_is_required():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert set(EXTRAS.values()) <= set(project["optional-dependencies"])
    required = {re.match(r"[\w-]+", each)[0] for each in project["dependencies"]}
    assert required.isdisjoint({*EXTRAS, "scikit-learn"})


def test_an_absent_package_is_named_with_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingPackageError, match=r"needs matplotlib.*'sluice\[plots\]'"), needing_extras():
        import matplotlib  # noqa: F401


def test_other_errors_pass():
    with pytest.raises(ModuleNotFoundError, match="no_such"), needing_extras():
        import no_such_package  # noqa: F401
    with pytest.raises(ImportError, match="cannot import"), needing_extras():
        from math import no_such_name  # noqa: F401


def test_a_command_says_what_to_install(monkeypatch, capsys):
    def absent(name: str) -> None:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr("sluice.runs.verify.verify_together", lambda *_, **__: absent("matplotlib.figure"))
    with pytest.raises(SystemExit) as stop:
        main(["verify", "runs/first"])
    assert stop.value.code == 2
    assert "pip install 'sluice[plots]'" in capsys.readouterr().err


def test_training_and_verifying_need_none_of_them(tmp_path):
    rng = np.random.default_rng(0)
    np.savez(tmp_path / "own.npz", x=rng.normal(size=(400, 6)).astype(np.float32), y=rng.integers(0, 2, 400))
    train = [
        "train",
        "--dataset",
        "own.npz",
        "--noise-multiplier",
        "3",
        "--batch-size",
        "64",
        "--releases",
        "2",
        "--threads",
        "1",
        "--run",
        "run",
    ]
    code = f"""
import sys
sys.modules.update(dict.fromkeys({sorted(EXTRAS)}))
from sluice.cli import main
for command in ({train}, ["verify", "runs/run"], ["report", "runs/run"]):
    try:
        main(command)
    except SystemExit as end:
        assert not end.code, command
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
