"""Sections of the documentation that code and documents point to exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
REFERENCE = re.compile(r"docs/(\w[\w-]*\.md),\s+sections?\s+(\d+(?:\.\d+)?)(?:\s+and\s+(\d+(?:\.\d+)?))?")
FILES = [*sorted(ROOT.glob("sluice/**/*.py")), *sorted(ROOT.glob("docs/*.md"))]
FOUND = [
    (f"{file.relative_to(ROOT)}", document, section)
    for file in FILES
    for document, *sections in REFERENCE.findall(file.read_text("utf-8"))
    for section in sections
    if section
]


def test_references_are_found_at_all():
    assert len(FOUND) > 10


@pytest.mark.parametrize(("file", "document", "section"), FOUND)
def test_a_section_that_is_pointed_to_exists(file, document, section):
    text = (ROOT / "docs" / document).read_text("utf-8")
    assert re.search(rf"^#+ {re.escape(section)}\.?\s", text, re.MULTILINE), f"{file} points to {document}, {section}"


def test_certificates_point_to_sections_that_exist():
    from sluice.experiments.settings import settings_from
    from sluice.methods import planned_mechanism

    mechanism = planned_mechanism(settings_from({"noise_multiplier": 2.0}), dataset_size=1000)

    text = (ROOT / "docs" / "accounting.md").read_text("utf-8")
    for accountant, title in (("rdp", "Renyi"), ("pld", "hockey stick")):
        named = re.findall(r"\d+\.\d+", mechanism.theorem(accountant))
        assert len(named) == 2
        assert all(re.search(rf"^### {re.escape(section)} ", text, re.MULTILINE) for section in named)
        assert title in next(line for line in text.splitlines() if line.startswith(f"### {named[0]} "))
