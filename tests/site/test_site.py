"""The documentation site builds without a broken link, shows formulas, and its tutorials run."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import sluice

ROOT = Path(__file__).parents[2]
TUTORIALS = sorted((ROOT / "docs" / "tutorials").glob("*.ipynb"))


def test_the_site_builds_loads_nothing_from_elsewhere_and_shows_every_public_name(tmp_path):
    site = built(tmp_path)
    pages = {page: page.read_text("utf-8") for page in site.rglob("*.html")}
    assert len(pages) > 25
    loading = re.compile(r"<(?:script|link|img|iframe)\b[^>]*?(?:src|href)=\"(https?:)?//")
    assert not [str(page.relative_to(site)) for page, text in pages.items() if loading.search(text)]
    for page, text in pages.items():
        pictures = re.findall(r'<img[^>]* src="((?!data:)[^"]+)"', text)
        assert [name for name in pictures if not (page.parent / name).exists()] == [], page.name
    reference = (site / "api.html").read_text("utf-8")
    assert [name for name in sluice.__all__ if name != "__version__" and f".{name}" not in reference] == []
    assert "max_physical_batch_size" in reference
    assert (site / "accounting.html").read_text("utf-8").count("<math") > 20


def built(folder: Path) -> Path:
    pytest.importorskip("mkdocs", reason="the site needs pip install 'sluice[docs]'")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(folder)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr + done.stdout
    return folder


def test_every_page_of_the_docs_is_in_the_navigation():
    navigation = (ROOT / "mkdocs.yml").read_text("utf-8").partition("nav:")[2]
    missing = [page.name for page in (ROOT / "docs").glob("*.md") if page.name not in navigation]
    assert missing == []


@pytest.mark.parametrize("tutorial", TUTORIALS, ids=lambda path: path.stem)
def test_tutorials_run(tutorial, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    cells = json.loads(tutorial.read_text("utf-8"))["cells"]
    namespace: dict[str, object] = {"__name__": "__main__"}
    for number, cell in enumerate(cells):
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), f"{tutorial.name}, cell {number}", "exec"), namespace)
    assert "epsilon" in capsys.readouterr().out or tutorial.stem == "auditing"


@pytest.mark.parametrize("tutorial", TUTORIALS, ids=lambda path: path.stem)
def test_tutorials_are_stored_with_what_they_print(tutorial):
    code = [cell for cell in json.loads(tutorial.read_text("utf-8"))["cells"] if cell["cell_type"] == "code"]
    assert any(cell["outputs"] for cell in code)
    assert all(output["output_type"] != "error" for cell in code for output in cell["outputs"])
