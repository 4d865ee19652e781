from __future__ import annotations

import csv
import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import scipy

from sluice._base.errors import InputError
from sluice.cli.job_options import CellFlags
from sluice.cli.reproduce_beta import reproduce_beta
from sluice.cli.reproduce_options import BetaOptions
from sluice.experiments.beta.plot import accuracy_png, shares_png
from sluice.experiments.beta.study import AttemptWatch, Share, lines_of, plan_betas, sampling_for
from sluice.experiments.beta.texts import as_csv, cells_of, markdown, share_text


def plan(**changes):
    chosen = {"datasets": ["digits"], "betas": [0.0, 3.0], "epsilon": 3.0, "seeds": [0, 1], "overrides": {}, "tag": ""}
    return plan_betas(**{**chosen, **changes})


def options(folder: Path, **changes: Any) -> BetaOptions:
    return BetaOptions(
        datasets=("digits",),
        betas=("3",),
        seeds=("0",),
        looks=changes.pop("looks", 2),
        records=50,
        change=("releases=3", "batch_size=64", "noise_multiplier=2.0"),
        tag="small",
        results=folder / "results",
        cells=CellFlags(work=folder / "work", as_json=True, **changes),
    )


def test_cells_are_gates_and_coins_of_every_threshold():
    found = plan()
    assert len(found.plan.cells) == 8
    assert {found.about[cell.cell] for cell in found.plan.cells} == {
        (beta, gate) for beta in (0.0, 3.0) for gate in ("clipping-bias", "coin")
    }
    assert len({cell.cell.name for cell in found.plan.cells}) == 8
    for cell in found.plan.cells:
        assert (cell.settings.beta, cell.settings.gate) == found.about[cell.cell]
    for bad in ({"betas": []}, {"overrides": {"lr": 1.0}}):
        with pytest.raises(InputError):
            plan(**bad)


def test_rates_give_as_many_looks_as_are_asked_for():
    sampling = sampling_for(300, 3.0, looks=60, records=None)
    accepted = scipy.special.ndtr(-3 / 8)
    assert sampling.release_rate == 0.2
    # Of each chosen release one accepted attempt, and (1 - p) / p rejected ones times their rate.
    assert sampling.rejected_rate * (1 - accepted) / accepted == pytest.approx(1.0)
    assert sampling_for(30, 0.0, looks=60, records=None).release_rate == 1.0


@pytest.mark.parametrize(("good", "evaluated"), [(0, 10), (10, 10), (3, 10), (29, 60)])
def test_intervals_are_exact(good, evaluated):
    low, high = Share(good=good, evaluated=evaluated).interval
    assert low <= good / evaluated <= high
    if good:
        assert scipy.special.bdtrc(good - 1, evaluated, low) == pytest.approx(0.025)
    if good < evaluated:
        assert scipy.special.bdtr(good, evaluated, high) == pytest.approx(0.025)


def test_the_command_runs_stores_and_draws(tmp_path, capsys, monkeypatch):
    reproduce_beta(options(tmp_path))
    answer = json.loads(capsys.readouterr().out)
    gate, coin = answer["lines"]
    assert gate["accepted"]["evaluated"] + gate["rejected"]["evaluated"] > 0
    assert coin["accepted"]["evaluated"] == coin["rejected"]["evaluated"] == 0
    assert 0 < gate["acceptance"] < 1
    assert gate["passes"] >= 0.5
    assert gate["epsilon"] > 0
    assert all(Path(path).exists() for path in answer["files"].values())
    assert set(answer["files"]) == {"md", "csv", "digits", "accuracy"}

    monkeypatch.setattr("sluice.experiments.tables.accuracy_jobs.run_cell", lambda *a, **o: pytest.fail("run again"))
    reproduce_beta(options(tmp_path))
    assert json.loads(capsys.readouterr().out)["lines"] == answer["lines"]
    reproduce_beta(options(tmp_path, looks=3, no_run=True))
    assert json.loads(capsys.readouterr().out)["stored"] == 1, "the coin's, which is not looked at"


def test_texts_and_plots_of_lines_with_and_without_results():
    found = plan(seeds=[0])
    first = found.plan.cells[0]
    study = {
        "accepted": {"evaluated": 4, "good": 3},
        "rejected": {"evaluated": 5, "good": 1},
        "attempts": 30,
        "releases": 10,
        "measured": 960,
        "metric": 1.5,
    }
    result = {
        "study": study,
        "test_accuracy": 0.9,
        "epsilon": 2.9,
        "releases": 10,
        "mechanism": {"expected_batch_size": 64.0},
    }
    lines = lines_of(found, {first.cell: result})
    line = lines[0]
    assert (line.acceptance, line.passes) == (pytest.approx(1 / 3), pytest.approx(1.5))
    assert share_text(line.accepted).startswith("75 % [")
    assert cells_of(lines[1])[8] == "- (not run)"
    assert "not run" in markdown(lines, plots={"a": "b.png"}, sampling="All.")
    rows = list(csv.DictReader(io.StringIO(as_csv(lines))))
    assert (rows[0]["rejected_good"], rows[0]["rejected_evaluated"], rows[1]["accepted_low"]) == ("1", "5", "")
    assert shares_png(lines, "digits").startswith(b"\x89PNG")
    assert accuracy_png(lines).startswith(b"\x89PNG")


def test_a_result_of_another_study_is_run_again():
    settings = plan().plan.cells[0].settings
    watch = AttemptWatch(looks=60, records=None)
    sampling = sampling_for(settings.releases, settings.beta, looks=60, records=None).to_dict()
    result = {"settings": settings.to_dict(), "study": sampling}
    assert watch.lacks(result) == ""
    assert "other rates" in replace(watch, records=100).lacks(result)
    assert "without a study" in watch.lacks({"settings": settings.to_dict()})
