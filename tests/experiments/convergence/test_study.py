from __future__ import annotations

import csv
import io
import json
from dataclasses import replace

import pytest

from sluice._base.errors import DataError, InputError
from sluice.cli import reproduce_convergence as command
from sluice.cli.reproduce_options import ConvergenceOptions
from sluice.experiments.convergence import study
from sluice.experiments.convergence.plot import convergence_png
from sluice.experiments.convergence.problems import Quadratic
from sluice.experiments.convergence.study import Setting, lines_of, run_setting, settings, stored_line
from sluice.experiments.convergence.texts import as_csv, markdown, verdict
from sluice.experiments.jobs import JobOptions, Lost

SMALL = Setting(problem="quadratic", bound=1.0, epsilon=8.0, lr=0.5, releases=8, batch_size=20)


@pytest.fixture(autouse=True)
def _small_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    small = Quadratic(records=100, dimension=2, distance=3.0)
    monkeypatch.setattr(study, "problem_of", lambda name: small)


def test_a_setting_is_run_once_and_holds_its_bound(tmp_path, monkeypatch):
    line = run_setting(tmp_path, SMALL, (0, 1))
    assert [run.seed for run in line.runs] == [0, 1]
    assert 0 < line.largest_share < 1
    assert line.runs[0].smallest <= line.runs[0].mean <= line.runs[0].first * 2
    monkeypatch.setattr(study, "measured_run", lambda *arguments, **options: pytest.fail("run again"))
    assert list(lines_of(tmp_path, [SMALL], (0, 1), again=False, run=True)) == [line]
    assert list(lines_of(tmp_path, [replace(SMALL, lr=0.4)], (0, 1), again=False, run=False)) == []
    assert stored_line(tmp_path, SMALL, (0, 2)) is None


def test_settings_that_other_workers_run_are_stored_here_and_lost_ones_named(tmp_path, monkeypatch):
    others = [replace(SMALL, lr=lr) for lr in (0.1, 0.2, 0.3)]

    def elsewhere(function, items, options):
        assert options == JobOptions(backend="ray")
        for setting in items:
            yield setting, Lost(reason="its worker died 4 times") if setting.lr == 0.2 else function(setting)

    monkeypatch.setattr(study, "run_jobs", elsewhere)
    lines = lines_of(tmp_path, others, (0,), again=False, run=True, options=JobOptions(backend="ray"))
    assert [next(lines).setting.lr, next(lines).setting.lr] == [0.1, 0.3]
    with pytest.raises(DataError, match=r"not run: .*lr0.2.*its worker died 4 times"):
        next(lines)
    assert stored_line(tmp_path, others[2], (0,)) is not None


def test_a_file_of_something_else_is_refused(tmp_path):
    (tmp_path / f"{SMALL.name}.json").write_text(json.dumps({"runs": [{"seed": 0}]}))
    with pytest.raises(DataError, match="not what this command stores"):
        stored_line(tmp_path, SMALL, (0,))


def test_table_and_plot_say_whether_the_bounds_hold(tmp_path):
    line = run_setting(tmp_path, SMALL, (0,))
    too_small = replace(line, terms=(replace(line.terms[0], start=0.0, bias=0.0, sampling=0.0, noise=0.0001),))
    assert "is above the measurement in 1 of 1 runs" in verdict([line])
    assert "is above the measurement in 0 of 1 runs" in verdict([too_small])
    refuted = replace(
        line, paper=tuple(replace(terms, start=0.0, bias=1e-9, sampling=0, noise=0) for terms in line.paper)
    )
    assert "**no**" in markdown([refuted], plot="x.png", missing=1)
    assert "1 settings were not run" in markdown([refuted], plot="x.png", missing=1)
    (row,) = csv.DictReader(io.StringIO(as_csv([line])))
    parts = [float(row[name]) for name in ("start", "bias", "sampling", "noise")]
    assert sum(parts) == pytest.approx(float(row["bound"]), rel=1e-4)
    assert convergence_png([line, too_small]).startswith(b"\x89PNG")


def test_all_settings_have_names_of_their_own_and_steps_that_the_proof_allows():
    names = [setting.name for setting in settings()]
    assert len(set(names)) == len(names) == 31
    assert {setting.problem for setting in settings()} == {"quadratic", "digits"}


def test_the_command_writes_what_is_stored(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(command, "settings", lambda: (SMALL, replace(SMALL, beta=None)))
    options = ConvergenceOptions(problems=("quadratic",), seeds=("0",), results=tmp_path, as_json=True)
    command.reproduce_convergence(options)
    answer = json.loads(capsys.readouterr().out)
    assert answer["not_run"] == 0
    assert [line["paper_share"] is None for line in answer["lines"]] == [False, True]
    assert all((tmp_path / f"table.{kind}").exists() for kind in ("md", "csv", "png"))
    with pytest.raises(InputError, match="problems='cubic'"):
        command.reproduce_convergence(replace(options, problems=("cubic",), no_run=True))
