from __future__ import annotations

import json
import sys

import pytest

from sluice._base.errors import InputError
from sluice.experiments.bench import measure as module
from sluice.experiments.bench.measure import Measurement, measure, ratios
from sluice.experiments.bench.report import write_json, write_plot
from sluice.experiments.bench.steps import OURS
from sluice.experiments.bench.suites import SUITES


def result(method: str, seconds: float | None, megabytes: float | None = None) -> Measurement:
    return Measurement(model="m", batch=8, threads=1, method=method, seconds=seconds, megabytes=megabytes, skipped=None)


RESULTS = [
    result("plain", 3.0, 10.0),
    result("channels last", 2.0, 10.0),
    result("sluice", 2.5, 20.0),
    result("sluice, gradients only", 2.0, 20.0),
    result("sluice, norms only", 1.0, 15.0),
    result("vmap", 5.0, 15.0),
    result("opacus hooks", 10.0, 100.0),
    result("opacus ghost", 7.5, 80.0),
    result("opacus ew", None),
]


def test_ratios_compare_with_the_fastest_floor_and_the_best_opacus_mode():
    (row,) = ratios(RESULTS)
    assert row["fastest_ordinary"] == "channels last"
    assert row["best_opacus"] == "opacus ghost"
    assert row["release_over_ordinary"] == pytest.approx(1.25)
    assert row["gradients_over_ordinary"] == pytest.approx(1.0)
    assert row["norms_over_gradients"] == pytest.approx(0.5)
    assert row["opacus_over_release"] == pytest.approx(3.0)
    assert row["vmap_over_release"] == pytest.approx(2.0)
    assert row["fastdp_over_release"] is None
    assert row["memory_over_opacus"] == pytest.approx(0.25)


def test_results_are_written_as_json_and_as_a_plot(tmp_path):
    write_json(RESULTS, tmp_path / "bench.json")
    write_plot(RESULTS, tmp_path / "bench.png")
    assert len(json.loads((tmp_path / "bench.json").read_text())["measurements"]) == len(RESULTS)
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")


SLOW = {"wrn-16-4", "vit", "vit-class-token", "gru", "lora"}
MODELS = ["pixel-cnn-26k", "transformer", *SUITES["wide"]]


@pytest.mark.parametrize("model", [pytest.param(m, marks=pytest.mark.slow) if m in SLOW else m for m in MODELS])
def test_our_methods_run_on_the_models(monkeypatch, model):
    monkeypatch.setattr(module, "METHODS", ("plain", "microbatches", *OURS))
    results = measure([model], [4], [1], repeats=1, memory=False, report=lambda line: None)
    assert all(r.seconds is not None and r.seconds > 0 for r in results)


@pytest.mark.parametrize("method", ["vmap", "opacus hooks", "opacus ghost"])
def test_peers_run_on_the_models(monkeypatch, method):
    monkeypatch.setattr(module, "METHODS", ("plain", method))
    results = measure(["mlp"], [4], [1], repeats=1, memory=False, report=lambda line: None)
    assert [r.skipped for r in results] == [None, None]


def test_a_peer_that_is_not_there_is_skipped_and_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "fastDP", None)
    monkeypatch.setattr(module, "METHODS", ("plain", "fastdp ghost"))
    results = measure(["mlp"], [4], [1], repeats=1, memory=False, report=lambda line: None)
    assert "not installed" in (results[1].skipped or "")


def test_the_command_refuses_unknown_models(capsys):
    from sluice.cli.bench import gradients

    with pytest.raises(InputError, match="models='resnet'"):
        gradients(models="resnet")
    with pytest.raises(InputError, match="batches='x'"):
        gradients(models="transformer", batches="x")


def test_modes_that_are_too_slow_are_measured_once_or_left_out(monkeypatch):
    calls: dict[tuple[str, int], int] = {}
    now = [0.0]
    cost = {"plain": 0.001, "sluice": 0.001, "sluice, norms only": 0.001, "opacus hooks": 0.005, "opacus ghost": 0.4}

    def make(method, scenario, net, size):
        def step():
            calls[method, size] = calls.get((method, size), 0) + 1
            now[0] += cost[method] * size

        return step

    monkeypatch.setattr(module, "METHODS", tuple(cost))
    monkeypatch.setattr(module, "make_step", make)
    monkeypatch.setattr(module.time, "process_time", lambda: now[0])
    results = measure(["transformer"], [8, 400], [1], repeats=3, memory=False, report=lambda line: None)
    found = {(r.method, r.batch): r for r in results}
    assert found["opacus hooks", 8].repeats == 3
    assert found["opacus ghost", 8].repeats == 1
    assert found["opacus ghost", 8].seconds == pytest.approx(3.2)
    assert found["opacus ghost", 400].skipped == "would take about 160 s a step"
    assert calls == {**{(m, b): 4 for m in cost for b in (8, 400) if m != "opacus ghost"}, ("opacus ghost", 8): 1}
