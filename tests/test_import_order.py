"""Sub-packages import in one direction, and the documents list them in that order."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
TABLE = re.findall(r"^\| (`sluice/.*?) \|", (ROOT / "docs" / "architecture.md").read_text("utf-8"), re.MULTILINE)
RANKS = {package: rank for rank, row in enumerate(TABLE) for package in re.findall(r"`sluice/(\w+)/`", row)}


def imports(source: str) -> Iterator[str]:
    """Every module of Sluice that a source names in an import, wherever it stands."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith("sluice."))
        elif isinstance(node, ast.ImportFrom) and node.module == "sluice":
            yield from (f"sluice.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("sluice."):
            yield node.module or ""


def test_imports_are_found_wherever_they_stand():
    source = "from sluice.cli import a\nimport sluice.runs.b\ndef f():\n    from sluice import data\nimport os"
    assert set(imports(source)) == {"sluice.cli", "sluice.runs.b", "sluice.data"}


def test_every_sub_package_is_listed():
    assert set(RANKS) == {path.parent.name for path in ROOT.glob("sluice/*/__init__.py")}
    readme = (ROOT / "README.md").read_text("utf-8").partition("Inside, each sub-package")[2]
    assert re.findall(r"`(\w+)`", readme) == list(RANKS), "the README lists another order"


def test_no_sub_package_imports_one_that_comes_after_it():
    wrong = [
        f"{path.relative_to(ROOT)} imports {module}"
        for package, rank in RANKS.items()
        for path in sorted((ROOT / "sluice" / package).rglob("*.py"))
        for module in imports(path.read_text("utf-8"))
        if RANKS.get(module.split(".")[1], -1) > rank
    ]
    assert not wrong
