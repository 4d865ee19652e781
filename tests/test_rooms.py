"""Rooms of the package import in one direction, and the documentation lists them in that order."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
TABLE = re.findall(r"^\| (`sluice/.*?) \|", (ROOT / "docs" / "architecture.md").read_text("utf-8"), re.MULTILINE)
RANKS = {room: rank for rank, row in enumerate(TABLE) for room in re.findall(r"`sluice/(\w+)/`", row)}


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


def test_every_room_is_listed():
    assert set(RANKS) == {path.parent.name for path in ROOT.glob("sluice/*/__init__.py")}


def test_no_room_imports_one_that_comes_after_it():
    wrong = [
        f"{path.relative_to(ROOT)} imports {module}"
        for room, rank in RANKS.items()
        for path in sorted((ROOT / "sluice" / room).rglob("*.py"))
        for module in imports(path.read_text("utf-8"))
        if RANKS.get(module.split(".")[1], -1) > rank
    ]
    assert not wrong
