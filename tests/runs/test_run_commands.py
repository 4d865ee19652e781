from __future__ import annotations

import errno
import json
import os
import stat

import pytest

from sluice._base.rounding import rounded_up
from sluice.cli import main
from sluice.runs.certificate import write_certificate
from sluice.runs.ledger import Ledger, read_ledger
from sluice.runs.privacy_spent import joint_spending, spending


@pytest.fixture
def run(capsys):
    def call(*arguments: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as stop:
            main([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        return int(stop.value.code or 0), out, err

    return call


def failing(out: str) -> list[str]:
    return [line.split()[1] for line in out.splitlines() if line.strip().startswith("FAILS")]


def test_a_good_run_holds(make_run, run):
    folder = make_run(target_epsilon=1.0)
    write_certificate(folder)
    code, out, _ = run("verify", folder.path)
    assert code == 0
    assert failing(out) == []
    for name in ("ledger", "epsilon", "configuration", "model.safetensors", "certificate"):
        assert name in out
    code, out, _ = run("verify", folder.path, "--json")
    report = json.loads(out)
    assert (code, report["holds"], report["joint"]) == (0, True, None)
    certified = json.loads(folder.certificate_path.read_bytes())["privacy"]["epsilon"]
    assert report["runs"][0]["spent"]["epsilon"] == certified


def test_what_is_not_checked_is_said(make_run, run):
    folder = make_run()
    write_certificate(folder)
    (folder.public / "notes.txt").write_text("epsilon = 0.1")
    code, out, _ = run("verify", folder.path)
    assert code == 0
    assert "not checked: notes.txt: neither ledger nor certificate" in out
    found = json.loads(run("verify", folder.path, "--json")[1])["runs"][0]["not_checked"]
    assert [each["name"] for each in found] == ["notes.txt"]


def test_verifying_changes_nothing_and_works_on_a_published_copy(make_run, run):
    folder = make_run(made=3)
    folder.ledger_path.write_bytes(folder.ledger_path.read_bytes()[:-9])
    for path in folder.private.iterdir():
        path.unlink()
    folder.private.rmdir()
    before = {path: path.read_bytes() for path in folder.public.iterdir()}
    code, out, _ = run("verify", folder.path)
    assert code == 0
    assert "torn and counted as spent" in out
    assert {path: path.read_bytes() for path in folder.public.iterdir()} == before
    assert not folder.private.exists()


def edit(path, old: bytes, new: bytes) -> None:
    content = path.read_bytes()
    assert old in content
    path.write_bytes(content.replace(old, new, 1))


@pytest.mark.parametrize(
    ("tamper", "found"),
    [
        (lambda f: edit(f.ledger_path, b'"number":3', b'"number":2'), "ledger"),
        (lambda f: edit(f.ledger_path, b'"noise_multiplier":2.0', b'"noise_multiplier":9.0'), "ledger"),
        (lambda f: f.ledger_path.unlink(), "ledger"),
        (lambda f: edit(f.config_path, b"20", b"21"), "configuration"),
        (lambda f: edit(f.weights_path, b"w", b"W"), "model.safetensors"),
        (lambda f: f.weights_path.unlink(), "model.safetensors"),
        (lambda f: edit(f.certificate_path, b'"delta": 1e-05', b'"delta": 1e-06'), "certificate"),
        (lambda f: f.certificate_path.write_bytes(b"{"), "certificate"),
        (lambda f: f.certificate_path.write_bytes(b"[]"), "certificate"),
        (lambda f: f.certificate_path.write_bytes(b'{"format": 1}'), "certificate"),
    ],
)
def test_tampering_is_found_and_named(make_run, run, tamper, found):
    folder = make_run()
    write_certificate(folder)
    tamper(folder)
    code, out, err = run("verify", folder.path)
    assert code == 1
    assert err == ""
    assert found in failing(out)


def test_weights_that_nobody_recorded_do_not_hold(make_run, run):
    folder = make_run(made=3)
    folder.weights_path.write_bytes(b"weights")
    code, out, _ = run("verify", folder.path)
    assert (code, failing(out)) == (1, ["model.safetensors"])


def test_a_release_after_the_certificate_makes_it_out_of_date(make_run, run):
    folder = make_run(made=3)
    write_certificate(folder)
    with Ledger.open(folder.ledger_path) as ledger:
        ledger.append_release(4)
    code, out, _ = run("verify", folder.path)
    assert (code, failing(out)) == (1, ["certificate"])


def test_a_budget_that_is_exceeded_fails(make_run, run):
    folder = make_run(target_epsilon=0.01)
    code, out, _ = run("verify", folder.path)
    assert (code, failing(out)) == (1, ["epsilon"])
    assert "ABOVE the budget of 0.01" in out


def test_an_audit_on_the_records_of_a_run_counts_with_it(make_run, run, spend_again):
    folder, other = make_run("audited", target_epsilon=0.3), make_run("other")
    write_certificate(folder)
    alone = json.loads(run("verify", folder.path, "--json")[1])["runs"][0]
    two_alone = json.loads(run("verify", folder.path, other.path, "--json")[1])["joint"]["epsilon"]
    spend_again(folder)
    code, out, _ = run("verify", folder.path)
    assert (code, failing(out)) == (1, ["certificate"])  # which was written before, and says nothing of it
    written = write_certificate(folder)
    code, out, _ = run("verify", folder.path)
    assert (code, failing(out)) == (0, [])
    found = json.loads(run("verify", folder.path, "--json")[1])["runs"][0]
    expected = joint_spending([read_ledger(folder.ledger_path), read_ledger(folder.audit_ledger_path)]).epsilon
    assert alone["spent"]["epsilon"] < found["spent"]["epsilon"] == expected == written["spent_again"]["epsilon"]
    assert (alone["audit_releases"], found["audit_releases"]) == (None, 8)
    assert f"{rounded_up(expected)} at delta 1e-05 for the run and the audit on its records together; within" in out
    code, out, _ = run("verify", folder.path, other.path, "--json")
    joint = json.loads(out)["joint"]["epsilon"]
    assert max(two_alone, expected) < joint <= expected + spending(read_ledger(other.ledger_path)).epsilon
    assert "with the audits on their records, together: epsilon" in run("verify", folder.path, other.path)[1]
    other_delta = json.loads(run("verify", folder.path, "--delta", "1e-7", "--json")[1])["runs"][0]["spent"]
    assert (other_delta["delta"], other_delta["epsilon"] > expected) == (1e-7, True)


def test_run_and_audit_together_are_held_to_the_budget(make_run, run, spend_again):
    alone = spending(read_ledger(make_run("plain").ledger_path)).epsilon
    folder = make_run(target_epsilon=1.01 * alone)
    spend_again(folder)
    write_certificate(folder)
    code, out, _ = run("verify", folder.path)
    assert (code, failing(out)) == (1, ["epsilon"])
    assert "  holds  epsilon  " in out
    assert "  FAILS  epsilon with audit" in out
    assert "ABOVE the budget" in out


@pytest.mark.parametrize(
    "tamper",
    [
        lambda path: path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[::2])),
        lambda path: path.write_bytes(path.read_bytes() + b"garbage\n"),
        lambda path: edit(path, b'"noise_multiplier":2.0', b'"noise_multiplier":9.0'),
        lambda path: path.write_bytes(b""),
        lambda path: path.unlink(),
    ],
)
def test_a_damaged_audit_ledger_is_found_and_nothing_is_added_up(make_run, run, spend_again, tmp_path, tamper):
    folder, other = make_run("audited"), make_run("other")
    path = spend_again(folder)
    write_certificate(folder)
    tamper(path)
    code, out, err = run("verify", folder.path, other.path)
    assert (code, err) == (1, "")
    assert "audit-ledger.jsonl" in failing(out)
    assert "no joint epsilon" in out
    found = json.loads(run("verify", folder.path, "--json")[1])["runs"][0]
    assert found["spent"] is None
    code, _, err = run("report", folder.path, "-o", tmp_path / "report.html")
    assert code == 1
    assert "audit-ledger.jsonl does not hold" in (tmp_path / "report.html").read_text()
    assert "Nothing can be said of this run" in (tmp_path / "report.html").read_text()


def test_a_whole_line_cut_off_the_audit_ledger_is_found(make_run, run, spend_again):
    folder = make_run()
    path = spend_again(folder)
    write_certificate(folder)
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-1]))
    code, out, _ = run("verify", folder.path)
    assert (code, failing(out)) == (1, ["certificate"])


def test_an_unproved_run_is_never_given_an_epsilon(make_run, run):
    folder = make_run(hidden=True)
    code, out, _ = run("verify", folder.path)
    assert code == 0
    assert "none is proved" in out
    assert "claimed (paper)" in out
    report = json.loads(run("verify", folder.path, "--json")[1])
    assert report["runs"][0]["spent"]["epsilon"] is None


def test_runs_together(make_run, run):
    first, second = make_run("first"), make_run("second", gated=False)
    code, out, _ = run("verify", first.path, second.path, "--json", "--delta", "1e-6")
    report = json.loads(out)
    assert code == 0
    single = [each["spent"]["epsilon"] for each in report["runs"]]
    assert max(single) < report["joint"]["epsilon"] <= sum(single)
    assert report["joint"]["delta"] == 1e-6
    assert "all 2 runs together: epsilon" in run("verify", first.path, second.path)[1]


def test_runs_that_cannot_be_added_up(make_run, run):
    first, other = make_run("first"), make_run("other", delta=1e-7)
    code, _, err = run("verify", first.path, other.path)
    assert (code, "Choose one with --delta" in err) == (2, True)
    code, _, err = run("verify", first.path, first.path)
    assert (code, "not allowed twice" in err) == (2, True)
    other.ledger_path.write_bytes(b"")
    code, out, _ = run("verify", first.path, other.path)
    assert code == 1
    assert "no joint epsilon" in out


@pytest.mark.parametrize("arguments", [["no-such-run"], ["{run}", "--delta", "2"], ["{run}", "--delta", "x"], []])
def test_bad_arguments(make_run, run, arguments, tmp_path):
    folder = make_run()
    code, out, err = run("verify", *(argument.format(run=folder.path) for argument in arguments))
    assert (code, out) == (2, "")
    assert 1 <= len(err.strip().splitlines()) <= 2


def test_the_certificate_command(make_run, run):
    folder = make_run(noise="seeded")
    code, out, _ = run("certificate", folder.path)
    assert code == 0
    assert "For experiments only" in out
    for name in ("certificate.json", "certificate.md", "certificate.html", "epsilon.svg"):
        assert (folder.public / name).is_file()
        assert stat.S_IMODE((folder.public / name).stat().st_mode) & 0o044
    code, out, _ = run("certificate", folder.path, "--json")
    assert json.loads(out) == json.loads(folder.certificate_path.read_bytes())
    assert run("verify", folder.path)[0] == 0


def test_a_full_disk_leaves_the_old_certificate(make_run, run, monkeypatch):
    folder = make_run(made=3)
    write_certificate(folder)
    with Ledger.open(folder.ledger_path) as ledger:
        ledger.append_release(4)
    before = {path: path.read_bytes() for path in folder.public.iterdir()}

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    code, _, err = run("certificate", folder.path)
    assert code == 2
    assert "No space left on device: free some space" in err
    assert {path: path.read_bytes() for path in folder.public.iterdir()} == before


def test_private_plots_stay_private(make_run, run):
    folder = make_run()
    before = sorted(folder.public.iterdir())
    code, out, _ = run("private", folder.path)
    assert code == 0
    for name in ("acceptance.png", "metric.png"):
        path = folder.private / name
        assert path.read_bytes().startswith(b"\x89PNG")
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert str(path) in out
    assert sorted(folder.public.iterdir()) == before
    assert json.loads(run("private", folder.path, "--json")[1])["releases"] == 8


def test_private_plots_need_a_trace(make_run, run):
    folder = make_run(made=0)
    code, _, err = run("private", folder.path)
    assert (code, "cannot read" in err) == (2, True)
    folder.trace_path.write_bytes(b"")
    code, _, err = run("private", folder.path)
    assert (code, "holds no release yet" in err) == (2, True)
