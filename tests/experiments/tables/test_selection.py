"""The study of selection: which runs it is made of, how they are compared, and what is written."""

from __future__ import annotations

import csv
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy.stats import t as student

from sluice._base.errors import DataError, InputError
from sluice.cli import main
from sluice.data import DataSplits
from sluice.experiments.settings import TrainSettings
from sluice.experiments.tables import inclusion, selection_cells
from sluice.experiments.tables.accuracy_results import result_path
from sluice.experiments.tables.inclusion import CLASSES, Tally, described, fitted_strength, measure_inclusion
from sluice.experiments.tables.selection import Difference, paired, selection_lines, stored_lines, write_selection
from sluice.experiments.tables.selection_cells import ARMS, REGIMES, arm_settings, plan_selection, strength_of_the_gate
from sluice.experiments.tables.selection_texts import block_title, cells_of
from sluice.experiments.tables.spoiling import LARGER, Spoiling, spoiled


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of three releases, accounted for by the accountant that takes no time."""
    original = selection_cells._settings

    def quick(dataset: str, epsilon: float, overrides: Any) -> TrainSettings:
        return replace(original(dataset, epsilon, overrides), releases=3, accountant="rdp")

    monkeypatch.setattr(selection_cells, "_settings", quick)


def run(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert not stop.value.code


def small_plan(**changes: Any) -> Any:
    asked: dict[str, Any] = {
        "datasets": ["digits"],
        "epsilons": [3.0],
        "arms": list(ARMS),
        "regimes": ["plain"],
        "seeds": [0],
    }
    return plan_selection(**{**asked, **changes})


def test_every_arm_differs_from_the_control_in_its_own_settings_alone(short):
    settings = {planned.cell.variant: planned.settings.to_dict() for planned in small_plan().cells}
    control = settings.pop("none")
    for arm, found in settings.items():
        different = {name for name in {*found, *control} if found.get(name) != control.get(name)}
        assert different, arm
        assert different <= {"gate", "strength", "tempering"}


def test_thinning_is_as_strong_as_the_gate_is_at_most(short):
    gate = arm_settings("digits", 3.0, "gate", "plain")
    strength = strength_of_the_gate(gate)
    thinning, twin = (arm_settings("digits", 3.0, arm, "plain") for arm in ("thinning", "twin"))
    assert thinning.strength == twin.tempering == strength
    sharp = strength_of_the_gate(replace(gate, gate_noise=0.9))
    assert sharp == pytest.approx(math.exp(-((5 / 6) ** 2) / 2) / math.sqrt(2 * math.pi) / 0.20233 / 3.6, rel=2e-3)
    assert strength_of_the_gate(replace(gate, gate_noise=3.0)) < sharp / 3


def test_regimes_change_what_they_say(short):
    for name, regime in REGIMES.items():
        (planned,) = small_plan(arms=["gate"], regimes=[name]).cells
        assert planned.spoiling == regime.spoiling
        for setting, value in {**regime.overrides, **regime.gate}.items():
            assert getattr(planned.settings, setting) == value
        assert planned.cell.variant == ("gate" if name == "plain" else f"gate-{name}")
    assert block_title("digits", "wrong20", 3.0) == "digits, 20 % wrong labels, epsilon 3"
    assert block_title("digits", "noiseless", 3.0).endswith("no epsilon")


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"datasets": ["cifar-10"]}, "datasets='cifar-10'"),
        ({"arms": ["nothing"]}, "arms='nothing'"),
        ({"regimes": []}, "regimes is empty"),
        ({"seeds": []}, "must not be empty"),
        ({"datasets": ["mnist"], "regimes": ["wrong20"]}, "regimes='wrong20' is only allowed for digits"),
    ],
)
def test_what_is_not_in_the_study_is_refused(asked, message):
    with pytest.raises(InputError, match=message):
        small_plan(**asked)


def test_differences_are_paired_and_their_interval_is_students():
    control = {seed: {"test_accuracy": value} for seed, value in enumerate((0.5, 0.6, 0.7, 0.8))}
    found = paired({0: 51.0, 1: 62.0, 2: 72.0, 9: 0.0}, control)
    assert found is not None
    assert (found.mean, found.seeds) == (pytest.approx(5 / 3), 3)
    assert found.half_width == pytest.approx(student.ppf(0.975, 2) * math.sqrt(1 / 3) / math.sqrt(3))
    assert found.verdict == "better"
    assert paired({9: 1.0}, control) is None
    assert Difference(mean=-1.0, half_width=0.5, seeds=3).verdict == "worse"
    assert Difference(mean=1.0, half_width=1.5, seeds=3).verdict == "no difference shown"
    assert Difference(mean=1.0, half_width=None, seeds=1).verdict == "one seed"


def stored(folder: Path, arm: str, seed: int, accuracy: float, **settings: Any) -> None:
    result = {
        "dataset": "digits",
        "variant": arm,
        "seed": seed,
        "test_accuracy": accuracy,
        "epsilon": 2.99,
        "settings": {"epsilon": 3.0, **settings},
    }
    (folder / f"digits-eps3-dpsr-cg+{arm}-seed{seed}.json").write_text(json.dumps(result))


def test_the_table_shows_what_is_stored(tmp_path):
    for seed in (0, 1, 2):
        stored(tmp_path, "none", seed, 0.9 + seed / 100)
        stored(tmp_path, "thinning", seed, 0.91 + seed / 100, strength=0.05)
        stored(tmp_path, "gate-wrong20", seed, 0.5)
    lines = selection_lines(stored_lines(tmp_path))
    assert [(line.regime, line.arm) for line in lines] == [
        ("plain", "none"),
        ("plain", "thinning"),
        ("wrong20", "gate"),
    ]
    assert cells_of(lines[0]) == ("no gate", "91.00 ± 1.00 (3)", "", "")
    assert cells_of(lines[1]) == (
        "thinning, as strong as that gate (0.05)",
        "92.00 ± 1.00 (3)",
        "+1.00 ± 0.00",
        "better",
    )
    assert lines[2].difference is None
    paths = write_selection(lines, tmp_path, inclusion="| as measured |")
    page = paths["md"].read_text("utf-8")
    assert "| as measured |" in page
    assert "## digits, 20 % wrong labels, epsilon 3" in page
    assert len(list(csv.reader(paths["csv"].read_text("utf-8").splitlines()))) == 4
    assert paths["png"].read_bytes().startswith(b"\x89PNG")


def test_what_is_no_result_is_refused(tmp_path):
    (tmp_path / "digits-eps3-dpsr-cg+none-seed0.json").write_text("{}")
    with pytest.raises(DataError, match="is not the result of a cell"):
        stored_lines(tmp_path)


def test_the_command_runs_what_is_missing_and_compares_it(short, tmp_path, capsys):
    asked = "--datasets digits --epsilons 3 --arms none,thinning4 --regimes plain,poisoned5 --seeds 0 --threads 1"
    command = f"reproduce selection {asked} --work {tmp_path}/work --results {tmp_path}/results"
    run([*command.split(), "--inclusion", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert len(found["lines"]) == 4
    assert found["failed"] == {}
    before = {path: path.stat().st_mtime_ns for path in Path(tmp_path, "results").glob("*.json")}
    assert len(before) == 6
    run(command.split())
    assert {path: path.stat().st_mtime_ns for path in before} == before
    shown = capsys.readouterr().out
    assert "thinning, strength 4" in shown
    assert "5 % poisoned" in shown
    planned = small_plan(arms=["thinning4"]).cells[0]
    result = json.loads(result_path(tmp_path / "results", planned.cell).read_text())
    assert result["mechanism"]["gate"]["strength"] == 4.0


def test_spoiled_records_are_as_many_as_said_and_the_others_as_they_were(digits: DataSplits):
    found = spoiled(digits, Spoiling(wrong_labels=0.2, poisoned=0.05)).train
    everybody = torch.arange(len(digits.train))
    wrong = found.labels != digits.train.labels
    assert int(wrong.sum()) == round(0.2 * len(wrong)) + round(0.05 * len(wrong))
    ours, theirs = found.inputs_at(everybody), digits.train.inputs_at(everybody)
    larger = (ours != theirs).flatten(1).any(1)
    assert int(larger.sum()) == round(0.05 * len(wrong))
    assert bool(wrong[larger].all())
    assert torch.equal(ours[larger], LARGER * theirs[larger])
    assert spoiled(digits, None) is digits
    assert spoiled(digits, Spoiling(wrong_labels=0.1)).test is digits.test
    with pytest.raises(InputError, match=r"poisoned=1\.5"):
        Spoiling(poisoned=1.5)


def test_a_known_tilt_is_found():
    """Batches thinned by hand: the factors of the odds, and the strength that fits them, are those they were made with."""
    generator = torch.Generator().manual_seed(3)
    metrics = torch.cat([torch.zeros(3000), torch.rand(6000, generator=generator), torch.ones(3000)]).double()
    odds = 0.1 / 0.9 * torch.exp(-0.7 * metrics)
    tally = Tally()
    for _ in range(60):
        tally.add(metrics[torch.rand(len(metrics), generator=generator) < odds / (1 + odds)], metrics)
    found = described(tally, replace(arm_settings("digits", 3.0, "gate", "plain"), gate_noise=1.0))
    assert len(found["classes"]) == CLASSES
    fitted = fitted_strength(found["classes"])
    assert fitted is not None
    assert fitted["strength"] == pytest.approx(0.7, abs=4 * fitted["error"])
    assert fitted["error"] < 0.02


def test_a_watched_run_is_an_ordinary_run(short, monkeypatch):
    monkeypatch.setattr(inclusion.WatchedExecutor, "tally", Tally())
    found = measure_inclusion("digits", 3.0, gate_noise=1.0, data_dir=None)
    tally = inclusion.WatchedExecutor.tally
    assert tally.present.sum() == 3 * 1437
    assert 0 < tally.accepted.sum() < 3 * 600
    assert sum(row["accepted"] for row in found["classes"]) <= tally.accepted.sum()
