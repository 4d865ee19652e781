"""Code blocks of docs/integrations.md run as printed, and the examples stop, resume and end with their epsilon."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "integrations.md").read_text("utf-8")
BLOCKS = {
    re.findall(r"sluice\.integrations\.(\w+) import", block)[0]: block
    for block in re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
}
EXAMPLES = {
    "transformers": "transformers_trainer",
    "lightning": "lightning_fit",
    "accelerate": "accelerate_loop",
    "skorch": "skorch_net",
}


def test_each_library_has_a_block_and_an_example():
    assert list(BLOCKS) == list(EXAMPLES)
    assert all(f"examples/{name}.py" in PAGE for name in EXAMPLES.values())


@pytest.mark.parametrize("library", BLOCKS)
def test_a_block_runs_as_printed(library, tmp_path, monkeypatch, capsys):
    pytest.importorskip(library, reason=f"needs pip install 'sluice[{library}]'")
    monkeypatch.chdir(tmp_path)
    exec(compile(BLOCKS[library], f"integrations.md, {library}", "exec"), {"__name__": "__main__"})
    assert 2.9 < float(re.findall(r"epsilon (\d\.\d+)", capsys.readouterr().out)[-1]) <= 3.0


@pytest.mark.parametrize("library", EXAMPLES)
def test_an_example_stops_resumes_and_ends_with_its_epsilon(library, monkeypatch, capsys):
    pytest.importorskip(library, reason=f"needs pip install 'sluice[{library}]'")
    monkeypatch.setattr(sys, "argv", [f"{EXAMPLES[library]}.py", "--quick"])
    runpy.run_path(str(ROOT / "examples" / f"{EXAMPLES[library]}.py"), run_name="__main__")
    out = capsys.readouterr().out
    stopped, ended = re.findall(r"after (\d+) (?:steps|releases)", out)
    assert int(ended) == 2 * int(stopped)
    assert f"{ended} releases" in out
    assert 2.9 < float(re.findall(r"epsilon (\d\.\d+)", out)[-1]) <= 3.0
    assert float(re.findall(r"test accuracy (\d\.\d+)", out)[-1]) > 0.4
