"""Sections, files and names that code and documents point to exist."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
REFERENCE = re.compile(r"docs/(\w[\w-]*\.md),\s+sections?\s+(\d+(?:\.\d+)?)(?:\s+and\s+(\d+(?:\.\d+)?))?")
# A path from the root, such as sluice/training/engine.py, or one within the package in prose, such as training/engine.py.
ROOTS = "|".join(("sluice", "tests", "docs", "benchmarks", "examples"))
PACKAGES = "|".join(
    sorted(path.name for path in (ROOT / "sluice").iterdir() if path.is_dir() and path.name != "__pycache__")
)
FILE = re.compile(
    rf"(?<![\w/.$-])((?:{ROOTS}|{PACKAGES})/(?!NAME)[\w/.-]*(?:\.(?:py|md|json|c|h|svg)\b|/(?=[\s`,;:)])))"
)
QUOTED = re.compile(rf"`((?:{ROOTS}|results)/[\w/.-]+)`")
NAME = re.compile(r"`{1,2}(sluice(?:\.\w+)+)`{1,2}")
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("docs/*.md"))]
FILES = [*sorted(ROOT.glob("sluice/**/*.py")), *DOCUMENTS]
FOUND = [
    (f"{file.relative_to(ROOT)}", document, section)
    for file in FILES
    for document, *sections in REFERENCE.findall(file.read_text("utf-8"))
    for section in sections
    if section
]


def matches(pattern: re.Pattern[str], files: list[Path]) -> list[tuple[str, str]]:
    found = {(f"{file.relative_to(ROOT)}", each) for file in files for each in pattern.findall(file.read_text("utf-8"))}
    return sorted(found)


def test_references_are_found_at_all():
    assert len(FOUND) > 10
    assert len(matches(FILE, DOCUMENTS)) > 40
    assert len(matches(NAME, FILES)) > 10


@pytest.mark.parametrize(("file", "document", "section"), FOUND)
def test_a_section_that_is_pointed_to_exists(file, document, section):
    text = (ROOT / "docs" / document).read_text("utf-8")
    assert re.search(rf"^#+ {re.escape(section)}\.?\s", text, re.MULTILINE), f"{file} points to {document}, {section}"


def test_files_that_are_named_exist():
    missing = [
        f"{file} names {path}"
        for file, path in [*matches(FILE, FILES), *matches(QUOTED, DOCUMENTS)]
        if not (ROOT / path).exists() and not (ROOT / "sluice" / path).exists()
    ]
    assert not missing


def resolved(name: str) -> Any:
    """The module, or what a module holds, that a dotted name stands for."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found = import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        for part in parts[length:]:
            found = getattr(found, part)
        return found
    raise AttributeError(name)


@pytest.mark.parametrize(("file", "name"), matches(NAME, FILES))
def test_names_in_documents_and_docstrings_resolve(file, name):
    assert resolved(name) is not None


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_between_documents_lead_somewhere(document):
    for target in re.findall(r"\]\(([^)\s]+)\)", document.read_text("utf-8")):
        if target.startswith("http"):
            continue
        path, _, heading = target.partition("#")
        linked = document.parent / path if path else document
        assert linked.exists(), target
        if heading:
            titles = re.findall(r"^#+ (.+)$", linked.read_text("utf-8"), re.MULTILINE)
            assert heading in {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}, target


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
