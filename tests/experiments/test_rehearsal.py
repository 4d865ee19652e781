"""Rehearsals: the run's own mechanism, no record of the run's own, and a result that says what it was."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from sluice._base.errors import InputError
from sluice.data import hold_out
from sluice.experiments.rehearsal import Rehearsal, StandIns, planned_size
from sluice.experiments.settings import settings_from
from sluice.methods import planned_mechanism
from sluice.training.engine import PrivacyEngine


@pytest.fixture
def rehearsal(digits):
    settings = settings_from({"method": "dpsgd", "releases": 4, "batch_size": 64})
    mechanism = planned_mechanism(settings, dataset_size=len(digits.train))
    return Rehearsal(settings=settings, splits=digits, mechanism=mechanism)


def test_training_records_are_not_read(rehearsal, digits, monkeypatch):
    monkeypatch.setattr(digits.train, "batch", None)
    monkeypatch.setattr(digits.train, "inputs", None)
    monkeypatch.setattr(type(digits.train), "__len__", lambda examples: len(examples.labels))
    found = rehearsal.once(canaries=200).result
    assert found.rehearsal
    assert found.claimed == pytest.approx(3.0, rel=0.01)
    assert found.proved
    assert not found.refuted


def test_a_false_claim_is_refuted(rehearsal):
    loose = replace(rehearsal.mechanism, noise_multiplier=0.1, sample_rate=0.9)
    found = replace(rehearsal, mechanism=loose, claimed_epsilon=0.5).once(canaries=200).result
    assert found.refuted
    assert not found.proved
    assert found.lower_bound > 0.5


@pytest.mark.parametrize("kind", ["mislabelled", "blank", "quiet"])
def test_other_kinds_of_canaries(rehearsal, kind):
    found = rehearsal.once(canaries=100, kind=kind).result
    assert found.kind == kind
    assert found.rehearsal


@pytest.mark.slow
def test_repeated_runs(rehearsal):
    loose = replace(rehearsal.mechanism, noise_multiplier=0.1, sample_rate=0.9, releases=1)
    found = replace(rehearsal, mechanism=loose, claimed_epsilon=0.1).repeatedly(runs=40).result
    assert [bound.method for bound in found.bounds] == ["clopper-pearson", "gaussian-fit"]
    assert found.refuted
    assert found.lower_bound <= found.ceiling


def test_what_cannot_be_rehearsed_is_refused(rehearsal):
    with pytest.raises(InputError, match="runs=3"):
        rehearsal.repeatedly(runs=3)
    with pytest.raises(InputError, match="canaries=3"):
        rehearsal.once(canaries=3)
    with pytest.raises(InputError, match="made from test records"):
        rehearsal.once(canaries=5000, kind="mislabelled")


@pytest.mark.parametrize("spends", [True, False])
def test_records_that_a_run_holds_out_are_no_part_of_its_rehearsal(digits, tmp_path, monkeypatch, spends):
    settings = settings_from({"method": "dpsgd", "releases": 2, "batch_size": 64, "hold_out": 0.25})
    own = hold_out(digits.train, 0.25, 0)[0]
    assert planned_size(settings, digits) == len(own) < len(digits.train)
    mechanism = planned_mechanism(settings, dataset_size=len(own))
    seen: dict[str, Any] = {}

    def make_private_by(engine: PrivacyEngine, mechanism: Any, *, data_loader: Any, **given: Any) -> Any:
        seen.update(mechanism=mechanism, records=data_loader)
        return original(engine, mechanism, data_loader=data_loader, **given)

    original = PrivacyEngine.make_private_by
    monkeypatch.setattr(PrivacyEngine, "make_private_by", make_private_by)
    ledger = tmp_path / "ledger.jsonl" if spends else None
    Rehearsal(settings=settings, splits=digits, mechanism=mechanism, ledger=ledger).once(canaries=64)
    count = len(seen["records"]) + 32
    assert count == len(own) + 32 * spends
    # What sums are divided by: the batch that these records fill on average.
    assert seen["mechanism"].expected_batch_size == pytest.approx(mechanism.sample_rate * count)
    if spends:
        torch.testing.assert_close(seen["records"].inputs, own.inputs)


def test_the_canaries_of_a_run_are_counted_in_what_its_rehearsal_divides_by(digits):
    settings = settings_from({"method": "dpsgd", "canaries": 64})
    assert planned_size(settings, digits) == len(digits.train) + 32


def test_stand_ins_repeat(digits):
    stand_ins = StandIns(digits.test, 1000)
    x, y = stand_ins.batch(torch.tensor([0, len(digits.test)]))
    torch.testing.assert_close(x[0], x[1])
    assert len(stand_ins) == 1000
    assert stand_ins[0][1] == y[0]
