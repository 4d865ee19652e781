"""Numbers and counts to predict: the losses, what is published in the place of accuracy, and what is refused."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from sluice._base.errors import DataError, InputError
from sluice.cli import command_line
from sluice.data import load
from sluice.experiments.objective import Objective
from sluice.experiments.preparing import prepare
from sluice.experiments.published import load_model
from sluice.experiments.recorded import recorded_run
from sluice.experiments.rehearsal import Rehearsal
from sluice.experiments.run import Training, TrainResult
from sluice.experiments.settings import TrainSettings, settings_from, settings_of
from sluice.runs.evaluations import read_evaluations
from sluice.runs.folder import RunFolder
from sluice.runs.report import report_page
from sluice.runs.scores import DEVIANCE, R_SQUARED, SQUARED_ERROR

SMALL = {"releases": 12, "batch_size": 100, "noise_multiplier": 1.0, "accountant": "rdp", "seed": 1, "gate": "none"}
SQUARED, POISSON = Objective(loss="squared"), Objective(loss="poisson")
OUTPUTS = st.lists(st.floats(-30, 30, width=32), min_size=1, max_size=8)


@pytest.fixture(scope="module")
def own(tmp_path_factory) -> dict[str, Path]:
    """Numbers from 0 to 100, and counts, that depend on x linearly and by their logarithm."""
    folder, random = tmp_path_factory.mktemp("own"), np.random.default_rng(0)
    x = random.uniform(-1, 1, (600, 3)).astype(np.float32)
    np.savez(folder / "squared.npz", x=x, y=50 + x @ [30.0, -20.0, 0.0] + random.normal(0, 2, 600))
    np.savez(folder / "poisson.npz", x=x, y=random.poisson(np.exp(1 + x @ [0.8, -0.5, 0.0])))
    return {name: folder / f"{name}.npz" for name in ("squared", "poisson")}


def settings(own: dict[str, Path], loss: str, **changes: object) -> TrainSettings:
    return settings_from({"dataset": str(own[loss]), "loss": loss, **SMALL, **changes})


def trained(chosen: TrainSettings, path: Path) -> TrainResult:
    return Training(settings=chosen, splits=prepare(chosen)).start(path)


@given(OUTPUTS)
def test_losses_are_those_of_torch(values):
    said = torch.tensor(values, dtype=torch.float64)[:, None]
    wanted = torch.arange(len(values), dtype=torch.float64)
    assert torch.allclose(SQUARED(said, wanted), (said[:, 0] - wanted).square().mean())
    low = said.clamp(max=19.0).requires_grad_(True)
    (slope,) = torch.autograd.grad(POISSON(low, wanted), low)
    torch_loss = torch.nn.functional.poisson_nll_loss(low[:, 0], wanted, log_input=True)
    assert torch.allclose(slope, torch.autograd.grad(torch_loss, low)[0])
    assert float(POISSON(low.detach(), wanted)) >= -1e-6


def test_a_huge_rate_has_a_finite_gradient():
    output = torch.tensor([[1e4]], requires_grad=True)
    (slope,) = torch.autograd.grad(POISSON(output, torch.zeros(1)), output)
    assert float(slope) == pytest.approx(math.exp(20), rel=1e-5)
    assert math.isfinite(POISSON.scores(POISSON.predictions(torch.tensor([[-1e30]])), torch.ones(1))[DEVIANCE])
    assert math.isfinite(SQUARED.scores(SQUARED.predictions(torch.tensor([[math.inf]])), torch.ones(1))[SQUARED_ERROR])


def test_a_range_clips_targets_and_scales_them_and_predictions_come_back():
    ranged = Objective(loss="squared", bounds=(0.0, 100.0))
    output = torch.tensor([[-1.0], [0.5], [1.0]])
    assert float(ranged(output, torch.tensor([-7.0, 75.0, 1e9]))) == 0.0
    assert ranged.predictions(output).tolist() == [0.0, 75.0, 100.0]
    counted = Objective(loss="poisson", bounds=(0.0, 10.0))
    assert torch.equal(counted(output, torch.full((3,), 99.0)), POISSON(output, torch.full((3,), 10.0)))


def test_scores_are_those_of_their_definitions():
    said, wanted = torch.tensor([1.0, 2.0, 4.0]), torch.tensor([1.0, 3.0, 5.0])
    assert SQUARED.scores(said.double(), wanted) == {
        SQUARED_ERROR: pytest.approx(2 / 3),
        R_SQUARED: pytest.approx(1 - 2 / 8),
    }
    assert set(SQUARED.scores(said.double(), torch.ones(3))) == {SQUARED_ERROR}
    expected = 2 * (3 * math.log(3 / 2) - 1 + 5 * math.log(5 / 4) - 1) / 3
    assert POISSON.scores(said.double(), wanted)[DEVIANCE] == pytest.approx(expected)
    assert POISSON.scores(said[:1].double(), torch.zeros(1))[DEVIANCE] == 2.0


@pytest.mark.parametrize("model", ["linear", "mlp"])
def test_numbers_are_learnt_published_and_predicted(own, tmp_path, model):
    chosen = settings(own, "squared", target_range="0,100", model=model, releases=30)
    result = trained(chosen, tmp_path / "run")
    assert result.test_scores is not None
    assert result.test_scores[R_SQUARED] > 0.8
    assert (result.test_accuracy, result.by_class) == (None, ())
    assert recorded_run(tmp_path / "run").result == replace(result, notes=())
    test = prepare(chosen).test
    x, y = test.batch(torch.arange(len(test)))
    published = load_model(tmp_path / "run")
    found = published.predict(x.numpy())
    assert found.shape == (len(test),)
    assert published.objective.scores(found, y) == pytest.approx(dict(result.test_scores))
    with pytest.raises(InputError, match="has no probabilities of classes"):
        published.probabilities(x.numpy())


def test_counts_are_learnt_and_the_screen_and_the_report_say_so(own, tmp_path):
    options = [f"--{name.replace('_', '-')}={value}" for name, value in SMALL.items()]
    run = str(tmp_path / "run")
    shown = CliRunner().invoke(
        command_line(), ["train", f"--dataset={own['poisson']}", "--loss=poisson", f"--run={run}", *options]
    )
    assert shown.exit_code == 0, shown.output
    assert "test Poisson deviance" in shown.output
    assert "accuracy" not in shown.output.replace("accuracy.svg", "")
    evaluations = read_evaluations(RunFolder.look(run))
    deviances = [(each.test_scores or {})[DEVIANCE] for each in evaluations]
    assert deviances[-1] < 0.7 * deviances[0]
    page, holds = report_page([Path(run)], delta=None)
    assert holds
    assert "Test Poisson deviance" in page
    assert f">{deviances[-1]:.4g}<" in page
    for path in sorted(Path(run, "public").iterdir()):
        if path.suffix in (".md", ".html", ".svg"):
            assert "ccuracy" not in path.read_text().replace("accuracy.jsonl", ""), path
    assert "test Poisson deviance" in Path(run, "public", "accuracy.svg").read_text()
    said = json.loads(CliRunner().invoke(command_line(), ["predict", run, str(own["poisson"]), "--json"]).stdout)
    assert len(said["predictions"]) == 600
    assert min(said["predictions"]) > 0
    lines = CliRunner().invoke(command_line(), ["predict", run, str(own["poisson"])]).stdout.splitlines()
    assert lines[0] == "record,prediction"


@pytest.mark.parametrize("method", ["dpsgd", "dpsr-cg", "dpsur", "dpagd", "dpis", "non-private"])
def test_methods_train_numbers(own, tmp_path, method):
    free = {"releases": 2, "seed": 1}
    if method != "dpagd":
        free |= {"batch_size": 100}
    if method not in ("dpagd", "non-private"):
        free |= {"noise_multiplier": 2.0, "accountant": "rdp"}
    chosen = settings_from({"dataset": str(own["squared"]), "loss": "squared", "method": method, **free})
    assert trained(chosen, tmp_path / "run").test_scores is not None


def test_held_out_numbers_stay_private_and_canaries_are_found(own, tmp_path):
    held = trained(settings(own, "squared", hold_out=0.3), tmp_path / "held")
    assert held.test_scores is None
    assert set(held.held_out_scores or {}) == {SQUARED_ERROR, R_SQUARED}
    assert not (tmp_path / "held" / "public" / "accuracy.jsonl").exists()
    trained(settings(own, "poisson", canaries=20), tmp_path / "audited")
    assert list((tmp_path / "audited" / "public").glob("audit*"))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"loss": "squared", "classes": 3}, "classes=3 is not allowed with loss='squared'"),
        ({"loss": "poisson", "class_names": "a,b"}, "class_names='a,b' is not allowed with loss='poisson'"),
        ({"loss": "squared", "model": "softmax"}, "model='softmax' is not allowed with loss='squared'"),
        ({"target_range": "0,1"}, "target_range='0,1' is not allowed for classes"),
        ({"loss": "cross-entropy", "target_range": "0,1"}, "not allowed for classes"),
        ({"loss": "squared", "target_range": "1,0"}, "it must be LOW,HIGH"),
        ({"loss": "squared", "target_range": "0,inf"}, "it must be LOW,HIGH"),
        ({"loss": "squared", "target_range": "5"}, "it must be LOW,HIGH"),
        ({"loss": "poisson", "target_range": "-1,5"}, "counts are not negative"),
        ({"loss": "hinge"}, "loss='hinge' is not allowed"),
    ],
    ids=str,
)
def test_settings_that_do_not_go_together_are_refused(given, message):
    with pytest.raises(InputError, match=message):
        settings_from({"dataset": "own.csv", **given})


def test_data_that_does_not_fit_the_loss_is_refused(own):
    with pytest.raises(InputError, match="numbers are predicted from arrays and tables of your own"):
        prepare(settings_from({"dataset": "digits", "loss": "squared", "model": "linear", "features": "plain"}))
    chosen = settings(own, "squared")
    with pytest.raises(DataError, match="were loaded as numbers"):
        Training(settings=replace(chosen, loss=None), splits=prepare(chosen))
    with pytest.raises(DataError, match="were loaded as classes"):
        Training(settings=chosen, splits=load("digits"))


def test_rehearsals_are_of_classes(own):
    chosen = settings(own, "squared")
    training = Training(settings=chosen, splits=prepare(chosen))
    with pytest.raises(InputError, match="rehearsals are of classes"):
        Rehearsal(settings=chosen, splits=prepare(chosen), mechanism=training.mechanism)


def test_settings_without_a_loss_are_written_as_before(own):
    plain = settings_from({})
    assert {"loss", "target_range"} & plain.to_dict().keys() == set()
    chosen = settings(own, "squared", target_range="0,100")
    assert settings_of(chosen.to_dict(), where="here") == chosen
