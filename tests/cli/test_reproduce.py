from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sluice.cli import main, reproduce_cells


def run(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    return int(stop.value.code or 0), capsys.readouterr().out


def test_json_holds_every_cell(capsys):
    code, out = run(["reproduce", "q-sup", "--json"], capsys)
    result = json.loads(out)
    assert code == 0
    assert (result["explained"], result["explained_with_published_noise"], result["total"]) == (24, 21, 24)
    assert len(result["cells"]) == 24
    first = result["cells"][0]
    assert first["printed"] == "1.29"
    assert first["held_epsilon"] == 3
    assert first["claimed_table_reading"] == pytest.approx(1.2944, abs=5e-5)
    assert first["corrected"] == "1.12"
    assert "claimed" in result["status"]


def test_text_says_what_the_table_is_worth(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    code, out = run(["reproduce", "q-sup"], capsys)
    assert code == 0
    assert "24 of 24 cells explained" in out
    assert "Claimed" in out.splitlines()[0]
    assert "None of these factors is part of a guarantee." in out
    assert sum(line.startswith(("MNIST", "FMNIST", "CIFAR-10", "IMDB")) for line in out.splitlines()) == 24


def test_help_has_an_example(capsys):
    code, out = run(["reproduce", "q-sup", "--help"], capsys)
    assert code == 0
    assert "Example: sluice reproduce q-sup" in out


ACCURACY = [
    "reproduce",
    "accuracy",
    "--datasets",
    "digits",
    "--set",
    "releases=3",
    "--set",
    "batch_size=64",
    "--tag",
    "t",
]


SMALL = {"--epsilons": "3", "--seeds": "0"}


@pytest.fixture
def _small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SLUICE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "200")


def accuracy(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    small = [word for option, value in SMALL.items() if option not in arguments for word in (option, value)]
    with pytest.raises(SystemExit) as stop:
        main([*ACCURACY, *small, *arguments])
    out, err = capsys.readouterr()
    return int(stop.value.code or 0), out, err


@pytest.mark.usefixtures("_small")
def test_accuracy_runs_stores_prints_and_writes(capsys):
    code, out, err = accuracy(capsys, "--methods", "dpsgd,non-private", "--seeds", "0,1")
    assert code == 0
    assert "sluice: 0 of 4 cells are stored, 4 to run." in err
    assert "cell 4 of 4: digits, non-private:t, seed 1: " in err
    assert out.splitlines()[0].strip() == "digits, epsilon 3, delta 1e-05"
    assert "dpsgd:t" in out
    assert "what is claimed is not a guarantee" in out
    assert sorted(path.name for path in Path("results/accuracy").iterdir()) == [
        "digits-eps3-dpsgd+t-seed0.json",
        "digits-eps3-dpsgd+t-seed1.json",
        "digits-non-private+t-seed0.json",
        "digits-non-private+t-seed1.json",
        "table.csv",
        "table.md",
        "table.png",
    ]
    assert list(Path("cache/accuracy").iterdir()) == []


@pytest.mark.usefixtures("_small")
def test_accuracy_uses_stored_cells_again_unless_asked_not_to(capsys):
    accuracy(capsys, "--methods", "non-private")
    path = Path("results/accuracy/digits-non-private+t-seed0.json")
    first = json.loads(path.read_text())
    path.write_text(json.dumps({**first, "test_accuracy": 0.0}))
    code, out, err = accuracy(capsys, "--methods", "non-private")
    assert code == 0
    assert "1 of 1 cells are stored, 0 to run" in err
    assert "0.00 (1)" in out
    accuracy(capsys, "--methods", "non-private", "--again")
    assert json.loads(path.read_text())["test_accuracy"] == first["test_accuracy"] > 0
    _, _, err = accuracy(capsys, "--methods", "non-private", "--set", "lr=0.01")
    assert "was made with other settings (lr): it is run again" in err
    assert json.loads(path.read_text())["settings"]["lr"] == 0.01


@pytest.mark.usefixtures("_small")
def test_accuracy_goes_on_after_an_interruption(capsys, monkeypatch):
    original = reproduce_cells._Screen.report

    def stop(self: Any, planned: Any, progress: Any) -> None:
        original(self, planned, progress)
        if (planned.cell.seed, progress.release) == (1, 2):
            raise KeyboardInterrupt

    arguments = ["--methods", "non-private", "--seeds", "0,1,2"]
    with monkeypatch.context() as patch:
        patch.setattr(reproduce_cells._Screen, "report", stop)
        code, out, err = accuracy(capsys, *arguments)
    assert code == 130
    assert out == ""
    assert err.endswith("sluice: interrupted: 1 of 3 cells ended and stored. To resume, run the same command.\n")
    code, _, err = accuracy(capsys, *arguments)
    assert code == 0
    assert "1 of 3 cells are stored, 2 to run" in err
    stored = [
        json.loads(Path(f"results/accuracy/digits-non-private+t-seed{seed}.json").read_text()) for seed in (0, 1, 2)
    ]
    assert [cell["sittings"] for cell in stored] == [1, 2, 1]


@pytest.mark.usefixtures("_small")
def test_accuracy_json_and_the_table_of_what_is_stored(capsys):
    accuracy(capsys, "--methods", "non-private", "--output", "elsewhere/mine")
    code, out, err = accuracy(capsys, "--methods", "non-private,dpsgd", "--epsilons", "1,3", "--no-run", "--json")
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert (found["cells"], found["stored"], found["reused"]) == (3, 1, 1)
    assert [(line["heading"], line["row"], line["remark"]) for line in found["lines"]] == [
        (1.0, "non-private:t", ""),
        (1.0, "dpsgd:t", "not run"),
        (3.0, "non-private:t", ""),
        (3.0, "dpsgd:t", "not run"),
    ]
    assert found["lines"][0]["sound"] is None
    assert Path("elsewhere/mine.md").exists()
    assert found["files"]["png"] == "results/accuracy/table.png"


@pytest.mark.usefixtures("_small")
def test_accuracy_reports_cells_that_fail(capsys):
    code, out, err = accuracy(capsys, "--methods", "non-private", "--set", "features=bag-of-words")
    assert code == 1
    assert "failed: features='bag-of-words' is not allowed" in err
    assert "(failed: " in out


@pytest.mark.usefixtures("_small")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--methods", "magic"], "methods='magic' is not allowed"),
        (["--methods", "dpsgd", "--datasets", "fruits"], "datasets='fruits' is not allowed"),
        (["--methods", "dpsgd", "--epsilons", "three"], "epsilons='three' is not allowed: it must be numbers"),
        (["--methods", "dpsgd", "--seeds", "0.5"], "seeds='0.5' is not allowed: it must be integers"),
        (["--methods", "dpsgd", "--threads", "0"], "threads=0 is not allowed"),
        (["--methods", "dpsgd", "--jobs", "0"], "jobs=0 is not allowed"),
        (["--methods", "dpsgd", "--backend", "slurm"], "backend='slurm' is not allowed"),
        (["--methods", "dpsgd", "--scheduler", "here:1"], "address='here:1' is not allowed for backend='joblib'"),
        (["--methods", "dpsgd", "--backend", "dask", "--retries", "-1"], "retries=-1 is not allowed"),
        (["--methods", "dpsgd", "--again", "--no-run"], "cannot be given together"),
    ],
)
def test_accuracy_errors_are_clear_and_change_nothing(arguments, message, capsys):
    code, out, err = accuracy(capsys, *arguments)
    assert (code, out) == (2, "")
    assert message in err
    assert len(err.strip().splitlines()) <= 2
    assert not Path("results").exists()


def test_selection_is_not_told_to_run_every_cell_and_none(tmp_path, capsys):
    stored = tmp_path / "digits-eps3-dpsr-cg+none-seed0.json"
    stored.write_text("{}")
    arguments = ["--datasets", "digits", "--epsilons", "3", "--results", str(tmp_path), "--again", "--no-run"]
    code, out = run(["reproduce", "selection", *arguments], capsys)
    assert (code, out) == (2, "")
    assert stored.exists()
