from __future__ import annotations

import copy
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sluice.cli import main
from sluice.mechanism.attempt import Attempt
from sluice.mechanism.gates import ClippingBiasGate
from sluice.runs.trace import read_trace
from sluice.training.selective_release import SelectiveReleaseExecutor

QUICK = [
    "train", "--dataset", "digits", "--releases", "8", "--noise-multiplier", "2", "--accountant", "rdp",
    "--evaluate-every", "4", "--seed", "3",
]  # fmt: skip


def run(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    out, err = capsys.readouterr()
    return int(stop.value.code or 0), out, err


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def contents(path: Path) -> dict[str, bytes]:
    return {str(file.relative_to(path)): file.read_bytes() for file in sorted(path.rglob("*")) if file.is_file()}


def test_a_run_from_start_to_end(capsys):
    code, out, err = run(QUICK, capsys)
    assert code == 0
    assert re.search(r"noise multiplier +2\b", out)
    assert re.search(r"gate noise +2\b", out)
    assert re.search(r"reference noise +10\b", out)
    assert re.search(r"claimed \(paper\) +\d.*no guarantee", out)
    assert re.search(r"test accuracy +\d+\.\d\d %", out)
    assert len(re.findall(r"epsilon by pld +\d", out)) == 2
    assert "runs/digits-dpsr-cg-1/public/accuracy.svg" in out.replace("\n", "")
    assert [line.partition(":")[0] for line in err.splitlines()] == [f"release {number} of 8" for number in range(1, 9)]
    assert err.splitlines()[3].startswith("release 4 of 8: test accuracy")
    assert err.splitlines()[3].endswith(" if planned to stop here")
    assert (Path("runs/digits-dpsr-cg-1/public/certificate.html")).is_file()
    run(QUICK, capsys)
    assert Path("runs/digits-dpsr-cg-2").is_dir()


def test_json_alone_on_stdout(capsys):
    code, out, err = run([*QUICK, "--json", "--run", "named"], capsys)
    result = json.loads(out)
    assert code == 0
    assert err == ""
    assert {"test_accuracy", "epsilon", "delta", "accountant", "releases", "run"} <= set(result)
    assert result["run"] == "runs/named"
    assert (result["releases"], result["delta"], result["accountant"]) == (8, 1e-5, "rdp")
    assert {figure["accountant"]: figure["guaranteed"] for figure in result["figures"]} == {
        "pld": True,
        "rdp": True,
        "claimed (paper)": False,
    }


def test_calibration_is_shown_beside_the_target(capsys):
    arguments = ["train", "--releases", "6", "--epsilon", "2", "--seed", "1", "--evaluate-every", "0", "--json"]
    code, out, _ = run(arguments, capsys)
    result = json.loads(out)
    assert code == 0
    assert 1.99 < result["epsilon"] <= 2.0
    assert result["mechanism"]["gate"]["gate_noise"] > 0


def test_options_win_over_the_file(capsys, tmp_path):
    file = tmp_path / "own.toml"
    file.write_text(
        'dataset = "digits"\nreleases = 5\nlr = 0.2\nnoise_multiplier = 2.0\nseed = 1\naccountant = "rdp"\n'
    )
    code, out, _ = run(["train", "--config", str(file), "--releases", "3", "--json"], capsys)
    assert code == 0
    config = json.loads((Path(json.loads(out)["run"]) / "public" / "config.json").read_text())
    assert (config["releases"], config["lr"]) == (3, 0.2)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--releases", "0"],
        ["--dataset", "no-such-set"],
        ["--model", "no-such-model"],
        ["--features", "scattering", "--dataset", "imdb"],
        ["--features", "bag-of-words"],
        ["--method", "dpsgd", "--beta", "2"],
        ["--config", "missing.toml"],
        ["--resume", "missing"],
        ["--resume", "missing", "--lr", "2"],
        ["--resume", "missing", "--run", "other"],
        ["--threads", "0"],
        ["--checkpoint-every", "0"],
        ["--batch-size", "100000"],
        ["--model", "scattering-cnn", "--features", "plain"],
        ["--frobnicate"],
    ],
    ids=" ".join,
)
def test_errors_are_two_lines_at_most_and_leave_no_run(arguments, capsys):
    code, out, err = run(["train", *arguments], capsys)
    assert code == 2
    assert out == ""
    assert 1 <= len(err.strip().splitlines()) <= 2
    assert "Traceback" not in err
    assert not Path("runs").exists()


def test_a_taken_name_is_refused_before_any_work(capsys):
    Path("runs/taken").mkdir(parents=True)
    Path("runs/taken/file").touch()
    code, _, err = run([*QUICK, "--run", "taken"], capsys)
    assert code == 2
    assert "--resume runs/taken" in err


def test_a_finished_run_says_so_and_nothing_changes(capsys):
    _, first, _ = run([*QUICK, "--run", "mine", "--json"], capsys)
    before = contents(Path("runs/mine"))
    code, out, err = run(["train", "--resume", "mine", "--json"], capsys)
    assert code == 0
    assert "finished" in err
    assert json.loads(out) == json.loads(first)
    assert contents(Path("runs/mine")) == before


def test_the_private_folder_of_a_finished_run_is_closed_again(capsys):
    run([*QUICK, "--run", "mine"], capsys)
    Path("runs/mine/private").chmod(0o755)
    assert run(["train", "--resume", "mine"], capsys)[0] == 0
    assert Path("runs/mine/private").stat().st_mode & 0o777 == 0o700


def test_a_published_copy_of_a_finished_run_is_not_given_a_private_folder(capsys):
    run([*QUICK, "--run", "mine"], capsys)
    shutil.rmtree("runs/mine/private")
    assert run(["train", "--resume", "mine"], capsys)[0] == 0
    assert not Path("runs/mine/private").exists()


def test_ctrl_c_prints_how_to_go_on_and_resuming_gives_the_same(capsys, monkeypatch):
    from sluice.cli.train_output import Screen

    run([*QUICK, "--run", "whole"], capsys)
    original = Screen.report

    def interrupted(self: Screen, progress: Any) -> None:
        if progress.release == 5:
            raise KeyboardInterrupt
        original(self, progress)

    with monkeypatch.context() as patch:
        patch.setattr(Screen, "report", interrupted)
        code, _, err = run([*QUICK, "--run", "stopped"], capsys)
    assert code == 130
    command = re.search(r"sluice (train --resume runs/stopped)$", err.strip())
    assert command is not None
    code, _, _ = run(command[1].split(), capsys)
    assert code == 0
    assert contents(Path("runs/stopped/public")) == contents(Path("runs/whole/public"))


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_on_a_real_process(tmp_path, sent):
    """The signal itself, in the middle of a run."""
    arguments = [*QUICK, "--releases", "5000", "--evaluate-every", "10", "--run", "real"]
    process = subprocess.Popen(
        [sys.executable, "-m", "sluice", *arguments],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    ledger = tmp_path / "runs" / "real" / "public" / "ledger.jsonl"
    for _ in range(1200):
        if ledger.exists() and ledger.read_bytes().count(b"\n") > 3:
            break
        time.sleep(0.1)
    process.send_signal(sent)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 130
    assert "Resume with: sluice train --resume runs/real" in err
    assert "Traceback" not in err


def burn_attempts(patch: pytest.MonkeyPatch) -> None:
    original_attempt, original_begin = SelectiveReleaseExecutor._attempt_passes, ClippingBiasGate.begin

    def rejected(self: ClippingBiasGate, *args: Any, **options: Any) -> Attempt:
        original_begin(self, *args, **options)
        return Attempt(limit=0.0, count=1, measure=self.measure)

    def attempt(self: SelectiveReleaseExecutor, loss: Any) -> bool:
        state = copy.deepcopy(self.noise.state_dict())
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(ClippingBiasGate, "begin", rejected)
            assert not original_attempt(self, loss)
        self.noise.load_state_dict(state)
        return original_attempt(self, loss)

    patch.setattr(SelectiveReleaseExecutor, "_attempt_passes", attempt)


def test_more_rejected_attempts_change_nothing_that_is_shown_or_public(capsys, monkeypatch, tmp_path):
    shown = []
    for name in ("fewer", "more"):
        (tmp_path / name).mkdir()
        with monkeypatch.context() as patch:
            patch.chdir(tmp_path / name)
            if name == "more":
                burn_attempts(patch)
            shown.append(run([*QUICK, "--run", "same"], capsys))
    fewer, more = (tmp_path / name / "runs" / "same" for name in ("fewer", "more"))
    assert shown[0] == shown[1]
    assert contents(fewer / "public") == contents(more / "public")
    attempts = [sum(row.attempts for row in read_trace(path / "private" / "trace.jsonl")) for path in (fewer, more)]
    assert attempts[1] >= attempts[0] + 8


def test_private_values_are_shown_on_request_only(capsys):
    _, out, err = run([*QUICK, "--run", "a"], capsys)
    assert "PRIVATE" not in out + err
    assert "attempts" not in out + err
    _, out, err = run([*QUICK, "--run", "b", "--show-private"], capsys)
    assert len(re.findall(r"PRIVATE release \d+: \d+ attempts", err)) == 8
    assert "PRIVATE" not in out


def test_tensorboard_gets_public_values_without_times(capsys):
    pytest.importorskip("tensorboard", reason="tensorboard is not installed: pip install 'sluice[tensorboard]'")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    code, _, _ = run([*QUICK, "--run", "board", "--tensorboard"], capsys)
    assert code == 0
    folder = Path("runs/board/private/tensorboard")
    events = EventAccumulator(str(folder)).Reload()
    tags = {kind: found for kind, found in events.Tags().items() if found}
    assert set(tags) == {"scalars"}
    assert set(tags["scalars"]) == {"test_accuracy", "epsilon_if_planned_to_stop_here"}
    assert [(event.step, event.wall_time) for event in events.Scalars("epsilon_if_planned_to_stop_here")] == [
        (4, 4.0),
        (8, 8.0),
    ]
    run([*QUICK, "--run", "plain"], capsys)
    assert contents(Path("runs/plain/public")) == contents(Path("runs/board/public"))


def test_holding_out_reports_the_held_out_part_only(capsys):
    arguments = [*QUICK, "--hold-out", "0.2", "--json"]
    code, out, err = run(arguments, capsys)
    assert code == 2
    assert "evaluate_every=4 has no effect: held-out records are looked at once" in err
    place = arguments.index("--evaluate-every")
    code, out, _ = run([*arguments[:place], *arguments[place + 2 :]], capsys)
    result = json.loads(out)
    assert code == 0
    assert result["test_accuracy"] is None
    assert 0 < result["held_out_accuracy"] <= 1


def test_nothing_is_claimed_for_a_hidden_reference(capsys):
    code, out, _ = run([*QUICK, "--hidden-reference"], capsys)
    assert code == 0
    assert "epsilon by" not in out
    assert "Nothing is proved" in out


def test_a_terminal_gets_a_bar(capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    code, _, err = run(QUICK, capsys)
    assert code == 0
    assert "releases" in err
    assert "8/8" in err
    assert "release 4 of 8" not in err


def test_a_record_whose_gradient_is_not_finite_is_not_spoken_of(tmp_path, capsys):
    """Warnings are errors in tests, so one that is not kept back would end the run."""
    x = np.random.RandomState(0).randn(60, 4).astype(np.float32)
    x[7] = 3e38
    np.savez(tmp_path / "own.npz", x=x, y=np.arange(60) % 2)
    arguments = ["train", "--dataset", str(tmp_path / "own.npz"), "--releases", "3", "--noise-multiplier", "2"]
    arguments += ["--batch-size", "48", "--accountant", "rdp", "--seed", "1", "--model", "linear"]
    code, out, err = run(arguments, capsys)
    assert code == 0, err
    assert "finite" not in out + err


def test_a_delta_that_promises_nothing_is_remarked_on_everywhere(capsys):
    code, out, err = run([*QUICK, "--delta", "0.5", "--run", "loose"], capsys)
    assert code == 0
    assert " ".join(out.split()).count("delta=0.5 is not below 1/N") == 2  # in the plan and in the result
    assert "DeltaWarning" not in err
    certificate = json.loads(Path("runs/loose/public/certificate.json").read_text())
    assert any("1/N" in warning for warning in certificate["warnings"])
    assert "1/N" in Path("runs/loose/public/certificate.html").read_text()


def few_records(records: int, *, labels: tuple[int, ...], uneven: bool = False) -> None:
    generator = np.random.default_rng(0)
    y = np.array([labels[int(i % 12 == 0) if uneven else i % len(labels)] for i in range(records)])
    np.savez("few.npz", x=generator.normal(size=(records, 4)) + y[:, None], y=y)


SMALL = [
    "train",
    "--dataset",
    "few.npz",
    "--releases",
    "4",
    "--noise-multiplier",
    "2",
    "--accountant",
    "rdp",
    "--seed",
    "1",
]


@pytest.mark.parametrize("method", ["dpsgd", "dpsr-cg", "dpsur"])
def test_a_batch_that_nobody_chose_fits_the_records(capsys, method):
    few_records(60, labels=(0, 1))
    code, _, err = run([*SMALL, "--method", method], capsys)
    assert code == 0, err
    recorded = json.loads(next(Path("runs").rglob("config.json")).read_text())
    assert 1 <= recorded["batch_size"] <= 15
    code, _, err = run([*SMALL, "--method", method, "--batch-size", "256"], capsys)
    assert code == 2
    assert "batch_size=256" in err


def test_gaps_and_uneven_classes_are_remarked_on_from_test_records(capsys):
    few_records(400, labels=(0, 7), uneven=True)
    code, out, _ = run([*SMALL, "--run", "uneven", "--json"], capsys)
    assert code == 0
    result = json.loads(out)
    assert [each["name"] for each in result["by_class"] if each["records"]] == ["0", "7"]
    assert 0 <= result["balanced_accuracy"] <= 1
    notes = " ".join(result["notes"])
    assert "No test record has the class 1, 2, 3, 4, 5, 6: 2 of 8 classes occur" in notes
    assert re.search(r"9\d\.\d % of the test records have the class 0.*Balanced accuracy", notes)
    assert json.loads(Path("runs/uneven/public/classes.json").read_text()) == result["by_class"]
    few_records(400, labels=(0, 1))
    _, out, _ = run([*SMALL, "--run", "even"], capsys)
    assert "balanced accuracy" in out
    assert "Note" not in out


def test_a_table_with_names_of_classes_is_trained_and_used(capsys):
    from sluice import load_model

    rows = [f"{i % 2 + (i % 7) / 10},{i % 5},{('no', 'yes')[i % 2]}" for i in range(300)]
    Path("mine.csv").write_text("\n".join(["a,b,label", *rows]) + "\n")
    quick = ["--releases", "6", "--noise-multiplier", "1", "--accountant", "rdp", "--seed", "1", "--run", "table"]
    command = ["train", "--dataset", "mine.csv", "--class-names", "no,yes", *quick]
    code, out, err = run([*command, "--json"], capsys)
    assert code == 0, err
    assert [each["name"] for each in json.loads(out)["by_class"]] == ["no", "yes"]
    model = load_model("runs/table")
    assert model.classes == ("no", "yes")
    assert model.predict(np.array([[0.1, 1.0], [1.5, 1.0]])).shape == (2,)
    assert run([*command[:3], *quick], capsys)[0] == 2


def test_where_own_data_lies_is_not_published_and_the_run_is_resumed_from_there(capsys, monkeypatch):
    def interrupted(trace, row):
        raise KeyboardInterrupt

    rows = [f"{i % 2 + (i % 7) / 10},{i % 5},{i % 2}" for i in range(300)]
    folder = Path("patients of Dr Smith").absolute()
    folder.mkdir()
    (folder / "visits.csv").write_text("\n".join(["a,b,label", *rows]) + "\n")
    quick = ["--releases", "6", "--noise-multiplier", "1", "--accountant", "rdp", "--seed", "1", "--run", "own"]
    with monkeypatch.context() as patched:
        patched.setattr("sluice.experiments.run.TraceFile.append", interrupted)
        assert run(["train", "--dataset", str(folder / "visits.csv"), *quick], capsys)[0] != 0
    code, _, err = run(["train", "--resume", "runs/own"], capsys)
    assert code == 0, err
    public = Path("runs/own/public")
    assert json.loads((public / "config.json").read_text())["dataset"] == "visits.csv"
    assert (public / "model.safetensors").exists()
    assert not [file for file in public.iterdir() if b"Smith" in file.read_bytes()]
    assert run(["verify", "runs/own"], capsys)[0] == 0
