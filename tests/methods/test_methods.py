"""What holds for every method: it trains, resumes to the same bytes, is logged, and is honest about its proof."""

from __future__ import annotations

import inspect
import json
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from sluice._base.errors import InputError
from sluice.experiments.run import Progress, Training, recorded_run
from sluice.experiments.settings import TrainSettings, default_settings, settings_from, settings_of
from sluice.mechanism.registry import mechanism_from_dict
from sluice.methods import METHODS, method_of, planned_mechanism
from sluice.methods.reference import nearest
from sluice.runs.certificate import schema
from sluice.runs.verify import verify_run

QUICK: dict[str, dict[str, Any]] = {
    "dpsr-cg": {"noise_multiplier": 2.0, "accountant": "rdp"},
    "dpsgd": {"noise_multiplier": 2.0, "accountant": "rdp"},
    "dpsgd-ts": {"noise_multiplier": 2.0, "accountant": "rdp"},
    "dpsgd-hf": {"noise_multiplier": 2.0, "accountant": "rdp"},
    "dpsgd-ac": {"noise_multiplier": 2.0, "accountant": "rdp", "options": {"noise_end": 0.5, "levels": 3}},
    "dpsur": {"noise_multiplier": 2.0},
    "dpis": {"noise_multiplier": 2.0, "accountant": "rdp"},
    "dpagd": {},
    "matrix": {"noise_multiplier": 6.0, "accountant": "rdp", "options": {"bands": 2}},
    "non-private": {},
}
DATA_SETS = ("digits", "mnist", "fashion-mnist", "cifar-10", "imdb")


def quick(method: str, **overrides: Any) -> TrainSettings:
    given = {"method": method, "releases": 6, "seed": 3, "evaluate_every": 3, **QUICK.get(method, {}), **overrides}
    return settings_from(given)


def public_files(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted((path / "public").iterdir())}


@pytest.mark.parametrize("method", METHODS)
def test_an_interrupted_run_ends_like_one_that_was_not(method, digits, tmp_path):
    settings = quick(method)
    whole = Training(settings=settings, splits=digits, checkpoint_every=2).start(tmp_path / "whole")

    def stop(progress: Progress) -> None:
        if progress.release == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Training(settings=settings, splits=digits, checkpoint_every=2, report=stop).start(tmp_path / "stopped")
    recorded = recorded_run(tmp_path / "stopped")
    Training(settings=recorded.settings, mechanism=recorded.mechanism, splits=digits).resume(tmp_path / "stopped")
    assert public_files(tmp_path / "stopped") == public_files(tmp_path / "whole")
    assert whole.mechanism == mechanism_from_dict(json.loads(json.dumps(whole.mechanism.to_dict())))
    for run in ("whole", "stopped"):
        assert verify_run(tmp_path / run).holds
    certificate = json.loads((tmp_path / "whole" / "public" / "certificate.json").read_text())
    jsonschema.validate(certificate, schema("certificate"))
    proved = whole.mechanism.provable
    assert (certificate["privacy"]["epsilon"] is not None) == proved == (whole.epsilon is not None)
    assert certificate["status"] == ("experiment only" if proved else "claimed only")


@pytest.mark.parametrize("method", METHODS)
def test_the_proof_that_is_advertised_is_the_one_that_there_is(method):
    mechanism = planned_mechanism(quick(method), dataset_size=1437)
    guaranteed = [figure for figure in mechanism.report(delta=1e-5) if figure.guaranteed]
    assert bool(guaranteed) == mechanism.provable == method_of(method).proves.startswith("epsilon")
    assert bool(mechanism.unproved_because) != mechanism.provable
    epsilons = [mechanism.epsilon_after(4, delta=1e-5, accountant=name) for name in mechanism.accountants if guaranteed]
    assert all(0 < epsilon < float("inf") for epsilon in epsilons)


@pytest.mark.parametrize("method", METHODS)
def test_each_file_tells_source_algorithm_and_accounting(method):
    about = inspect.getdoc(sys.modules[f"sluice.methods.{method.replace('-', '_')}"]) or ""
    assert "Algorithm:" in about
    assert "Accounting" in about
    assert "Source:" in about or method == "non-private"


@pytest.mark.parametrize("dataset", DATA_SETS)
@pytest.mark.parametrize("method", METHODS)
def test_defaults_are_settings_that_survive_a_configuration_file(method, dataset):
    for epsilon in (1.0, 3.0):
        settings = default_settings(dataset, method=method, epsilon=epsilon)
        assert settings == settings_of(json.loads(json.dumps(settings.to_dict())), where="config.json")
        assert (settings.dataset, settings.method, settings.epsilon) == (dataset, method, epsilon)


def test_published_settings_go_with_the_nearest_epsilon():
    assert [nearest(epsilon, (1, 2, 3, 4)) for epsilon in (0.1, 1.4, 1.6, 3.2, 9)] == [1, 1, 2, 3, 4]
    assert default_settings("mnist", method="dpsgd", epsilon=1.0, recipe="paper").releases == 678
    assert default_settings("mnist", method="dpsgd", epsilon=3.0, recipe="paper").releases == 1931


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"method": "dpsgd", "options": {"bands": 3}}, "dpsgd.*no option bands"),
        ({"method": "dpsur", "options": {"validation_noise": -1.0}}, "validation_noise=-1"),
        ({"method": "dpsur", "options": {"account": "hoped"}}, "account='hoped'"),
        ({"method": "dpsur", "options": {"validation_batch_size": 2.5}}, "validation_batch_size=2.5"),
        ({"method": "dpsur", "options": 3}, "options=3"),
        ({"method": "dpsur", "gate": "coin"}, "gate='coin'"),
        ({"method": "non-private", "max_grad_norm": 2.0}, "max_grad_norm=2.0 has no effect"),
        ({"method": "dpsvr"}, "method='dpsvr'"),
    ],
)
def test_bad_settings_are_refused_with_the_reason(overrides, message):
    with pytest.raises(InputError, match=message):
        settings_from(overrides)


def test_an_accountant_without_a_proof_for_the_method_is_refused():
    with pytest.raises(InputError, match="accountant='pld'"):
        settings_from({"method": "dpagd", "accountant": "pld"})
