"""Options of every method: absurd values end in a plan that works or in a sentence, and none is ignored in silence."""

from __future__ import annotations

import json
import math
import time
from dataclasses import replace
from typing import Any, get_type_hints

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from sluice import methods
from sluice._base.errors import InputError
from sluice.experiments.settings import TrainSettings, settings_from
from sluice.experiments.settings_files import assignment
from sluice.mechanism.base import Mechanism
from sluice.methods import METHODS, planned_mechanism
from sluice.training.engine import PrivacyEngine

RECORDS = 90
ABSURD: tuple[Any, ...] = (
    0,
    -1,
    1,
    1e-300,
    5e-324,
    1e-10,
    1 - 2.0**-53,
    3.5,
    2000,
    1e10,
    1e300,
    math.inf,
    -math.inf,
    math.nan,
    10**9,
    10**30,
    10**400,
    "many",
    True,
    [1],
    None,
)
MATRIX_KINDS: tuple[dict[str, Any], ...] = (
    {"batches": "cyclic-poisson"},
    {"batches": "poisson", "bands": 2},
    {"batches": "balls-in-bins", "samples": 1000},
    {"batches": "balls-in-bins", "samples": 1000, "strategy": "blt"},
)


CASES = [
    (method, option, others)
    for method in ("dpis", "dpagd", "matrix")
    for option in get_type_hints(METHODS[method].options)
    for others in (MATRIX_KINDS if method == "matrix" else ({},))
]


def settings(method: str, options: dict[str, Any], **overrides: Any) -> TrainSettings:
    given: dict[str, Any] = {"method": method, "releases": 12, "delta": 1e-3, "seed": 1, "options": options}
    if method != "dpagd":
        given["batch_size"] = 20
    return settings_from({**given, **overrides})


def make_three_releases(mechanism: Mechanism) -> bool:
    """Whether the weights are still numbers."""
    model = nn.Linear(5, 3)
    engine = PrivacyEngine(seed=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = TensorDataset(torch.randn(RECORDS, 5), torch.arange(RECORDS) % 3)
    engine.make_private_by(mechanism, module=model, optimizer=optimizer, data_loader=data)
    for release in engine.releases(F.cross_entropy):
        if release == 3:
            break
    return bool(torch.isfinite(model.weight).all())


@pytest.mark.parametrize(("method", "option", "others"), CASES, ids=str)
def test_an_absurd_value_gives_a_plan_that_works_or_a_sentence(method, option, others):
    for noise_multiplier in (None,) if method == "dpagd" else (None, 5.0):
        given = {} if noise_multiplier is None else {"noise_multiplier": noise_multiplier}
        for value in ABSURD:
            began = time.process_time()
            try:
                mechanism = planned_mechanism(
                    settings(method, {**others, option: value}, **given), dataset_size=RECORDS
                )
            except InputError:
                continue
            figures = mechanism.report(delta=1e-3)
            assert all(figure.value > 0 for figure in figures), (option, value)
            assert mechanism.summary
            assert make_three_releases(mechanism), (option, value)
            assert time.process_time() - began < 10


@pytest.mark.parametrize("batches", ["cyclic-poisson", "balls-in-bins", "poisson"])
@pytest.mark.parametrize("name", ["epsilon", "delta", "noise_multiplier", "batch_size"])
def test_absurd_budgets_of_correlated_noise_give_a_plan_or_a_sentence(name, batches):
    options: dict[str, Any] = {"batches": batches, "bands": 2}
    if batches == "balls-in-bins":
        options["samples"] = 1000
    for value in (1e-300, 5e-324, 1e-10, 1 - 2.0**-53, 1e10, 1e300, 10**9):
        try:
            mechanism = planned_mechanism(settings("matrix", options, **{name: value}), dataset_size=RECORDS)
        except InputError:
            continue
        figures = mechanism.report(delta=0.5)
        assert all(figure.value >= 0 for figure in figures), value


@pytest.mark.parametrize("text", ["7" * 5000, "[" * 100_000])
def test_what_json_cannot_read_is_a_word(text):
    assert assignment(f"bands={text}", argument="option") == ("bands", text)
    with pytest.raises(InputError, match="bands="):
        settings("matrix", {"bands": text})


# Options that have no effect.


@pytest.mark.parametrize(
    ("method", "options", "overrides", "idle"),
    [
        ("matrix", {"buffers": 3}, {}, "buffers"),
        ("matrix", {"samples": 200_000}, {}, "samples"),
        ("matrix", {"batches": "poisson", "samples": 2000}, {}, "samples"),
        ("matrix", {"batches": "poisson", "strategy": "blt", "bands": 4}, {}, "bands"),
        ("matrix", {"batches": "balls-in-bins", "strategy": "banded", "buffers": 2}, {}, "buffers"),
        ("matrix", {"workload": "momentum"}, {"optimizer": "adam"}, "workload"),
        ("matrix", {"workload": "prefix", "bands": 1}, {}, "workload"),
        ("dpis", {"clip_rate": 0.0, "clip_target": 0.4}, {}, "clip_target"),
        ("dpis", {"rate_cap": 1.0, "norm_decay": 0.5}, {}, "norm_decay"),
    ],
)
def test_an_option_that_the_run_would_not_read_is_refused_by_name(method, options, overrides, idle, tmp_path):
    with pytest.raises(InputError, match=f"option {idle}=.* has no effect: .* Leave it out"):
        settings(method, options, **overrides)
    settings(method, {name: value for name, value in options.items() if name != idle}, **overrides)
    # A file may hold options for several experiments, as it may hold settings.
    file = tmp_path / "a.json"
    file.write_text(json.dumps({"method": method, "options": options, **overrides}))
    settings_from({}, file=file)


@pytest.mark.parametrize("method", METHODS)
def test_defaults_never_count_as_given(method):
    for dataset in ("digits", "mnist", "imdb"):
        chosen = settings_from({"method": method, "dataset": dataset})
        assert METHODS[method].unused_options(chosen).keys() <= chosen.options.keys()


# Accountants.


@pytest.mark.parametrize(
    ("method", "options", "accountant"),
    [
        ("matrix", {"batches": "poisson"}, "rdp"),
        ("matrix", {"batches": "balls-in-bins"}, "rdp"),
        ("dpagd", {}, "pld"),
    ],
)
def test_an_accountant_without_a_proof_is_refused_before_anything_is_calibrated(
    method, options, accountant, monkeypatch
):
    with pytest.raises(InputError, match=f"accountant='{accountant}' is not allowed for method='{method}'"):
        settings_from({"method": method, "options": options, "accountant": accountant})

    def never(settings: TrainSettings, dataset_size: int) -> Mechanism:
        raise AssertionError("planned")

    chosen = TrainSettings(method=method, options=options, accountant=accountant)
    monkeypatch.setitem(methods.METHODS, method, replace(METHODS[method], plan=never))
    with pytest.raises(InputError, match=f"accountant='{accountant}'"):
        planned_mechanism(chosen, dataset_size=1000)


@pytest.mark.parametrize("method", METHODS)
def test_the_accountants_that_settings_allow_are_those_of_the_promise(method):
    given: dict[str, Any] = {} if method in ("dpagd", "non-private") else {"noise_multiplier": 6.0}
    for options in MATRIX_KINDS if method == "matrix" else ({},):
        for accountant in ("pld", "rdp"):
            chosen = TrainSettings(
                method=method, scaling="clip", releases=12, options=options, accountant=accountant, delta=1e-3, **given
            )
            try:
                mechanism = planned_mechanism(chosen, dataset_size=1437)
            except InputError:
                mechanism = METHODS[method].plan(chosen, 1437)
                assert accountant not in mechanism.accountants
                with pytest.raises(InputError, match="is not allowed"):
                    mechanism.epsilon_after(12, delta=1e-3, accountant=accountant)
            else:
                assert not mechanism.provable or accountant in mechanism.accountants
