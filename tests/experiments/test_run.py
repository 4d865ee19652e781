from __future__ import annotations

import copy
import json
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from sluice._base.errors import DataError, InputError
from sluice._base.interrupts import DelayedInterrupt, sigterm_as_interrupt
from sluice.data import DataSplits, hold_out
from sluice.data.examples import Examples, StoredExamples, TensorExamples
from sluice.data.transforms import unscaled
from sluice.experiments import fitting
from sluice.experiments import judge as judge_module
from sluice.experiments import recorded as recorded_module
from sluice.experiments.run import Progress, Training, TrainResult, accuracy, recorded_run
from sluice.experiments.settings import TrainSettings, settings_from
from sluice.mechanism.attempt import Attempt
from sluice.mechanism.gates import ClippingBiasGate
from sluice.runs.journal import Journal
from sluice.runs.ledger import Ledger, read_ledger
from sluice.runs.trace import read_trace
from sluice.runs.verify import verify_run
from sluice.training import keeping as keeping_module
from sluice.training.selective_release import GaveUpError, SelectiveReleaseExecutor

RELEASES = 8


def short(**overrides: Any) -> TrainSettings:
    quick = {"releases": RELEASES, "noise_multiplier": 2.0, "accountant": "rdp", "seed": 7, "evaluate_every": 4}
    return settings_from({**quick, **overrides})


def train(path: Path, splits: DataSplits, settings: TrainSettings | None = None, **options: Any) -> TrainResult:
    return Training(settings=settings or short(), splits=splits, **options).start(path)


def resume(path: Path, splits: DataSplits, **options: Any) -> TrainResult:
    recorded = recorded_run(path)
    return Training(settings=recorded.settings, mechanism=recorded.mechanism, splits=splits, **options).resume(path)


def public_files(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted((path / "public").iterdir())}


def stop_at(release: int) -> Callable[[Progress], None]:
    def report(progress: Progress) -> None:
        if progress.release == release:
            raise KeyboardInterrupt

    return report


@pytest.fixture(scope="module")
def whole(digits: DataSplits, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short seeded run that nothing interrupted."""
    path = tmp_path_factory.mktemp("whole") / "run"
    train(path, digits)
    return path


def test_a_run_leaves_what_it_promises(whole, digits):
    assert verify_run(whole).holds
    result = recorded_run(whole).result
    assert result is not None
    assert result.releases == RELEASES
    assert result.test_accuracy is not None
    assert set(public_files(whole)) == {
        "accuracy.jsonl", "accuracy.svg", "certificate.html", "certificate.json", "certificate.md", "classes.json",
        "config.json", "epsilon.svg", "features.json", "ledger.jsonl", "model.safetensors",
    }  # fmt: skip
    assert (whole / "private").stat().st_mode & 0o777 == 0o700
    assert len(read_trace(whole / "private" / "trace.jsonl")) == RELEASES


def test_the_published_weights_are_those_that_were_tested(whole, digits):
    recorded = recorded_run(whole)
    model = Training(settings=recorded.settings, mechanism=recorded.mechanism, splits=digits).model
    model.load_state_dict(load_file(whole / "public" / "model.safetensors"))
    lines = [json.loads(line) for line in (whole / "public" / "accuracy.jsonl").read_text().splitlines()]
    assert [line["release"] for line in lines] == [4, 8]
    planned = [line["epsilon_if_planned_to_stop_here"] for line in lines]
    assert recorded.result is not None
    assert planned[0] < planned[1] == recorded.result.epsilon
    assert accuracy(model, digits.test) == lines[1]["test_accuracy"] == recorded.result.test_accuracy


def test_it_learns(digits, tmp_path):
    result = train(tmp_path / "run", digits, short(releases=60, noise_multiplier=1.0, evaluate_every=0))
    assert result.test_accuracy is not None
    assert result.test_accuracy > 0.85


@pytest.mark.parametrize("canaries", [None, 20])
def test_rows_in_half_precision_are_read_as_they_are_stored(canaries, digits, tmp_path, monkeypatch):
    def in_half(examples: Examples) -> TensorExamples:
        return TensorExamples(examples.batch(range(len(examples)))[0].half(), examples.labels, unscaled)

    splits = replace(digits, train=in_half(digits.train), test=in_half(digits.test))
    settings, read = short(model="linear", canaries=canaries), []
    as_stored = StoredExamples.inputs_at
    monkeypatch.setattr(StoredExamples, "inputs_at", lambda *given: read.append(1) or as_stored(*given))
    found = train(tmp_path / "stored", splits, settings)
    assert bool(read) == (canaries is None)
    monkeypatch.setattr(TensorExamples, "stored", lambda examples: examples)
    wanted = train(tmp_path / "single", splits, settings)
    weights = [load_file(result.run / "public" / "model.safetensors") for result in (found, wanted)]
    for name, value in weights[1].items():
        torch.testing.assert_close(weights[0][name], value, rtol=1e-4, atol=1e-6)


def test_a_seed_repeats_a_run_and_cryptographic_noise_does_not(whole, digits, tmp_path):
    train(tmp_path / "again", digits)
    assert public_files(tmp_path / "again") == public_files(whole)
    first, second = (train(tmp_path / name, digits, settings_from(_unseeded())) for name in "ab")
    weights = [load_file(result.run / "public" / "model.safetensors") for result in (first, second)]
    assert not torch.equal(weights[0]["classifier.weight"], weights[1]["classifier.weight"])


def _unseeded() -> dict[str, Any]:
    return {"releases": RELEASES, "noise_multiplier": 2.0, "accountant": "rdp", "evaluate_every": 0}


@pytest.mark.parametrize(
    ("overrides", "stopped", "every"),
    [
        ({}, 3, 1),
        ({}, 4, 1),
        ({}, 7, 3),
        ({"gate": "coin"}, 5, 2),
        ({"gate": "thinning", "strength": 2.0}, 5, 2),
        ({"method": "dpsgd", "optimizer": "adam", "lr_schedule": "cosine"}, 5, 1),
        ({"lr_schedule": "linear", "ema_decay": 0.0}, 2, 1),
    ],
    ids=["plain", "at-evaluation", "few-checkpoints", "coin", "thinning", "adam-cosine", "linear-no-average"],
)
def test_an_interrupted_seeded_run_ends_as_if_it_never_was(digits, tmp_path, overrides, stopped, every):
    settings = short(**overrides)
    train(tmp_path / "whole", digits, settings)
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "stopped", digits, settings, checkpoint_every=every, report=stop_at(stopped))
    assert recorded_run(tmp_path / "stopped").result is None
    assert not (tmp_path / "stopped" / "public" / "model.safetensors").exists()
    result = resume(tmp_path / "stopped", digits)
    assert result.notes == ()
    assert public_files(tmp_path / "stopped") == public_files(tmp_path / "whole")


@pytest.mark.parametrize("place", ["draft_checkpoint", "read_evaluations", "predicted_classes"])
def test_a_crash_anywhere_can_be_resumed(whole, digits, tmp_path, monkeypatch, place):
    """The machine fails in the middle of a release, of publishing or of an evaluation."""
    owner = {
        "draft_checkpoint": keeping_module,
        "read_evaluations": recorded_module,
        "predicted_classes": judge_module,
    }[place]
    original = getattr(owner, place)
    calls = 0

    def failing(*args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == {"draft_checkpoint": 4, "read_evaluations": 1, "predicted_classes": 2}[place]:
            raise OSError("the machine failed")
        return original(*args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(owner, place, failing)
        with pytest.raises(OSError, match="the machine failed"):
            train(tmp_path / "run", digits)
    if recorded_run(tmp_path / "run").result is None:
        resume(tmp_path / "run", digits)
    assert public_files(tmp_path / "run") == public_files(whole)


def test_a_crash_between_record_and_model_file_adds_no_second_record(whole, digits, tmp_path, monkeypatch):
    from sluice.runs import public_files as publication

    def failing(path: Path, content: bytes, *, public: bool) -> None:
        if path.name == "model.safetensors":
            raise OSError("the disk failed")
        original(path, content, public=public)

    original = publication.write_atomically
    with monkeypatch.context() as patch:
        patch.setattr(publication, "write_atomically", failing)
        with pytest.raises(OSError, match="the disk failed"):
            train(tmp_path / "run", digits)
    resume(tmp_path / "run", digits)
    assert public_files(tmp_path / "run") == public_files(whole)


def _crash_in(patch: pytest.MonkeyPatch, owner: Any, name: str, *, at: Callable[..., bool]) -> None:
    """The machine fails in the middle of a call."""
    original = getattr(owner, name)

    def failing(*args: Any, **options: Any) -> Any:
        if at(*args):
            raise OSError("the machine failed")
        return original(*args, **options)

    patch.setattr(owner, name, failing)


def test_a_crash_of_an_unseeded_run_is_charged(digits, tmp_path, monkeypatch):
    settings = settings_from(_unseeded())
    with monkeypatch.context() as patch, pytest.raises(OSError, match="failed"):
        _crash_in(patch, Journal, "append", at=lambda journal, release, payload: release == 5)
        train(tmp_path / "run", digits, settings)
    result = resume(tmp_path / "run", digits)
    assert result.notes == ("Releases lost when the run was interrupted, which stay charged: 1.",)
    assert read_ledger(tmp_path / "run" / "public" / "ledger.jsonl").spent == RELEASES == result.releases
    # Seven updates are in the weights and eight are paid for.
    assert len(read_trace(tmp_path / "run" / "private" / "trace.jsonl")) == RELEASES - 1
    assert verify_run(tmp_path / "run").holds


def test_a_crash_after_the_journal_loses_nothing(digits, tmp_path, monkeypatch):
    """The release was not applied yet; it is when the run is resumed."""
    with monkeypatch.context() as patch, pytest.raises(OSError, match="failed"):
        _crash_in(patch, SelectiveReleaseExecutor, "update", at=lambda executor, _: executor.released == 4)
        train(tmp_path / "run", digits, settings_from(_unseeded()))
    assert resume(tmp_path / "run", digits).notes == ()
    assert read_ledger(tmp_path / "run" / "public" / "ledger.jsonl").spent == RELEASES


def test_evaluations_of_lost_releases_are_forgotten(digits, tmp_path):
    """Of eight releases the last two were lost: what was measured after them belongs to weights that are gone."""

    def crash(progress: Progress) -> None:
        if progress.release == RELEASES:
            raise OSError("the machine failed")

    settings = settings_from({**_unseeded(), "evaluate_every": 7})
    with pytest.raises(OSError, match="failed"):
        train(tmp_path / "run", digits, settings, checkpoint_every=6, report=crash)
    resume(tmp_path / "run", digits)
    lines = (tmp_path / "run" / "public" / "accuracy.jsonl").read_text().splitlines()
    assert [json.loads(line)["release"] for line in lines] == [6]


def test_ctrl_c_loses_nothing_though_checkpoints_are_rare(digits, tmp_path):
    settings = settings_from(_unseeded())
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "run", digits, settings, checkpoint_every=100, report=stop_at(5))
    assert resume(tmp_path / "run", digits).notes == ()


def test_ctrl_c_waits_between_record_and_checkpoint(digits, tmp_path, monkeypatch):
    def interrupted(self: Ledger, number: int) -> None:
        original(self, number)
        if number == 3:
            os.kill(os.getpid(), signal.SIGINT)

    original = Ledger.append_release
    with monkeypatch.context() as patch:
        patch.setattr(Ledger, "append_release", interrupted)
        with pytest.raises(KeyboardInterrupt):
            train(tmp_path / "run", digits, settings_from(_unseeded()))
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert read_ledger(tmp_path / "run" / "public" / "ledger.jsonl").spent == 3
    assert resume(tmp_path / "run", digits).notes == ()


def test_a_delayed_interrupt_arrives():
    interrupt = DelayedInterrupt()
    interrupt.let_go()
    interrupt.hold()
    interrupt.hold()
    os.kill(os.getpid(), signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        interrupt.let_go()
    interrupt.let_go()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_sigterm_is_an_interrupt_that_waits_too():
    before = signal.getsignal(signal.SIGTERM)
    interrupt = DelayedInterrupt()
    with sigterm_as_interrupt():
        interrupt.hold()
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            interrupt.let_go()
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_run_goes_on_only_with_its_own_data_and_settings(digits, tmp_path):
    path = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        train(path, digits, report=stop_at(2))
    fewer = copy.copy(digits)
    object.__setattr__(fewer, "train", digits.train.subset(range(1400)))
    with pytest.raises(DataError, match="training data is not what"):
        resume(path, fewer)
    recorded = recorded_run(path)
    other = Training(settings=short(lr=0.9), mechanism=recorded.mechanism, splits=digits)
    with pytest.raises(DataError, match="not what the run began with"):
        other.resume(path)
    other = Training(settings=recorded.settings, mechanism=recorded.mechanism.with_releases(9), splits=digits)
    with pytest.raises(DataError, match="another mechanism"):
        other.resume(path)


def test_a_folder_in_use_is_refused(whole, digits):
    before = public_files(whole)
    with pytest.raises(InputError, match="exists"):
        train(whole, digits)
    assert public_files(whole) == before


def burn_an_attempt_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before every attempt, make another one that is measured and rejected; the noise then goes on as without it."""
    original_attempt, original_begin = SelectiveReleaseExecutor._attempt_passes, ClippingBiasGate.begin

    def rejected(self: ClippingBiasGate, *args: Any, **options: Any) -> Attempt:
        original_begin(self, *args, **options)
        return Attempt(limit=0.0, count=1, measure=self.measure)

    def attempt(self: SelectiveReleaseExecutor, loss: Any) -> bool:
        state = copy.deepcopy(self.noise.state_dict())
        with monkeypatch.context() as patch:
            patch.setattr(ClippingBiasGate, "begin", rejected)
            assert not original_attempt(self, loss)
        self.noise.load_state_dict(state)
        return original_attempt(self, loss)

    monkeypatch.setattr(SelectiveReleaseExecutor, "_attempt_passes", attempt)


def test_rejected_attempts_leave_no_mark_in_public(whole, digits, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        burn_an_attempt_each_time(patch)
        train(tmp_path / "run", digits)
    plain, padded = (read_trace(path / "private" / "trace.jsonl") for path in (whole, tmp_path / "run"))
    assert all(more.attempts > fewer.attempts for more, fewer in zip(padded, plain, strict=True))
    assert public_files(tmp_path / "run") == public_files(whole)


SECRET_KEYS = {"attempts", "attempt", "measured", "metric", "seconds", "time", "loss", "losses", "batch", "accepted"}


def keys_in(value: Any) -> set[str]:
    if isinstance(value, dict):
        return set(value) | {key for item in value.values() for key in keys_in(item)}
    if isinstance(value, list):
        return {key for item in value for key in keys_in(item)}
    return set()


def test_no_public_file_holds_a_private_value(whole):
    rows = read_trace(whole / "private" / "trace.jsonl")
    secrets = [repr(row.metric) for row in rows if row.metric] + [repr(row.seconds) for row in rows]
    secrets += [(whole / "private" / "data.sha256").read_text().strip()]
    for name, content in public_files(whole).items():
        text = content.decode("latin-1")
        assert not [secret for secret in secrets if secret in text], name
        if name.endswith((".json", ".jsonl")):
            documents = [text] if name.endswith(".json") else text.splitlines()
            assert not SECRET_KEYS & {key for document in documents for key in keys_in(json.loads(document))}, name


def test_progress_is_public(digits, tmp_path):
    seen: list[Progress] = []
    train(tmp_path / "run", digits, report=seen.append)
    assert [progress.release for progress in seen] == list(range(1, RELEASES + 1))
    assert [progress.release for progress in seen if progress.evaluation] == [4, 8]
    assert set(vars(seen[0])) == {"release", "releases", "evaluation"}


class _Unreadable(Examples):
    """Test records that nobody may look at."""

    def __init__(self, examples: Examples) -> None:
        self.labels = examples.labels

    def inputs_at(self, indices: Tensor) -> Tensor:
        raise AssertionError("the test set was read")

    def subset(self, indices: Any) -> Any:
        raise AssertionError("the test set was read")


def test_holding_out_leaves_the_test_set_alone(digits, tmp_path):
    splits = copy.copy(digits)
    object.__setattr__(splits, "test", _Unreadable(digits.test))
    settings = replace(short(), hold_out=0.25, evaluate_every=1)
    result = train(tmp_path / "run", splits, settings)
    assert result.test_accuracy is None
    assert result.held_out_accuracy is not None
    assert 0 < result.held_out_accuracy <= 1
    assert result.mechanism.expected_batch_size == 256
    assert result.mechanism.sample_rate == 256 / len(hold_out(digits.train, 0.25, 0)[0])
    names = set(public_files(tmp_path / "run"))
    assert not names & {"accuracy.jsonl", "accuracy.svg"}
    secret = repr(result.held_out_accuracy)
    assert not [name for name, content in public_files(tmp_path / "run").items() if secret.encode() in content]
    assert recorded_run(tmp_path / "run").result == result


def test_a_run_whose_records_were_held_out_by_another_rule_is_not_resumed(digits, tmp_path, monkeypatch):
    def by_position(examples: Examples, fraction: float, seed: int) -> tuple[Examples, Examples]:
        order = np.random.RandomState(seed).permutation(len(examples))
        count = round(len(examples) * fraction)
        return examples.subset(np.sort(order[count:])), examples.subset(np.sort(order[:count]))

    settings = replace(short(), hold_out=0.25)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(fitting, "hold_out", by_position)
        train(tmp_path / "run", digits, settings, report=stop_at(3))
    before = read_ledger(tmp_path / "run" / "public" / "ledger.jsonl").spent
    with pytest.raises(DataError, match="Earlier versions of Sluice chose other records"):
        resume(tmp_path / "run", digits)
    assert read_ledger(tmp_path / "run" / "public" / "ledger.jsonl").spent == before


def test_giving_up_ends_the_run_and_says_so(digits, tmp_path, monkeypatch):
    def draw(self: SelectiveReleaseExecutor) -> Tensor:
        if self.released == 5:
            raise GaveUpError("release 6 used up its attempts")
        return original(self)

    original = SelectiveReleaseExecutor.draw
    monkeypatch.setattr(SelectiveReleaseExecutor, "draw", draw)
    result = train(tmp_path / "run", digits)
    assert result.releases == 5
    assert result.epsilon == result.mechanism.epsilon_after(RELEASES, delta=result.delta, accountant="rdp")
    assert result.notes == ("release 6 used up its attempts",)
    recorded = recorded_run(tmp_path / "run").result
    assert recorded is not None
    assert (recorded.releases, recorded.epsilon) == (5, result.epsilon)
    assert verify_run(tmp_path / "run").holds


def test_a_hidden_reference_has_no_epsilon(digits, tmp_path):
    result = train(tmp_path / "run", digits, short(hidden_reference=True))
    assert result.epsilon is None
    lines = (tmp_path / "run" / "public" / "accuracy.jsonl").read_text().splitlines()
    assert all(json.loads(line)["epsilon_if_planned_to_stop_here"] is None for line in lines)
    assert not (tmp_path / "run" / "public" / "accuracy.svg").exists()


def test_the_engine_makes_what_the_ledger_promises(digits, tmp_path):
    training = Training(settings=short(), splits=digits)
    training.start(tmp_path / "run")
    assert training.engine.mechanism == training.mechanism
    header = read_ledger(tmp_path / "run" / "public" / "ledger.jsonl").header
    assert header.mechanism == training.mechanism.to_dict()
    assert header.noise == "seeded"


def test_memory_and_checkpoints_change_no_result(whole, digits, tmp_path):
    train(tmp_path / "run", digits, checkpoint_every=5, max_physical_batch_size=64)
    first, second = (load_file(path / "public" / "model.safetensors") for path in (whole, tmp_path / "run"))
    assert torch.allclose(first["classifier.weight"], second["classifier.weight"], atol=1e-6)


def test_accuracy_counts_the_right_ones(digits):
    class Zero(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            assert not self.training
            return nn.functional.one_hot(torch.zeros(len(x), dtype=torch.int64), 10).float()

    model = Zero().train()
    assert accuracy(model, digits.test) == pytest.approx((digits.test.labels == 0).double().mean().item())
    assert model.training


def test_test_records_are_seen_once_and_classes_agree_with_the_accuracy(digits, tmp_path, monkeypatch):
    seen: list[int] = []
    original = judge_module.predicted_classes

    def watched(model: nn.Module, examples: Examples) -> Tensor:
        seen.append(len(examples))
        return original(model, examples)

    monkeypatch.setattr(judge_module, "predicted_classes", watched)
    result = train(tmp_path / "run", digits)
    assert seen == [len(digits.test)] * 2, "after 4 releases and after 8"
    right = sum(each.records * (each.accuracy or 0.0) for each in result.by_class)
    assert result.test_accuracy == pytest.approx(right / len(digits.test))


def test_the_callers_random_state_is_left_alone(digits):
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    Training(settings=short(), splits=digits)
    assert torch.equal(torch.rand(3), expected)
