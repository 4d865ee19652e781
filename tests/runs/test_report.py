from __future__ import annotations

import json
from html.parser import HTMLParser

import pytest

from sluice._base.errors import DataError
from sluice._base.rounding import rounded_up
from sluice.cli import main
from sluice.runs.certificate import build_certificate, write_certificate
from sluice.runs.evaluations import Evaluation
from sluice.runs.ledger import read_ledger
from sluice.runs.privacy_spent import joint_spending
from sluice.runs.public_files import PublicFiles
from sluice.runs.report import report_page


class Page(HTMLParser):
    """What a reader gets: texts, headings, links, and whatever would be loaded."""

    VOID = ("meta", "link", "img", "br", "input", "rect", "path", "circle")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.texts: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        named = dict(attrs)
        if tag not in self.VOID:
            self.open.append(tag)
        self.ids += [named["id"]] if "id" in named else []
        self.links += [named["href"]] if tag == "a" else []
        self.loaded += [tag] if tag in ("script", "link", "img", "iframe") or "src" in named else []

    def handle_startendtag(self, tag, attrs):
        pass

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)


def with_accuracy(folder, *accuracies):
    files = PublicFiles(folder)
    for number, accuracy in enumerate(accuracies, start=1):
        files.add(Evaluation(release=number, epsilon_if_planned_to_stop_here=0.1 * number, test_accuracy=accuracy))
    write_certificate(folder)
    return folder


def test_one_run_is_reported_with_its_certificate(make_run):
    folder = with_accuracy(make_run(target_epsilon=1.0), 0.5, 0.875)
    text, holds = report_page([folder.path])
    assert holds
    page = Page(text)
    said = " ".join(page.texts)
    assert rounded_up(build_certificate(folder)["privacy"]["epsilon"]) in said
    assert "87.50 %" in said
    assert "What must not be published" in said
    assert page.loaded == []
    assert all(link.removeprefix("#") in page.ids for link in page.links)


def test_scores_of_numbers_are_drawn_under_their_own_names_apart_from_accuracy(make_run):
    folders = [with_accuracy(make_run("classes"), 0.5, 0.875), make_run("numbers")]
    files = PublicFiles(folders[1])
    for number, error in enumerate((9.0, 4.0), start=1):
        scores = {"mean_squared_error": error, "r_squared": 1 - error / 10}
        files.add(Evaluation(release=number, epsilon_if_planned_to_stop_here=0.1 * number, test_scores=scores))
    files.publish_certificate()
    said = " ".join(Page(report_page([each.path for each in folders])[0]).texts)
    assert "Test accuracy over epsilon" in said
    assert "Test mean squared error over epsilon" in said
    assert "accuracy 87.50 %" in said
    assert "mean squared error 4, R squared 0.6" in said
    alone = report_page([folders[1].path])[0]
    assert "ccuracy" not in alone.replace("accuracy.jsonl", "")
    plot = (folders[1].public / "accuracy.svg").read_text()
    assert "test mean squared error<" in plot
    assert "accuracy" not in plot
    for page in ("certificate.md", "certificate.html", "certificate.json"):
        text = (folders[1].public / page).read_text()
        assert "ccuracy" not in text
        assert "Test mean squared error and R squared are computed on them without noise" in text
    assert (
        "the settings, and test mean squared error and R squared." in (folders[1].public / "certificate.md").read_text()
    )


@pytest.mark.parametrize("scores", [{"mean_squared_error": "4"}, {"r_squared": True}, 7])
def test_scores_that_are_no_numbers_are_refused(make_run, scores):
    folder = make_run()
    line = {"release": 1, "epsilon_if_planned_to_stop_here": 0.1, "test_scores": scores}
    folder.accuracy_path.write_text(json.dumps(line) + "\n")
    with pytest.raises(DataError, match="line 1: scores must be numbers"):
        build_certificate(folder)


def test_several_runs_are_compared_and_composed(make_run):
    folders = [with_accuracy(make_run("a/x"), 0.6), with_accuracy(make_run("b/x", gated=False), 0.7), make_run("c")]
    for folder in folders:
        write_certificate(folder)
    text, holds = report_page([folder.path for folder in folders])
    assert holds
    joint = joint_spending([read_ledger(folder.ledger_path) for folder in folders], delta=None)
    page = Page(text)
    assert f"epsilon = {rounded_up(joint.epsilon)} together" in " ".join(page.texts)
    assert {"a/x", "b/x"} <= set(page.texts)  # told apart
    assert len(set(page.ids)) == len(page.ids) == 3


def test_an_audit_on_the_records_of_a_run_is_added_up(make_run, spend_again):
    folders = [with_accuracy(make_run("a", target_epsilon=0.2), 0.6), with_accuracy(make_run("b"), 0.7)]
    spend_again(folders[0])
    write_certificate(folders[0])
    text, holds = report_page([folder.path for folder in folders])
    ledgers = [read_ledger(folder.ledger_path) for folder in folders]
    audit = read_ledger(folders[0].audit_ledger_path)
    both, joint = joint_spending([ledgers[0], audit]), joint_spending([*ledgers, audit])
    said = " ".join(Page(text).texts)
    assert f"If they used the same records: epsilon = {rounded_up(joint.epsilon)} together" in said
    assert f"{rounded_up(both.epsilon)} (with the audit on its records)" in said
    assert f"a: epsilon {rounded_up(both.epsilon)} of 0.2" in said
    assert holds == (both.epsilon <= 0.2)


def test_nothing_private_is_read(make_run):
    folder = with_accuracy(make_run(attempts=7331), 0.5)
    before = report_page([folder.path])
    for path in folder.private.iterdir():
        path.unlink()
    folder.private.rmdir()
    assert report_page([folder.path]) == before
    assert "7331" not in before[0]


@pytest.mark.parametrize("damage", ["model", "ledger"])
def test_what_does_not_hold_is_said_first(make_run, tmp_path, capsys, damage):
    folder = with_accuracy(make_run(), 0.5)
    if damage == "model":
        folder.weights_path.write_bytes(b"others")
    else:
        folder.ledger_path.write_text("{}\n")
    with pytest.raises(SystemExit) as stop:
        main(["report", str(folder.path), "-o", str(tmp_path / "report.html"), "--json"])
    assert stop.value.code == 1
    assert json.loads(capsys.readouterr().out)["holds"] is False
    text = (tmp_path / "report.html").read_text("utf-8")
    assert 'class="warning"' in text
    Page(text)


def test_names_are_escaped(make_run):
    folder = with_accuracy(make_run("<script>alert(1)</script>x"), 0.5)
    text, _ = report_page([folder.path])
    assert "<script" not in text


def test_a_run_without_a_proof_and_a_seeded_one_are_marked(make_run):
    folders = [make_run("hidden", hidden=True), make_run("seeded", noise="seeded")]
    for folder in folders:
        write_certificate(folder)
    text, _ = report_page([folder.path for folder in folders])
    assert "none proved" in text
    assert "seeded: experiment only" in text
