"""The tight audit of one release: what it measures, and what it catches."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import patch

import numpy as np
import pytest

from sluice._base.errors import InputError
from sluice.experiments.rehearsal import Rehearsal
from sluice.experiments.settings import settings_from
from sluice.experiments.two_runs import two_runs
from sluice.methods import planned_mechanism
from sluice.training.context import TrainingContext


def rehearsal(digits, **chosen):
    settings = settings_from({"releases": 4, "batch_size": 64, "model": "linear", **chosen})
    mechanism = planned_mechanism(settings, dataset_size=len(digits.train))
    return Rehearsal(settings=settings, splits=digits, mechanism=mechanism)


GATED = {"method": "dpsr-cg", "noise_multiplier": 0.5, "gate_noise": 3.0, "reference_noise": 0.5}


@pytest.mark.parametrize(("chosen", "mu"), [({"method": "dpsgd", "noise_multiplier": 0.5}, 2.0), (GATED, 2.0 * 2**0.5)])
def test_scores_lie_as_far_apart_as_noise_of_sum_and_reference_allow(digits, chosen, mu):
    found = two_runs(rehearsal(digits, **chosen), releases=150)
    inside, outside = found.scores[found.members], found.scores[~found.members]
    assert (inside.mean() - outside.mean()) / mu**2 == pytest.approx(1.0, abs=0.25)
    assert [inside.std() / mu, outside.std() / mu] == pytest.approx([1.0, 1.0], abs=0.25)
    assert found.choosing.sum() == 2 * 19
    result = found.result
    assert result.rehearsal
    assert "one release" in result.notes[0]
    assert result.proved
    assert result.claimed == pytest.approx(replace(rehearsal(digits, **chosen).mechanism, sample_rate=1.0, releases=1)
        .epsilon_after(1, delta=1e-5, accountant="pld"))  # fmt: skip


@pytest.mark.slow
def test_half_of_the_noise_is_caught(digits):
    original = TrainingContext.noisy

    def halved(*arguments, noise_multiplier, **others):
        return original(*arguments, noise_multiplier=noise_multiplier / 2, **others)

    sound = rehearsal(digits, method="dpsgd", noise_multiplier=1.0)
    assert not two_runs(sound, releases=1000).result.refuted
    with patch.object(TrainingContext, "noisy", halved):
        assert two_runs(sound, releases=1000).result.refuted


def test_no_training_record_is_read_and_weights_stand_still(digits, monkeypatch):
    monkeypatch.setattr(digits.train, "batch", None)
    found = two_runs(rehearsal(digits, method="dpsgd", noise_multiplier=1e-3), releases=100)
    assert np.ptp(found.scores[found.members]) / found.scores[found.members].mean() < 0.05


@pytest.mark.parametrize(
    ("chosen", "changes", "releases", "message"),
    [
        ({"method": "dpsgd"}, {}, 3, "two_runs=3"),
        ({"method": "dpsgd"}, {"claimed_epsilon": 1.0}, 100, "claimed_epsilon=1.0"),
        ({"method": "matrix"}, {}, 100, "cannot be audited by two runs"),
    ],
)
def test_what_cannot_be_audited_is_refused(digits, chosen, changes, releases, message):
    with pytest.raises(InputError, match=message):
        two_runs(replace(rehearsal(digits, **chosen), **changes), releases=releases)
