"""`sluice audit`, and canaries of a run."""

from __future__ import annotations

import json
import signal
import subprocess
import sys

import jsonschema
import numpy as np
import pytest
from typer.testing import CliRunner

from sluice.cli import command_line, main
from sluice.runs.certificate import schema

TRAIN = "train --dataset digits --method dpsgd --batch-size 64 --releases 3 --epsilon 8 --canaries 64 --threads 1 --run"


def invoke(command):
    return CliRunner().invoke(command_line(), command.split())


@pytest.fixture(scope="module")
def audited(tmp_path_factory):
    run = tmp_path_factory.mktemp("runs") / "audited"
    found = invoke(f"{TRAIN} {run}")
    assert found.exit_code == 0, found.output
    return run


def test_a_run_with_canaries_publishes_its_audit_and_no_canary(audited):
    written = json.loads((audited / "public" / "audit.json").read_text())
    jsonschema.validate(written, schema("audit"))
    assert written["verdict"] == "not refuted"
    assert written["result"]["canaries"] == 64
    assert not written["result"]["rehearsal"]
    assert len((audited / "private" / "canaries.bin").read_bytes()) == 8
    assert "How it was audited" in (audited / "public" / "certificate.html").read_text()
    assert "Privacy audit" in (audited / "public" / "audit.html").read_text()
    assert b"canary" not in (audited / "public" / "model.safetensors").read_bytes()
    assert invoke(f"verify {audited}").exit_code == 0


def test_the_audit_is_shown(audited):
    shown = invoke(f"audit show {audited}")
    assert shown.exit_code == 0
    assert "not refuted" in shown.output
    assert json.loads(invoke(f"audit show {audited} --json").output)["confidence"] == 0.95


def test_a_refuted_claim_is_exit_code_one(tmp_path):
    members = np.random.default_rng(0).random(400) < 0.5
    np.savez(tmp_path / "found.npz", scores=members + 0.0, members=members)
    found = invoke(f"audit scores {tmp_path / 'found.npz'} --claimed-epsilon 1 --page {tmp_path / 'page.html'}")
    assert found.exit_code == 1
    assert "is refuted" in (tmp_path / "page.html").read_text()
    assert "refuted" in found.output
    assert invoke(f"audit scores {tmp_path / 'found.npz'} --guesses 100").exit_code == 0


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"scores": np.arange(20.0)}, "'scores' and 'members'"),
        ({"scores": np.array([None, 1], dtype=object), "members": np.ones(2)}, "holds Python objects"),
        (None, "is no numpy file"),
    ],
)
def test_bad_files_of_scores_are_refused(tmp_path, arrays, message, capsys):
    file = tmp_path / "found.npz"
    if arrays is None:
        file.write_bytes(b"nothing")
    else:
        np.savez(file, **arrays)
    with pytest.raises(SystemExit) as ended:
        main(["audit", "scores", str(file)])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert message in said
    assert "allow_pickle" not in said


def test_a_run_without_an_audit_says_how_to_make_one(audited, tmp_path, capsys):
    run = tmp_path / "plain"
    (run / "public").mkdir(parents=True)
    (run / "public" / "config.json").write_text("{}")
    with pytest.raises(SystemExit) as ended:
        main(["audit", "show", str(run)])
    assert ended.value.code == 2
    assert "sluice audit rehearse --run" in capsys.readouterr().err


def test_a_rehearsal_of_a_run_says_so_on_its_certificate(audited):
    found = invoke(f"audit rehearse --run {audited} --canaries 64")
    assert found.exit_code == 0, found.output
    assert "must not be published" in found.output
    assert "a rehearsal of this run" in (audited / "public" / "certificate.md").read_text()
    assert invoke(f"verify {audited}").exit_code == 0


def test_an_audit_on_the_records_of_a_run_is_charged_and_made_once(audited):
    found = invoke(f"audit rehearse --run {audited} --canaries 64 --spend")
    assert found.exit_code == 0, found.output
    pages = [(audited / "public" / name).read_text() for name in ("certificate.md", "certificate.html")]
    assert all("used a second time, for an audit" in page for page in pages)
    assert (audited / "public" / "audit-ledger.jsonl").read_text().count('"release"') == 3
    # Both runs have epsilon 8.
    together = float(pages[1].split("both together have epsilon = ")[1].split(" ")[0])
    assert 8 < together <= 16
    with pytest.raises(SystemExit) as ended:
        main(f"audit rehearse --run {audited} --canaries 64 --spend".split())
    assert ended.value.code == 2
    # A later rehearsal, which spends nothing, does not hide it.
    assert invoke(f"audit rehearse --run {audited} --two-runs 100").exit_code == 0
    assert "used a second time, for an audit" in (audited / "public" / "certificate.md").read_text()
    assert "two runs" in (audited / "public" / "audit.html").read_text()
    verified = invoke(f"verify {audited}")
    assert verified.exit_code == 1  # twice the budget of 8
    failing = [line for line in verified.output.splitlines() if line.strip().startswith("FAILS")]
    assert len(failing) == 1
    assert f"epsilon with audit {together:g} at delta 1e-05" in failing[0]
    assert "ABOVE the budget of 8" in failing[0]


KILL_AT_THE_FIRST_RELEASE = """
import os, signal, sys
from sluice.cli import main
from sluice.runs.ledger import Ledger

append = Ledger.append_release
def kill(self, number):
    append(self, number)
    os.kill(os.getpid(), signal.SIGKILL)
Ledger.append_release = kill
main(sys.argv[1:])
"""


def test_a_killed_audit_on_the_records_of_a_run_is_on_its_certificate_and_charged(tmp_path):
    run = tmp_path / "killed"
    assert invoke(f"{TRAIN} {run}").exit_code == 0
    arguments = f"audit rehearse --run {run} --canaries 64 --spend".split()
    killed = subprocess.run([sys.executable, "-c", KILL_AT_THE_FIRST_RELEASE, *arguments], capture_output=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()
    certificate = json.loads((run / "public" / "certificate.json").read_bytes())
    assert certificate["privacy"]["epsilon"] <= 8 < certificate["spent_again"]["epsilon"]
    for page in ("certificate.md", "certificate.html"):
        assert "used a second time, for an audit" in (run / "public" / page).read_text()
    assert "ABOVE the budget of 8" in invoke(f"verify {run}").output


@pytest.mark.parametrize(
    "wrong",
    [
        "--kind shy",
        "--canaries 3",
        "--run {run} --setting lr=1",
        "--confidence 2",
        "--runs 20 --two-runs 100",
        "--spend",
        "--run {run} --spend --two-runs 100",
    ],
)
def test_bad_rehearsals_are_refused(audited, wrong):
    with pytest.raises(SystemExit) as ended:
        main(f"audit rehearse {wrong.format(run=audited)}".split())
    assert ended.value.code == 2
