"""Examples in docstrings give what they say they give."""

from __future__ import annotations

import doctest
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MODULES = [
    ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for file in sorted(ROOT.glob("sluice/**/*.py"))
    if ">>> " in file.read_text("utf-8")
]


def test_examples_are_found_at_all():
    assert "sluice._base.validate" in MODULES


@pytest.mark.parametrize("module", MODULES)
def test_examples_hold(module):
    found = doctest.testmod(import_module(module))
    assert found.attempted > 0
    assert found.failed == 0
