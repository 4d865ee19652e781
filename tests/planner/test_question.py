from __future__ import annotations

import json
import shlex

import pytest

from sluice._base.errors import InputError
from sluice.accounting.privacy_report import privacy_report
from sluice.cli import main
from sluice.experiments.settings import settings_from
from sluice.methods.selective import selective_mechanism
from sluice.planner.question import Question, answer

RUN = {"dataset_size": "60000", "batch_size": "1024", "releases": "300", "delta": "1e-5"}


def figures(found):
    return dict(found["figures"])


def test_an_epsilon_follows_from_the_noise():
    found = answer(Question.read(RUN | {"noise_multiplier": "1.5"}))
    exact = privacy_report(sample_rate=1024 / 60000, noise_multiplier=1.5, releases=300, delta=1e-5).pld
    assert exact <= float(found["epsilon"]) <= exact * 1.001
    assert figures(found)["epsilon, proved"] == found["epsilon"]
    assert found["svg"].startswith("<?xml")


@pytest.mark.parametrize("gate", ["none", "clipping-bias"])
def test_noise_that_is_shown_meets_the_target(gate):
    found = answer(Question.read(RUN | {"target_epsilon": "2", "gate": gate}))
    assert float(found["epsilon"]) <= 2.0
    if gate == "none":
        shown = float(figures(found)["noise multiplier"])
        assert privacy_report(sample_rate=1024 / 60000, noise_multiplier=shown, releases=300, delta=1e-5).pld <= 2.0
    else:
        assert "claimed by the paper's formula, no guarantee" in figures(found)


@pytest.mark.parametrize("target", ["0.7", "2", "3.1"])
def test_the_noises_of_a_gate_that_are_shown_keep_the_target(target, capsys):
    shown = figures(answer(Question.read(RUN | {"target_epsilon": target, "gate": "clipping-bias"})))
    sizes = ["--dataset-size", "60000", "--batch-size", "1024", "--releases", "300", "--delta", "1e-5"]
    rows = {"noise": "noise multiplier", "gate": "gate noise", "reference": "reference noise multiplier"}
    noise, gate, reference = (shown[row] for row in rows.values())
    with pytest.raises(SystemExit):
        main(
            [
                "epsilon",
                *sizes,
                "--noise-multiplier",
                noise,
                "--gate-noise",
                gate,
                "--reference-noise",
                reference,
                "--json",
            ]
        )
    assert json.loads(capsys.readouterr().out)["pld"] <= float(target)
    with pytest.raises(SystemExit):
        main(["plan", *sizes, "--epsilon", target, "--json"])
    exact = json.loads(capsys.readouterr().out)
    assert float(gate) >= exact["gate_noise"]
    assert float(reference) >= exact["reference_noise"]


@pytest.mark.parametrize("given", [{"target_epsilon": "2"}, {"noise_multiplier": "1.5"}])
@pytest.mark.parametrize("gate", ["none", "clipping-bias"])
def test_the_command_gives_the_same_epsilon(given, gate, capsys):
    found = answer(Question.read(RUN | given | {"gate": gate}))
    with pytest.raises(SystemExit):
        main([*shlex.split(found["command"])[1:], "--json"])
    printed = json.loads(capsys.readouterr().out)
    assert printed["pld"] <= float(found["epsilon"]) <= printed["pld"] * 1.001


@pytest.mark.parametrize("bound", [0.5, 8.0, 50.0])
def test_no_run_costs_more_than_the_planner_says_is_proved(bound):
    words = {
        "dataset_size": "100000",
        "batch_size": "8192",
        "releases": "200",
        "delta": "1e-5",
        "noise_multiplier": "1.5",
    }
    found = answer(Question.read(words | {"gate": "clipping-bias"}))
    trained = selective_mechanism(
        settings_from(
            {"noise_multiplier": 1.5, "gate_noise": 1.5, "releases": 200, "batch_size": 8192, "scaling_bound": bound}
        ),
        dataset_size=100_000,
    )
    assert trained.epsilon_after(200, delta=1e-5, accountant="pld") <= float(found["epsilon"])


def test_a_delta_that_allows_a_record_to_be_published_is_warned_of():
    assert answer(Question.read(RUN | {"noise_multiplier": "1.5"}))["warnings"] == []
    (warning,) = answer(Question.read(RUN | {"noise_multiplier": "1.5", "delta": "0.001"}))["warnings"]
    assert "1/N" in warning


@pytest.mark.parametrize("gate", ["none", "clipping-bias"])
def test_an_epsilon_of_zero_is_drawn(gate):
    words = {"dataset_size": "1e9", "batch_size": "1", "releases": "1", "delta": "0.1", "noise_multiplier": "200"}
    assert "</svg>" in answer(Question.read(words | {"gate": gate}))["svg"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"noise_multiplier": "x"}, "noise_multiplier='x'"),
        ({"noise_multiplier": "nan"}, "noise_multiplier"),
        ({"noise_multiplier": "1e999"}, "noise_multiplier"),
        ({"noise_multiplier": "0"}, "from 0.3 to 200"),
        ({"noise_multiplier": "1", "target_epsilon": "1"}, "exactly one"),
        ({}, "exactly one"),
        ({"noise_multiplier": "1", "batch_size": "60001"}, "at most dataset_size=60000"),
        ({"noise_multiplier": "1", "batch_size": "2.5"}, "integer"),
        ({"noise_multiplier": "1", "releases": "1e12"}, "releases"),
        ({"noise_multiplier": "1", "gate": "coin"}, "gate='coin'"),
        ({"noise_multiplier": "1", "__class__": "1"}, "'__class__'"),
    ],
)
def test_what_makes_no_sense_is_refused(words, said):
    with pytest.raises(InputError, match=said.replace("(", r"\(")):
        Question.read(RUN | words)


@pytest.mark.parametrize("name", RUN)
def test_what_is_missing_is_named(name):
    with pytest.raises(InputError, match=f"{name} is missing"):
        Question.read({key: value for key, value in RUN.items() if key != name} | {"noise_multiplier": "1"})
