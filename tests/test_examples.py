"""Every example runs, quickly; and the Opacus port differs from Opacus by what the documentation says."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("opacus_port", []),
        ("plain_loop", []),
        ("plain_loop", ["--no-gate"]),
        ("text_classifier", ["--synthetic"]),
        ("frozen_features", []),
        ("dp_ftrl", []),
    ],
)
@pytest.mark.usefixtures("own_kinds")
def test_an_example_runs(name, options, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "--quick", *options])
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    out = capsys.readouterr().out
    accuracies = [float(found) for found in re.findall(r"test accuracy (\d\.\d+)", out)]
    epsilons = [float(found) for found in re.findall(r"epsilon (\d+\.\d+)", out)]
    assert accuracies
    assert max(accuracies) > 0.2
    assert 2.9 < max(epsilons) <= 3.0


def test_every_example_is_tried():
    elsewhere = {"transformers_trainer", "lightning_fit", "accelerate_loop", "skorch_net"}  # in tests/integrations
    assert {path.stem for path in EXAMPLES.glob("*.py")} - elsewhere == {
        "opacus_port",
        "plain_loop",
        "text_classifier",
        "frozen_features",
        "dp_ftrl",
    }


def test_the_port_is_an_opacus_loop_but_for_three_lines(tmp_path):
    """Take the documented lines back, and what remains runs on Opacus."""
    pytest.importorskip("opacus", reason="opacus is not installed: pip install 'sluice[opacus]'")
    documentation = (ROOT / "docs" / "training.md").read_text("utf-8")
    difference = documentation.partition("```diff\n")[2].partition("```")[0].splitlines()
    removed = [line[1:] for line in difference if re.match(r"-(?!--)", line)]
    added = [line[1:] for line in difference if re.match(r"\+(?!\+\+)", line)]
    assert len(removed) == 1
    assert len(added) == 3
    lines = (EXAMPLES / "opacus_port.py").read_text("utf-8").splitlines()
    first = lines.index(added[0])
    lines[first] = removed[0]
    lines = [line for line in lines if line not in added]
    original = tmp_path / "original.py"
    original.write_text("\n".join(lines) + "\n", "utf-8")
    found = subprocess.run(
        [sys.executable, "-W", "ignore", str(original), "--quick"], capture_output=True, text=True, check=False
    )
    assert found.returncode == 0, found.stderr
    assert "epoch 1: test accuracy" in found.stdout
