from __future__ import annotations

import csv
import io
from typing import Any

import pytest

from sluice.experiments.tables.accuracy import write_table
from sluice.experiments.tables.accuracy_cells import Cell, Plan, plan_cells
from sluice.experiments.tables.accuracy_plot import accuracy_over_epsilon_png, accuracy_table_png
from sluice.experiments.tables.accuracy_reasons import reason_below
from sluice.experiments.tables.accuracy_table import Line, table_lines
from sluice.experiments.tables.accuracy_tables import TABLES
from sluice.experiments.tables.accuracy_texts import as_csv, below_the_printed, cells_of, claims_text, markdown

PLD = {"label": "pld", "proved": True, "meaning": "proved"}
RDP = {"label": "rdp", "proved": True, "meaning": "proved"}
PAPER = {"label": "claimed (paper)", "proved": False}


def result(accuracy: float, *, epsilon: Any = 2.99, target: float | None = 3.0, figures: Any = None) -> dict[str, Any]:
    if figures is None:
        figures = [{**PLD, "value": 2.99}, {**RDP, "value": 3.4}]
    return {
        "test_accuracy": accuracy,
        "epsilon": epsilon,
        "target_epsilon": target,
        "accountant": "pld",
        "delta": 1e-5,
        "figures": figures,
        "releases": 100,
        "wall_seconds": 12.0,
        "settings": {"model": "pixel-cnn", "features": "plain"},
    }


def plan(methods: str, datasets: str = "mnist", epsilons=(3.0,), seeds=(0, 1)) -> Plan:
    return plan_cells(datasets=datasets.split(","), methods=methods.split(","), epsilons=epsilons, seeds=seeds)


def lines_of(found: Plan, results: dict[tuple[str, int], dict[str, Any]], epsilons=(3.0,), failures=None) -> list[Line]:
    by_cell: dict[Cell, dict[str, Any]] = {
        planned.cell: results[planned.cell.row, planned.cell.seed]
        for planned in found.cells
        if (planned.cell.row, planned.cell.seed) in results
    }
    return table_lines(found, by_cell, epsilons=epsilons, failures=failures or {})


def test_seeds_become_mean_and_deviation_beside_the_printed_number():
    (line,) = lines_of(plan("dpsgd"), {("dpsgd", 0): result(0.97), ("dpsgd", 1): result(0.96)})
    assert line.mean == pytest.approx(96.5)
    assert line.deviation == pytest.approx(0.7071, abs=1e-4)
    assert line.difference == pytest.approx(-0.32)
    assert cells_of(line)[:5] == ("dpsgd", "pixel-cnn", "96.50 ± 0.71 (2)", "96.82", "-0.32")
    assert cells_of(line)[5:] == ("2.99 (pld)", "2.99 (pld)", "-")


def test_one_seed_has_no_deviation_and_missing_ones_are_counted():
    (line,) = lines_of(plan("dpsgd"), {("dpsgd", 1): result(0.96)})
    assert line.deviation is None
    assert (line.seeds, line.missing) == ((1,), (0,))
    assert cells_of(line)[2] == "96.00 (1 of 2)"


def test_cells_that_were_not_run_or_failed_say_so():
    found = plan("dpsgd,dpis")
    failures = {found.cells[2].cell: "no room"}
    assert found.cells[2].cell.method == "dpis"
    not_run, failed = lines_of(found, {}, failures=failures)
    assert cells_of(not_run)[2:7] == ("- (not run)", "96.82", "-", "-", "-")
    assert cells_of(failed)[2] == "- (failed: no room)"
    assert not_run.reason == ""


def test_what_the_paper_lacks_has_a_line_with_dashes():
    lines = lines_of(plan("all", "imdb"), {})
    (line,) = [line for line in lines if line.method == "dpsgd-hf"]
    assert cells_of(line)[2:4] == ("- (the paper prints none)", "-")


def test_a_claim_is_never_shown_as_an_epsilon():
    claims = [{**PAPER, "value": 3.0, "meaning": "printed reading: no guarantee"}]
    (line,) = lines_of(
        plan("dpsr-cg-paper", seeds=(0,)),
        {("dpsr-cg-paper", 0): result(0.98, epsilon=None, target=None, figures=claims)},
    )
    assert line.sound is None
    assert line.provable is None
    assert cells_of(line)[3:] == ("99.24", "-1.24", "-", "none", "claimed (paper): 3 printed")


def test_claimed_settings_show_what_can_be_proved_for_them():
    figures = [
        {**RDP, "value": 41.23},
        {"label": "claimed (DPSUR)", "proved": False, "value": 3.001, "meaning": "authors' reading: no guarantee"},
        {**PAPER, "value": 9.5, "meaning": "table reading: no guarantee"},
    ]
    (line,) = lines_of(
        plan("dpsur:claimed", seeds=(0,)),
        {("dpsur:claimed", 0): result(0.985, epsilon=41.23, target=None, figures=figures)},
    )
    assert cells_of(line)[5:] == (
        "-",
        "41.23 (rdp)",
        "claimed (DPSUR): 3.001 authors'; claimed (paper): 9.5 table",
    )
    assert line.printed is not None
    assert line.printed.percent == "98.12"


def test_the_worst_seed_counts_and_epsilon_is_rounded_up():
    results = {
        ("dpsgd", 0): result(0.97, epsilon=2.90001, figures=[{**PLD, "value": 2.90001}]),
        ("dpsgd", 1): result(0.97, epsilon=2.95001, figures=[{**PLD, "value": 2.95001}]),
    }
    (line,) = lines_of(plan("dpsgd"), results)
    assert cells_of(line)[5:7] == ("2.951 (pld)", "2.951 (pld)")


def test_an_infinite_epsilon_is_read_back():
    infinite = result(0.97, epsilon="inf", figures=[{**RDP, "value": "inf"}])
    (line,) = lines_of(plan("dpsgd", seeds=(0,)), {("dpsgd", 0): infinite})
    assert cells_of(line)[5:7] == ("inf (pld)", "inf (rdp)")


def test_a_run_without_privacy_stands_under_every_heading():
    free = result(0.991, epsilon=None, target=None, figures=[])
    lines = lines_of(plan("non-private", epsilons=(1.0, 3.0), seeds=(0,)), {("non-private", 0): free}, (1.0, 3.0))
    assert [(line.heading, cells_of(line)[2:7]) for line in lines] == [
        (1.0, ("99.10 (1)", "99.10", "+0.00", "-", "none")),
        (3.0, ("99.10 (1)", "99.10", "+0.00", "-", "none")),
    ]


def test_claims_without_a_word_of_it_get_one():
    figure = {"label": "somebody", "proved": False, "value": 1.0, "meaning": "own"}
    (line,) = lines_of(plan("dpsgd", seeds=(0,)), {("dpsgd", 0): result(0.97, figures=[figure])})
    assert claims_text(line.claimed) == "claimed (somebody): 1 own"


def test_reasons_are_given_below_the_printed_number_only():
    results = {("dpsgd", 0): result(0.98), ("dpsr-cg", 0): result(0.98), ("matrix", 0): result(0.9)}
    lines = lines_of(plan("dpsgd,dpsr-cg", seeds=(0,)), results)
    (text,) = below_the_printed(lines)
    assert text.startswith("mnist, epsilon 3, `dpsr-cg` (-1.24): The authors' code is not the printed algorithm")
    assert reason_below("imdb", "dpsr-cg", budget_is_proved=True).startswith("Not known")
    assert reason_below("mnist", "something new", budget_is_proved=True) == "Not known."
    assert "takes more noise" in reason_below("mnist", "dpsur", budget_is_proved=True)
    assert "the paper's own run" in reason_below("mnist", "dpsur", budget_is_proved=False)


def test_settings_of_somebodys_own_are_not_explained_by_the_methods_reasons():
    tagged = plan_cells(
        datasets=["mnist"], methods=["dpsr-cg"], epsilons=[3.0], seeds=[0], overrides={"lr": 0.2}, tag="lr0.2"
    )
    (line,) = lines_of(tagged, {("dpsr-cg:lr0.2", 0): result(0.98)})
    assert line.reason == "Run with other settings than the method's own."


def test_a_variant_has_no_line_where_it_does_not_exist():
    lines = lines_of(plan("dpsgd,dpsur:claimed", "digits,imdb"), {})
    assert [(line.dataset, line.row) for line in lines] == [
        ("digits", "dpsgd"),
        ("imdb", "dpsgd"),
        ("imdb", "dpsur:claimed"),
    ]


def everything() -> list[Line]:
    claims = [{**PAPER, "value": 3.0, "meaning": "printed reading: no guarantee"}]
    results = {
        ("dpsr-cg", 0): result(0.986),
        ("dpsr-cg", 1): result(0.987),
        ("dpsr-cg-paper", 0): result(0.99, epsilon=None, target=None, figures=claims),
        ("dpsgd", 0): result(0.97),
        ("non-private", 0): result(0.991, epsilon=None, target=None, figures=[]),
    }
    return lines_of(plan("all", "mnist,imdb"), results)


def test_markdown_has_a_section_for_each_data_set_and_heading():
    text = markdown(everything(), title="Accuracy: ours and printed", plot="table.png")
    assert "## mnist, epsilon 3, delta 1e-05\n" in text
    assert "## imdb, epsilon 3, delta 1e-05\n" in text
    assert "| dpsr-cg | pixel-cnn | 98.65 ± 0.07 (2) | 99.24 | -0.59 | 2.99 (pld) | 2.99 (pld) | - |\n" in text
    assert "| dpsgd-hf | - | - (the paper prints none) | - | - | - | - | - |\n" in text
    assert "![Ours beside the printed numbers](table.png)" in text
    assert "DPSUR's Table 2" in text
    assert "- mnist, epsilon 3, `dpsr-cg` (-0.59): " in text
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert {line.count("|") for line in rows} == {9}


def test_csv_has_one_row_for_each_line():
    lines = everything()
    rows = list(csv.DictReader(io.StringIO(as_csv(lines))))
    assert len(rows) == len(lines)
    first = rows[0]
    assert (first["dataset"], first["method"], first["seeds"]) == ("mnist", "dpsr-cg", "0 1")
    assert (first["test_accuracy_percent"], first["printed_percent"], first["difference"]) == (
        "98.6500",
        "99.24",
        "-0.59",
    )
    assert (first["sound_epsilon"], first["provable_epsilon"], first["delta"]) == ("2.99", "2.99", "1e-05")
    paper = rows[1]
    assert (paper["method"], paper["sound_epsilon"], paper["provable_epsilon"]) == ("dpsr-cg-paper", "", "")
    assert paper["claimed"] == "claimed (paper): 3 printed"
    by_method = {row["method"]: row for row in rows if row["dataset"] == "mnist"}
    assert "equal to DPSUR's Table 2" in by_method["dpsgd"]["printed_source"]
    assert "DPSUR's" not in by_method["dpsr-cg"]["printed_source"]


def test_the_plot_is_a_png_and_comes_out_the_same(tmp_path):
    lines = everything()
    files = write_table(lines, tmp_path / "new" / "table", TABLES["same-nets"])
    assert {kind: path.name for kind, path in files.items()} == {
        "md": "table.md",
        "csv": "table.csv",
        "png": "table.png",
    }
    content = files["png"].read_bytes()
    assert content.startswith(b"\x89PNG")
    assert content == accuracy_table_png(lines)
    assert content != accuracy_table_png(lines[:3])


def test_the_plot_over_epsilon_changes_with_what_it_shows(tmp_path):
    lines = everything()
    content = accuracy_over_epsilon_png(lines)
    assert content.startswith(b"\x89PNG")
    assert content != accuracy_over_epsilon_png(lines[:1])
    paths = write_table(lines, tmp_path / "best", TABLES["best"])
    assert paths["png"].read_bytes() == content
    assert "What others reach" in paths["md"].read_text("utf-8")
    assert "What others reach" not in write_table(lines, tmp_path / "same", TABLES["same-nets"])["md"].read_text(
        "utf-8"
    )
