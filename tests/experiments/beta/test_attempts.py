from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from sluice.data import DataSplits, load
from sluice.experiments.beta.attempts import AttemptStudy, Sampling
from sluice.experiments.run import Training
from sluice.experiments.settings import TrainSettings, settings_from
from sluice.runs.trace import read_trace
from sluice.training.selective_release import ObservedAttempt

ALL = Sampling(release_rate=1.0, rejected_rate=1.0)


@pytest.fixture(scope="module")
def splits() -> DataSplits:
    return load("digits")


def settings(**changes: Any) -> TrainSettings:
    chosen = {"dataset": "digits", "noise_multiplier": 1.0, "gate_noise": 1.0, "reference_noise": 5.0, "seed": 3}
    small = {"releases": 4, "batch_size": 64, "evaluate_every": 0, "scaling_bound": 1.0}
    return settings_from({**chosen, **small, **changes}, recipe="paper")


def run(
    path: Path, chosen: TrainSettings, splits: DataSplits, study: AttemptStudy | None = None
) -> list[tuple[int, int, float]]:
    Training(
        settings=chosen,
        splits=splits,
        checkpoint_every=chosen.releases,
        observe_attempt=None if study is None else study.observe_attempt,
    ).start(path)
    return [(row.attempts, row.measured, row.metric) for row in read_trace(path / "private" / "trace.jsonl")]


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_a_studied_run_is_the_run_without_the_study(optimizer, splits, tmp_path):
    chosen = settings(optimizer=optimizer, lr=0.05)
    plain = run(tmp_path / "plain", chosen, splits)
    study = AttemptStudy(seed=3, sampling=ALL, path=tmp_path / "rows.jsonl")
    studied = run(tmp_path / "studied", chosen, splits, study)
    assert studied == plain
    assert sum(attempts for attempts, _, _ in plain) > chosen.releases, "no attempt was rejected"
    for name in ("model.safetensors", "metrics.jsonl"):
        before, after = ((tmp_path / kind / "public" / name) for kind in ("plain", "studied"))
        assert not before.exists() or before.read_bytes() == after.read_bytes()
    assert (tmp_path / "plain" / "public" / "model.safetensors").exists()


def test_every_attempt_is_counted_and_looked_at_where_the_rates_are_one(splits, tmp_path):
    study = AttemptStudy(seed=3, sampling=ALL, path=tmp_path / "rows.jsonl")
    trace = run(tmp_path / "run", settings(), splits, study)
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [row["rejected_attempts"] + 1 for row in rows] == [attempts for attempts, _, _ in trace]
    assert all(len(row["accepted"]) == 1 and len(row["rejected"]) == row["rejected_attempts"] for row in rows)
    found = study.result(tmp_path / "run")["study"]
    assert found["attempts"] == sum(attempts for attempts, _, _ in trace)
    assert found["accepted"]["evaluated"] == 4


def test_a_look_is_what_one_step_does_to_the_mean_loss(splits, tmp_path):
    """The candidate of a batch is applied with the run's optimizer: against plain autograd with next to no noise."""
    seen: list[tuple[float, float]] = []
    study = AttemptStudy(seed=3, sampling=ALL, path=tmp_path / "rows.jsonl")

    def observe(attempt: ObservedAttempt) -> None:
        study.observe_attempt(attempt)
        if attempt.accepted:
            seen.append((study._changes["accepted"][-1], _change_by_hand(attempt)))

    chosen = settings(noise_multiplier=1e-6, lr=0.5, momentum=0.0, releases=2)
    Training(settings=chosen, splits=splits, observe_attempt=observe).start(tmp_path / "run")
    assert len(seen) == 2
    for found, expected in seen:
        assert found == pytest.approx(expected, rel=1e-3)


def _change_by_hand(attempt: ObservedAttempt) -> float:
    context, mechanism = attempt.context, attempt.mechanism
    model = context.module
    everything = next(context.pairs(torch.arange(context.dataset_size), size=context.dataset_size))
    total = {name: torch.zeros_like(parameter) for name, parameter in model.named_parameters()}
    for index in attempt.indices:
        x, y = next(context.pairs(index.reshape(1)))
        model.zero_grad()
        attempt.loss(model(x), y).backward()
        norm = torch.sqrt(sum(p.grad.square().sum() for p in model.parameters()))
        weight = mechanism.scaling(norm.reshape(1))
        for name, parameter in model.named_parameters():
            total[name] += weight * parameter.grad
    model.zero_grad()
    with torch.no_grad():
        before = attempt.loss(model(everything[0]), everything[1]).item()
        moved = {
            name: parameter - 0.5 * total[name] / mechanism.expected_batch_size
            for name, parameter in model.named_parameters()
        }
        after = attempt.loss(torch.func.functional_call(model, moved, everything[0]), everything[1]).item()
    return after - before


def test_rates_choose_releases_and_rejected_attempts(splits, tmp_path):
    nothing = AttemptStudy(seed=3, sampling=Sampling(release_rate=0.0, rejected_rate=1.0), path=tmp_path / "none")
    run(tmp_path / "run", settings(), splits, nothing)
    assert nothing.result(tmp_path / "run")["study"]["accepted"]["evaluated"] == 0
    accepted = AttemptStudy(
        seed=3, sampling=Sampling(release_rate=1.0, rejected_rate=0.0, records=100), path=tmp_path / "some"
    )
    run(tmp_path / "other", settings(), splits, accepted)
    found = accepted.result(tmp_path / "other")["study"]
    assert (found["accepted"]["evaluated"], found["rejected"]["evaluated"]) == (4, 0)


def test_a_resumed_run_repeats_its_rows(splits, tmp_path):
    path = tmp_path / "rows.jsonl"
    run(tmp_path / "whole", settings(), splits, AttemptStudy(seed=3, sampling=ALL, path=path))
    whole = path.read_text()

    class Stop(Exception):
        pass

    again = AttemptStudy(seed=3, sampling=ALL, path=tmp_path / "again.jsonl")

    def stopping(attempt: ObservedAttempt) -> None:
        if attempt.release == 3:
            raise Stop
        again.observe_attempt(attempt)

    training = Training(settings=settings(), splits=splits, checkpoint_every=2, observe_attempt=stopping)
    with pytest.raises(Stop):
        training.start(tmp_path / "run")
    resumed = AttemptStudy(seed=3, sampling=ALL, path=tmp_path / "again.jsonl")
    Training(settings=settings(), splits=splits, checkpoint_every=2, observe_attempt=resumed.observe_attempt).resume(
        tmp_path / "run"
    )
    assert (tmp_path / "again.jsonl").read_text() == whole


def test_each_release_has_a_source_of_its_own_that_a_resumed_run_has_again(tmp_path):
    study = AttemptStudy(seed=3, sampling=ALL, path=tmp_path / "rows")
    drawn = [float(study._source(f"release {number}").uniform((1,))) for number in (1, 2, 1)]
    assert drawn[0] == drawn[2] != drawn[1]
    other = AttemptStudy(seed=4, sampling=ALL, path=tmp_path / "rows")
    assert float(other._source("release 1").uniform((1,))) != drawn[0]
