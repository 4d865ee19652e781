"""Runs written before the package was laid out in rooms: they verify, compose and resume.

The arithmetic of gradients has changed since in its last bits, so weights agree up to rounding only.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from sluice.cli import main
from sluice.experiments.preparing import feature_versions, prepare
from sluice.experiments.run import Training, recorded_run
from sluice.methods import METHODS as METHODS_NOW
from sluice.runs.verify import verify_run, verify_together

FIXTURES = Path(__file__).parent / "fixtures"
#: Without those that came later.
METHODS = [method for method in METHODS_NOW if method != "dpsgd-ac"]


def assert_same_model(folder: Path, expected: Path) -> None:
    ours, theirs = load_file(folder / "model.safetensors"), load_file(expected / "model.safetensors")
    for name, value in theirs.items():
        np.testing.assert_allclose(ours[name].numpy(), value.numpy(), rtol=1e-4, atol=1e-5)


def copied(method: str, kind: str, to: Path) -> Path:
    shutil.copytree(FIXTURES / method / kind, to)
    (to / "private").mkdir(exist_ok=True)
    os.chmod(to / "private", 0o700)
    return to


@pytest.mark.parametrize("method", METHODS)
def test_a_finished_run_verifies(method, tmp_path):
    found = verify_run(copied(method, "whole", tmp_path / "run"))
    assert found.contents is not None
    assert found.contents.spent == found.contents.counted > 0
    assert not [check for check in found.checks if check.name == "certificate" and not check.holds]


def test_runs_of_all_methods_compose(tmp_path):
    proved = [method for method in METHODS if method not in ("dpsr-cg-paper", "non-private")]
    paths = [copied(method, "whole", tmp_path / method) for method in proved]
    singles = [verify_run(path).spent for path in paths]
    _, joint = verify_together(paths)
    assert joint is not None
    assert joint.epsilon is not None
    assert max(one.epsilon for one in singles if one and one.epsilon) < joint.epsilon


@pytest.mark.parametrize("method", METHODS)
def test_a_stopped_run_resumes_to_the_same_model(method, tmp_path):
    path = copied(method, "stopped", tmp_path / "run")
    recorded = recorded_run(path)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        version = feature_versions(recorded.settings)[-1]
        splits = prepare(recorded.settings, show_progress=False, features_version=version)
        Training(settings=recorded.settings, mechanism=recorded.mechanism, splits=splits).resume(path)
    finally:
        torch.set_num_threads(threads)
    whole = FIXTURES / method / "whole" / "public"
    assert (path / "public" / "config.json").read_bytes() == (whole / "config.json").read_bytes()
    ours, theirs = ((folder / "ledger.jsonl").read_text().splitlines() for folder in (path / "public", whole))
    assert ours[: len(theirs) - 1] == theirs[:-1]  # the last lines name published files, of which there were fewer
    assert_same_model(path / "public", whole)


def test_the_command_resumes_with_the_features_that_the_run_began_with(tmp_path, monkeypatch):
    """They were made by matrix products, before there was a kernel, and differ from its own in a few last bits."""
    monkeypatch.chdir(tmp_path)
    path = copied("dpsgd-hf", "stopped", tmp_path / "run")
    with pytest.raises(SystemExit) as end:
        main(["train", "--resume", str(path), "--threads", "1"])
    assert not end.value.code
    assert_same_model(path / "public", FIXTURES / "dpsgd-hf" / "whole" / "public")
