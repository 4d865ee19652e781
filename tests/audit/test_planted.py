"""Errors planted into the real engine are found; the sound engine is never refuted."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path

import pytest

FILE = Path(__file__).parents[2] / "benchmarks" / "audit.py"


@pytest.fixture(scope="module")
def study():
    specification = importlib.util.spec_from_file_location("planted_errors", FILE)
    module = importlib.util.module_from_spec(specification)
    sys.modules["planted_errors"] = module  # dataclasses look their module up
    specification.loader.exec_module(module)
    yield module
    del sys.modules["planted_errors"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["as-coded", "sampled-x4"])
def test_one_run_with_a_thousand_canaries_refutes_large_errors(study, name):
    assert study.audit(study.cases()[name](), canaries=1000).refuted


@pytest.mark.slow
@pytest.mark.parametrize("name", ["clip-bound-x2", "noise-halved"])
def test_one_run_with_ten_thousand_canaries_refutes_factors_of_two(study, name):
    assert study.audit(study.cases()[name](), canaries=10_000).refuted


@pytest.mark.slow
def test_what_rejected_attempts_leave_in_the_optimizer_is_found(study):
    case = study.cases()["momentum-kept"]()
    assert any(study.audit(case, canaries=1000).refuted for _ in range(4))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sound", "published-setting-sound", "momentum-sound"])
def test_the_sound_engine_is_not_refuted(study, name):
    found = [study.audit(study.cases()[name](), canaries=1000) for _ in range(3)]
    assert sum(each.refuted for each in found) <= 1  # each may be, once in twenty


@pytest.mark.slow
@pytest.mark.parametrize(("name", "epsilon"), [("sound-4", 4.0), ("sound-8", 8.0)])
def test_ten_thousand_canaries_find_half_of_epsilon(study, name, epsilon):
    found = study.audit(study.cases()[name](), canaries=10_000)
    assert not found.refuted
    assert found.bounds[1].lower_bound >= epsilon / 2


@pytest.mark.parametrize("name", ["clip-bound-x2", "noise-halved", "sampled-x4", "as-coded", "momentum-kept"])
def test_a_planted_error_runs_through_the_engine(study, name):
    case = study.cases()[name]()
    short = replace(case, mechanism=replace(case.mechanism, releases=2))
    assert study.audit(short, canaries=100).bounds


def test_planting_an_error_leaves_nothing_behind(study):
    from sluice import Clip

    weights = Clip._weights
    with study.clip_bound_twice_too_long():
        assert Clip._weights is not weights
    assert Clip._weights is weights
