from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from sluice._base.errors import InputError
from sluice._base.grids import RELEASE_GRID
from sluice.accounting import create_accountant
from sluice.accounting.events import plain_release
from sluice.accounting.matrix.strategy import BandedToeplitz, identity
from sluice.accounting.matrix.workload import momentum_workload
from sluice.experiments.run import Progress, Training, recorded_run
from sluice.experiments.settings import TrainSettings, settings_from
from sluice.mechanism.base import Mechanism
from sluice.mechanism.registry import mechanism_from_dict
from sluice.mechanism.selective_release import SelectiveRelease
from sluice.methods import planned_mechanism
from sluice.methods.matrix import MatrixMechanism
from sluice.methods.matrix import plan as matrix_plan
from sluice.runs.ledger import read_ledger
from sluice.runs.privacy_spent import joint_spending
from sluice.runs.verify import verify_run
from sluice.training.engine import PrivacyEngine
from sluice.training.options import TrainingOptions

OPTIONS: dict[str, dict[str, Any]] = {
    "cyclic-poisson": {"bands": 3},
    "balls-in-bins": {"strategy": "blt", "workload": "prefix", "samples": 2000},
    "poisson": {"bands": 3},
}


def quick(batches: str, **overrides: Any) -> TrainSettings:
    options = {"batches": batches, **OPTIONS[batches]}
    given = {"method": "matrix", "releases": 12, "noise_multiplier": 6.0, "seed": 2, "evaluate_every": 0}
    return settings_from({**given, "delta": 1e-3, "options": options, **overrides})


@pytest.mark.parametrize("batches", OPTIONS)
def test_every_kind_of_batches_trains_resumes_and_is_verified(batches, digits, tmp_path):
    settings = quick(batches)
    whole = Training(settings=settings, splits=digits, checkpoint_every=4).start(tmp_path / "whole")

    def stop(progress: Progress) -> None:
        if progress.release == 7:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Training(settings=settings, splits=digits, checkpoint_every=4, report=stop).start(tmp_path / "stopped")
    recorded = recorded_run(tmp_path / "stopped")
    Training(settings=recorded.settings, mechanism=recorded.mechanism, splits=digits).resume(tmp_path / "stopped")
    for name in ("model.safetensors", "ledger.jsonl", "certificate.json"):
        stopped, never = (tmp_path / run / "public" / name for run in ("stopped", "whole"))
        assert stopped.read_bytes() == never.read_bytes()
    assert verify_run(tmp_path / "whole").holds
    assert whole.mechanism == mechanism_from_dict(json.loads(json.dumps(whole.mechanism.to_dict())))


def test_runs_whose_events_do_not_compose_are_added(digits, tmp_path):
    contents = []
    for name, batches in (("a", "poisson"), ("b", "cyclic-poisson")):
        Training(settings=quick(batches), splits=digits).start(tmp_path / name)
        contents.append(read_ledger(Path(tmp_path / name / "public" / "ledger.jsonl")))
    joint = joint_spending(contents)
    mechanisms = [mechanism_from_dict(each.header.mechanism) for each in contents]
    apart = [mechanism.epsilon_after(12, delta=5e-4, accountant="pld") for mechanism in mechanisms]
    assert joint.epsilon == pytest.approx(sum(apart))


def test_the_noise_that_training_sees_has_the_promised_covariance():
    """On data without gradients (all inputs zero, a frozen bias) the update is the noise alone."""
    diagonals = (1.0, 0.6, 0.3)
    mechanism = MatrixMechanism(
        strategy=BandedToeplitz(diagonals),
        batches="cyclic-poisson",
        groups=3,
        sample_rate=0.5,
        expected_batch_size=10.0,
        max_grad_norm=2.0,
        noise_multiplier=3.0,
        releases=6,
    )
    model = nn.Linear(200, 100, bias=False)
    data = TensorDataset(torch.zeros(60, 200), torch.zeros(60, dtype=torch.long))
    engine = PrivacyEngine(seed=4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    engine.make_private_by(mechanism, module=model, optimizer=optimizer, data_loader=data)
    weights = [model.weight.detach().clone()]
    for _ in engine.releases(F.cross_entropy):
        weights.append(model.weight.detach().clone())
    noise = torch.stack([before - after for before, after in itertools.pairwise(weights)])
    noise = noise.flatten(1).double() * 10.0
    column = np.array([*diagonals, 0, 0, 0])
    matrix = np.array([[column[row - col] if row >= col else 0 for col in range(6)] for row in range(6)])
    std = 3.0 * 2.0 * np.linalg.norm(column)
    expected = std**2 * np.linalg.inv(matrix.T @ matrix)
    found = (noise @ noise.T / noise.shape[1]).numpy()
    assert np.abs(found - expected).max() < 0.06 * expected.max()
    assert abs(expected[0, 1]) > 0.2 * expected[0, 0]  # correlated enough for this test to tell


def test_steps_that_a_crash_took_are_skipped_and_never_made_again():
    mechanism = planned_mechanism(quick("cyclic-poisson", batch_size=20), dataset_size=90)
    data = TensorDataset(torch.randn(90, 5), torch.arange(90) % 3)

    def engine() -> PrivacyEngine:
        model = nn.Linear(5, 3)
        fresh = PrivacyEngine()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        fresh.make_private_by(mechanism, module=model, optimizer=optimizer, data_loader=data)
        return fresh

    crashed, resumed = engine(), engine()
    releases = crashed.releases(F.cross_entropy)
    for _ in range(3):
        next(releases)
    resumed.load_state_dict(crashed.state_dict(), lost=2)
    made = list(resumed.releases(F.cross_entropy))
    assert len(made) == 12 - 3 - 2
    state = resumed.state_dict()["releases"]
    assert state["correlated"]["position"] == 12


def test_a_second_crash_does_not_skip_what_the_first_one_took_again():
    mechanism = planned_mechanism(quick("cyclic-poisson", batch_size=20), dataset_size=90)
    data = TensorDataset(torch.randn(90, 5), torch.arange(90) % 3)
    engines = []
    for _ in range(3):
        model = nn.Linear(5, 3)
        engines.append(PrivacyEngine())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        engines[-1].make_private_by(mechanism, module=model, optimizer=optimizer, data_loader=data)
    first, second, third = engines
    assert next(first.releases(F.cross_entropy)) == 1
    second.load_state_dict(first.state_dict(), lost=2)
    assert next(second.releases(F.cross_entropy)) == 2
    third.load_state_dict(second.state_dict(), lost=3)
    state = third.state_dict()["releases"]
    assert state["correlated"]["position"] == 2 + 3
    assert len(list(third.releases(F.cross_entropy))) == 12 - 5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"strategy": "blt", "batches": "cyclic-poisson"}, "no amplification is proved"),
        ({"batches": "shuffled"}, "batches='shuffled'"),
        ({"bands": 0}, "bands=0"),
        ({"workload": "adam"}, "workload='adam'"),
    ],
)
def test_combinations_without_a_proof_are_refused(options, message):
    with pytest.raises(InputError, match=message):
        settings_from({"method": "matrix", "options": options})


def test_more_bands_than_batches_in_an_epoch_are_refused():
    with pytest.raises(InputError, match="groups=9 is not allowed"):
        planned_mechanism(settings_from({"method": "matrix", "options": {"bands": 9}}), dataset_size=1437)


def test_a_strategy_that_its_sampling_has_no_proof_for_is_refused_in_a_ledger_too():
    mechanism = planned_mechanism(quick("cyclic-poisson"), dataset_size=1437)
    with pytest.raises(InputError, match="groups=2"):
        mechanism_from_dict({**mechanism.to_dict(), "groups": 2})
    with pytest.raises(InputError, match="certificate=None"):
        mechanism_from_dict({**mechanism.to_dict(), "batches": "balls-in-bins"})


def test_calibration_meets_the_budget_and_picks_the_bands_with_the_least_error():
    settings = settings_from({"method": "matrix", "dataset": "mnist", "epsilon": 3.0})
    mechanism = planned_mechanism(settings, dataset_size=60000)
    assert isinstance(mechanism, MatrixMechanism)
    assert 2.9 < mechanism.epsilon_after(mechanism.releases, delta=1e-5, accountant="pld") <= 3.0
    assert mechanism.strategy.bands is not None
    assert mechanism.strategy.bands > 1
    assert mechanism.epsilon_after(100, delta=1e-5, accountant="pld") < 1.5


@pytest.mark.parametrize("noise", [3.0, 100.0, 2000.0])
@pytest.mark.parametrize("shown", [1, 5, 16, 17, 100])
def test_a_run_that_shows_the_beginning_of_its_band_is_charged_for_the_grid_of_the_planned_run(shown, noise):
    """Against what one record can move the rows by, for every error that the grid may add and noisy_sum raise the noise for."""
    strategy = BandedToeplitz((1.0,) + (0.95,) * 15)
    mechanism = MatrixMechanism(
        strategy=strategy,
        batches="cyclic-poisson",
        groups=16,
        sample_rate=1.0,
        expected_batch_size=10.0,
        max_grad_norm=1.0,
        noise_multiplier=noise,
        releases=100,
    )
    norm = strategy.column_norm(100)
    errors = np.linspace(0, RELEASE_GRID * noise * norm, 50)[:, None]
    moved = np.array(strategy.diagonals)[:shown] + errors
    worst = float(np.max(np.linalg.norm(moved / (noise * (norm + errors)), axis=1)))
    release = plain_release(sampling_probability=1.0, noise_multiplier=1 / worst)
    exact = create_accountant("pld").compose(release, -(-shown // 16)).get_epsilon(1e-5)
    charged = mechanism.epsilon_after(shown, delta=1e-5, accountant="pld")
    assert exact * (1 - 1e-9) <= charged <= exact * (1 + 1e-3)


def error(mechanism: Mechanism, settings: TrainSettings) -> float:
    """Root mean squared error of the iterates that all of the noise makes."""
    assert isinstance(mechanism, MatrixMechanism)
    workload = momentum_workload(settings.releases, settings.momentum)
    scale = mechanism.noise_multiplier * mechanism.strategy.column_norm(settings.releases)
    return scale * mechanism.strategy.error(workload).mean


def poisson(*, epsilon: float = 1.0, **options: Any) -> TrainSettings:
    given: dict[str, Any] = {"method": "matrix", "dataset": "mnist", "epsilon": epsilon, "releases": 100}
    return settings_from({**given, "options": {"batches": "poisson", **options}})


def test_conditional_composition_is_never_worse_than_plain_dp_sgd_unless_it_is_told_to_be(monkeypatch):
    monkeypatch.setattr(matrix_plan, "_MOST_BANDS", 4)  # saves time
    settings = poisson()
    mechanism = planned_mechanism(settings, dataset_size=60000)
    assert mechanism.epsilon_after(100, delta=1e-5, accountant="pld") <= 1.0
    plain = settings_from(
        {"method": "dpsgd", "dataset": "mnist", "epsilon": 1.0, "releases": 100, "batch_size": settings.batch_size}
    )
    independent = planned_mechanism(plain, dataset_size=60000)
    assert isinstance(independent, SelectiveRelease)
    plain_error = independent.noise_multiplier * identity().error(momentum_workload(100, settings.momentum)).mean
    assert error(mechanism, settings) <= 1.003 * plain_error
    # Two bands are much worse here, so the choice mattered; and one band is announced for what it is.
    assert error(planned_mechanism(poisson(bands=2), dataset_size=60000), settings) > 1.3 * plain_error
    assert "as in plain DP-SGD" in dict(mechanism.summary)["strategy"]


@pytest.mark.parametrize("momentum", [0.0, 0.9, 0.99])
@pytest.mark.parametrize(
    ("options", "overrides"),
    [
        ({"batches": "balls-in-bins", "samples": 2000}, {"epsilon": 2.0, "releases": 40}),
        ({"batches": "poisson"}, {"noise_multiplier": 30.0, "releases": 12}),
    ],
    ids=str,
)
def test_buffered_strategies_are_planned_with_any_momentum(options, overrides, momentum):
    given: dict[str, Any] = {"method": "matrix", "delta": 1e-3, "momentum": momentum, "seed": 1, **overrides}
    settings = settings_from({**given, "options": {**options, "strategy": "blt"}})
    mechanism = planned_mechanism(settings, dataset_size=1437)
    assert mechanism.epsilon_after(mechanism.releases, delta=1e-3, accountant="pld") <= 2.0


def test_balls_in_bins_need_an_epoch():
    settings = settings_from({"method": "matrix", "releases": 3, "options": {"batches": "balls-in-bins"}})
    with pytest.raises(InputError, match=r"releases=3 is not allowed with batch_size=256.*at least 5 releases"):
        planned_mechanism(settings, dataset_size=1437)


def test_a_forged_certificate_does_not_hold():
    settings = quick("balls-in-bins")
    mechanism = planned_mechanism(settings, dataset_size=1437)
    described = mechanism.to_dict()
    honest = mechanism.epsilon_after(12, delta=1e-3, accountant="pld")
    [figure] = mechanism.report(delta=1e-3)
    assert figure.meaning.startswith("proved, by Monte Carlo")
    assert honest == described["certificate"]["epsilon"]
    described["certificate"] = {**described["certificate"], "epsilon": honest / 3}
    forged = mechanism_from_dict(described)
    assert forged.epsilon_after(12, delta=1e-3, accountant="pld") > 0.8 * honest


@pytest.mark.parametrize("batches", OPTIONS)
def test_a_run_goes_on_with_its_own_groups_or_not_at_all(batches, tmp_path):
    """In groups that are drawn anew a record would have its turn again, which nobody charges."""
    mechanism = planned_mechanism(quick(batches, batch_size=20), dataset_size=90)

    def engine() -> PrivacyEngine:
        model = nn.Linear(3, 2)
        made = PrivacyEngine()
        made.make_private_by(
            mechanism,
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            data_loader=TensorDataset(torch.randn(90, 3), torch.arange(90) % 2),
            options=TrainingOptions(ledger=tmp_path / "ledger.jsonl"),
        )
        return made

    first = engine()
    next(first.releases(F.cross_entropy))
    first.save(tmp_path / "state")
    first.close()
    second = engine()
    if batches != "poisson":
        with pytest.raises(InputError, match="groups of records that are not known here"):
            next(second.releases(F.cross_entropy))
        second.load(tmp_path / "state")
    assert next(second.releases(F.cross_entropy)) >= 1
    second.close()
