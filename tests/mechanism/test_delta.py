from __future__ import annotations

import warnings

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import TensorDataset
from typer.testing import CliRunner

from sluice import PrivacyEngine
from sluice.cli import command_line
from sluice.experiments.settings import settings_from
from sluice.mechanism.delta import DeltaWarning, delta_problem, records_of, warn_of_delta
from sluice.mechanism.scaling import Clip
from sluice.mechanism.selective_release import SelectiveRelease
from sluice.methods import METHODS, planned_mechanism
from sluice.runs.certificate import certificate_of, read_certificate
from sluice.runs.folder import RunFolder
from sluice.runs.ledger_entries import GENESIS, LedgerHeader, encode_line, parse_ledger
from sluice.runs.privacy_spent import spending


@given(st.integers(1, 10**9), st.floats(1e-12, 0.999))
def test_a_delta_is_questioned_just_where_it_is_not_below_one_over_n(records, delta):
    problem = delta_problem(delta, records=records)
    assert (problem is not None) == (delta * records >= 1)
    if problem is not None:
        suggested = float(problem.rsplit(", ", 1)[1].split()[0])
        assert suggested <= 0.1 / records


def test_an_unknown_number_of_records_is_not_guessed():
    assert delta_problem(0.5, records=None) is None
    assert records_of(object()) is None


def test_the_number_of_records_is_that_of_the_plan():
    mechanism = SelectiveRelease(
        sample_rate=50 / 1000,
        expected_batch_size=50.0,
        scaling=Clip(max_grad_norm=1.0),
        noise_multiplier=1.0,
        releases=3,
    )
    assert records_of(mechanism) == 1000


@pytest.mark.parametrize(("delta", "warns"), [(0.5, True), (1 / 40, True), (1e-5, False)])
def test_the_engine_warns_where_epsilon_is_asked_for(delta, warns):
    model = nn.Sequential(nn.Linear(2, 2))
    data = TensorDataset(torch.zeros(40, 2), torch.zeros(40, dtype=torch.int64))
    engine = PrivacyEngine(accountant="rdp", seed=1)
    options = {"module": model, "data_loader": data, "sample_rate": 0.1, "max_grad_norm": 1.0, "releases": 2}
    engine.make_private(**options, optimizer=torch.optim.SGD(model.parameters(), lr=1.0), noise_multiplier=1.0)
    other = PrivacyEngine(accountant="rdp", seed=1)
    asked = [
        lambda: engine.get_epsilon(delta),
        lambda: engine.get_certified_epsilon(delta),
        lambda: other.make_private_with_epsilon(
            **options, optimizer=torch.optim.SGD(model.parameters(), lr=1.0), target_epsilon=1.0, target_delta=delta
        ),
    ]
    for ask in asked:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            ask()
        assert any(issubclass(each.category, DeltaWarning) for each in caught) == warns
    engine.close()
    other.close()


PLANS = {
    method: settings_from({"method": method, "releases": 4})
    for method in METHODS
    if method not in ("non-private", "dpsr-cg-paper")  # for which nothing is proved, so that delta has no meaning
} | {
    f"matrix, {batches}": settings_from({"method": "matrix", "releases": 60, "options": {"batches": batches}})
    for batches in ("poisson", "balls-in-bins")
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name == "matrix, poisson" else ()) for name in PLANS]
)
def test_every_method_is_questioned_by_the_library_and_in_the_certificate(name):
    mechanism = planned_mechanism(PLANS[name], dataset_size=1437)
    assert mechanism.provable
    assert records_of(mechanism) == 1437
    for delta, wrong in ((1e-3, delta_problem(1e-3, records=1437)), (1e-5, None)):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            warn_of_delta(delta, mechanism)
        assert [str(each.message) for each in caught] == ([wrong] if wrong else [])
        header = LedgerHeader(
            mechanism=mechanism.to_dict(), delta=delta, accountant=mechanism.accountants[0], configuration="ab" * 32
        )
        contents = parse_ledger(encode_line(header, previous=GENESIS)[0], where="test")
        certificate = certificate_of(contents, configuration="ab" * 32, spent=spending(contents))
        assert certificate["warnings"] == ([wrong] if wrong else [])


def test_a_plan_of_dpagd_without_the_number_of_records_is_read_as_it_was_written():
    mechanism = planned_mechanism(PLANS["dpagd"], dataset_size=1437)
    earlier = {name: value for name, value in mechanism.to_dict().items() if name != "dataset_size"}
    assert records_of(type(mechanism).from_dict(earlier)) is None
    assert type(mechanism).from_dict(earlier).to_dict() == earlier


QUICK = ("dpsgd", "dpagd")


@pytest.mark.parametrize(
    "method", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in METHODS if name in PLANS]
)
def test_a_run_is_questioned_on_the_screen_and_in_its_certificate(method, tmp_path):
    run = tmp_path / "run"
    options = ["--dataset=digits", f"--method={method}", "--releases=4", "--delta=0.001", "--seed=1"]
    shown = CliRunner().invoke(command_line(), ["train", f"--run={run}", *options])
    assert shown.exit_code == 0, shown.output
    assert "delta=0.001 is not below 1/N" in " ".join(shown.output.split())
    assert any("is not below 1/N" in each for each in read_certificate(RunFolder.look(run))["warnings"])
