from __future__ import annotations

import json

import pytest

from sluice.cli import main
from sluice.methods import METHODS


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stop:
        main(list(arguments))
    out, err = capsys.readouterr()
    return int(stop.value.code or 0), out, err


def test_every_method_is_listed_with_what_it_proves(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    code, out, _ = run(capsys, "methods")
    assert code == 0
    lines = {line.split()[0]: line for line in out.splitlines()[1:]}
    assert set(METHODS) <= set(lines)
    assert "nothing" in lines["dpsr-cg-paper"]
    assert "epsilon" in lines["dpsr-cg"]


@pytest.mark.parametrize("name", METHODS)
def test_one_method_is_explained_with_its_options(capsys, name):
    code, out, _ = run(capsys, "methods", name, "--json")
    assert code == 0
    told = json.loads(out)
    assert "Accounting" in told["about"]
    code, text, _ = run(capsys, "methods", name)
    assert code == 0
    assert all(option in text for option in told["options"])


def test_an_unknown_method_is_refused_with_the_names_there_are(capsys):
    code, _, err = run(capsys, "methods", "dp-ftrl")
    assert code == 2
    assert "dp-ftrl" in err
    assert "matrix" in err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["-o", "validation_noise"], "must be NAME=VALUE"),
        (["-o", "validation_noise=loud"], "validation_noise='loud'"),
        (["-o", "bands=2"], "no option bands"),
        (["-o", "validation_noise=0.01"], "validation_noise=0.01 are not allowed together"),
        (["-o", "threshold=-50"], "threshold=-50.0 and validation_noise=1.3 are not allowed"),
        (["--max-attempts", "5"], "max_attempts=5 is not allowed"),
        (["--method", "matrix", "-o", "buffers=2"], "option buffers=2 has no effect"),
        (["--method", "matrix", "-o", "batches=poisson", "--accountant", "rdp"], "accountant='rdp'"),
        (["--method", "dpis", "-o", "clip_rate=2000"], "clip_rate=2000"),
        (["--method", "dpagd", "-o", "candidates=1000000000"], "candidates=1000000000"),
        (["--method", "dpagd", "-o", "candidates=1e9"], "candidates=1000000000.0"),
    ],
)
def test_options_that_are_wrong_are_refused_before_anything_is_written(capsys, tmp_path, monkeypatch, options, message):
    monkeypatch.chdir(tmp_path)
    method = [] if "--method" in options else ["--method", "dpsur"]
    code, _, err = run(capsys, "train", "--dataset", "digits", *method, *options)
    assert code == 2
    assert message in err
    assert list(tmp_path.iterdir()) == []


def test_options_reach_the_mechanism_and_the_certificate(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    given = ("--noise-multiplier", "8", "--releases", "3", "--seed", "1", "--threads", "1", "--json")
    code, out, _ = run(
        capsys, "train", "--dataset", "digits", "--method", "dpsur", "-o", "validation_noise=1.7", *given
    )
    assert code == 0
    result = json.loads(out)
    assert result["mechanism"]["validation_noise"] == 1.7
    assert {figure["accountant"] for figure in result["figures"] if not figure["guaranteed"]} == {
        "claimed (DPSUR)",
        "claimed (paper)",
    }
    config = json.loads((tmp_path / result["run"] / "public" / "config.json").read_text())
    assert config["options"]["validation_noise"] == 1.7


def test_the_run_ends_at_the_cap_that_is_given(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    given = ("--noise-multiplier", "8", "--releases", "3", "--max-attempts", "6", "--seed", "4", "--threads", "1")
    code, out, _ = run(
        capsys, "train", "--dataset", "digits", "--method", "dpsur", "-o", "loss_clip=10", *given, "--json"
    )
    assert code == 0
    result = json.loads(out)
    assert result["mechanism"]["max_attempts"] == 6
    assert result["releases"] == 1
    assert "used up its attempts (max_attempts=6)" in result["notes"][0]
    assert result["epsilon"] > 0
    assert run(capsys, "verify", result["run"])[0] == 0


def test_the_authors_account_brings_their_settings(capsys, tmp_path, monkeypatch):
    from sluice.cli import train

    seen = {}

    def stop(recorded, *rest, **options):
        seen["settings"] = recorded.settings
        raise SystemExit(0)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(train, "_training", stop)
    run(capsys, "train", "--dataset", "mnist", "--method", "dpsur", "--epsilon", "3", "-o", "account=claimed")
    settings = seen["settings"]
    assert (settings.releases, settings.noise_multiplier, settings.options["validation_noise"]) == (1475, 1.35, 0.9)
