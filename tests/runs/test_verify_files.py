"""What `sluice verify` holds the files in ``public/`` to, and which it says that it cannot check."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from sluice.runs.certificate import read_certificate, write_certificate
from sluice.runs.evaluations import Evaluation
from sluice.runs.folder import RunFolder
from sluice.runs.ledger import Ledger, read_ledger
from sluice.runs.public_files import CLASSES, PublicFiles
from sluice.runs.verify import verify_run

EARLIER = Path(__file__).parent / "earlier"
PAGES = ["certificate.md", "certificate.html", "epsilon.svg", "accuracy.svg"]


@pytest.fixture
def finished(make_run) -> RunFolder:
    """A run as training leaves it: scores, classes, weights and certificate."""
    folder = make_run(made=8)
    files = PublicFiles(folder)
    for release in (4, 8):
        files.add(Evaluation(release=release, epsilon_if_planned_to_stop_here=release / 40, test_accuracy=release / 10))
    (folder.public / CLASSES).write_text('[{"accuracy":0.5,"name":"0","records":2}]\n')
    with Ledger.open(folder.ledger_path) as ledger:
        files.publish_model(b"weights", ledger)
    files.publish_certificate()
    return folder


def failing(folder: RunFolder) -> list[str]:
    return [check.name for check in verify_run(folder.path).checks if not check.holds]


def left(folder: RunFolder) -> list[str]:
    return [each.name for each in verify_run(folder.path).not_checked]


def rewrite_certificate(folder: RunFolder, **changes: object) -> None:
    folder.certificate_path.write_text(json.dumps(read_certificate(folder) | changes))


def test_every_file_of_a_finished_run_is_checked(finished):
    assert failing(finished) == left(finished) == []
    assert {*PAGES, "accuracy.jsonl", CLASSES} <= {check.name for check in verify_run(finished.path).checks}
    assert list(read_ledger(finished.ledger_path).published) == ["accuracy.jsonl", CLASSES, "model.safetensors"]


@pytest.mark.parametrize("name", [*PAGES, "accuracy.jsonl", CLASSES])
def test_a_file_that_was_edited_is_named(finished, name):
    path = finished.public / name
    path.write_bytes(path.read_bytes().replace(b"0", b"1", 1))
    assert name in failing(finished)


def test_scores_are_logged_once_though_a_run_publishes_again(finished):
    before = finished.ledger_path.read_bytes()
    with Ledger.open(finished.ledger_path) as ledger:
        PublicFiles(finished).publish_model(b"weights", ledger)
    assert finished.ledger_path.read_bytes() == before


def test_pages_of_other_versions_are_not_checked(finished):
    rewrite_certificate(finished, written_with={"sluice": "0.0.9"}, not_accounted=["in other words"])
    (finished.public / "certificate.md").write_text("# In other words\n")
    assert failing(finished) == []
    assert left(finished) == sorted(PAGES)
    found = {each.name: each.why for each in verify_run(finished.path).not_checked}
    assert "other versions wrote it" in found["certificate.md"]


@pytest.mark.parametrize("text", ["warnings", "not_accounted", "must_not_be_published", "scores"])
def test_a_certificate_cannot_be_reworded_by_hand(finished, text):
    rewrite_certificate(finished, **{text: ["Trust me."]})
    assert failing(finished) == ["certificate"]
    assert left(finished) == sorted(PAGES)


def test_scores_of_an_earlier_version_are_said_to_be_unchecked(tmp_path):
    shutil.copytree(EARLIER / "finished", tmp_path / "finished")
    folder = RunFolder.look(tmp_path / "finished")
    assert failing(folder) == []
    assert left(folder) == ["accuracy.jsonl"]
    write_certificate(folder)
    assert failing(folder) == []
    assert left(folder) == ["accuracy.jsonl"]


def test_what_nobody_knows_of_is_listed(finished):
    (finished.public / "notes.txt").write_text("epsilon = 0.1")
    assert failing(finished) == []
    assert left(finished) == ["notes.txt"]


@pytest.mark.parametrize("content", [{}, {"summary": [[1]]}, {"summary": [], "result": {"notes": 3}}])
def test_an_audit_that_cannot_be_shown_is_an_error(finished, content):
    head = read_ledger(finished.ledger_path).head
    finished.audit_path.write_text(json.dumps({"ledger_head": head, **content}))
    assert failing(finished) == ["pages"]
    assert "audit.json" in left(finished)


def test_an_audit_that_was_edited_no_longer_fits_the_pages(finished):
    result = {"notes": [], "rehearsal": True, "refuted": True, "lower_bound": 9.0}
    audit = {
        "ledger_head": read_ledger(finished.ledger_path).head,
        "summary": [["Verdict", "refuted"]],
        "result": result,
    }
    finished.audit_path.write_text(json.dumps(audit))
    write_certificate(finished)
    assert (failing(finished), left(finished)) == ([], ["audit.json"])
    finished.audit_path.write_text(json.dumps({**audit, "summary": [["Verdict", "not refuted"]]}))
    assert failing(finished) == ["certificate.md", "certificate.html"]
