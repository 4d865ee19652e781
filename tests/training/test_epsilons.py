"""What a run costs, as its engine tells."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

from sluice import PrivacyEngine
from sluice._base.errors import InputError
from sluice.audit.canaries import Canaries
from sluice.mechanism.gates import ClippingBiasGate
from sluice.mechanism.scaling import GlobalScaling
from sluice.runs.ledger import read_ledger
from sluice.runs.privacy_spent import spending
from small_runs import GATE, Run, blobs, small_model


def test_epsilon_counts_what_was_released_and_reading_it_is_pure():
    run = Run(releases=6, gate=GATE)
    seen = []
    for batch in run.loader:
        run.step(batch)
        if run.engine.released:
            seen.append((run.engine.released, run.engine.get_epsilon(1e-5)))
            assert run.engine.get_epsilon(1e-5) == seen[-1][1]
            assert run.engine.get_certified_epsilon(1e-5) >= seen[-1][1]
    by_release = dict(seen)
    assert list(by_release) == [1, 2, 3, 4, 5, 6]
    assert by_release[6] == run.engine.get_certified_epsilon(1e-5)
    assert all(a < b for a, b in zip(by_release.values(), list(by_release.values())[1:], strict=False))


def test_what_is_certified_does_not_depend_on_where_the_run_stops():
    run = Run(releases=6, gate=GATE)
    before = run.engine.get_certified_epsilon(1e-5)
    next(run.engine.releases(F.cross_entropy))
    assert run.engine.released == 1
    assert run.engine.get_epsilon(1e-5) < run.engine.get_certified_epsilon(1e-5) == before
    assert before == Run(releases=6, gate=GATE).fast().engine.get_epsilon(1e-5)


def test_a_run_without_a_planned_end_goes_on_and_is_charged_by_stages():
    run = Run(releases=None, sample_rate=0.25)
    assert len(run.loader) == 4
    for _ in range(3):
        for batch in run.loader:
            run.step(batch)
    assert run.engine.released == 12
    planned = Run(releases=12, sample_rate=0.25)
    assert run.engine.get_epsilon(1e-5) == planned.engine.mechanism.epsilon_after(12, delta=1e-5, accountant="rdp")
    # 4, 6, 8, 12 releases: the fourth stage, to which 1/20 of delta belongs.
    assert run.engine.get_certified_epsilon(1e-5) == planned.engine.get_certified_epsilon(1e-5 / 20)
    assert not run.loader.finished
    audited = Run(releases=None, sample_rate=0.25, canaries=Canaries(count=16))
    with pytest.raises(InputError, match="run without a planned end"):
        audited.engine.audit(delta=1e-5)


def test_a_run_without_a_planned_end_has_a_ledger_that_resumes(tmp_path):
    for made in (5, 11):
        run = Run(releases=None, sample_rate=0.25, ledger=tmp_path / "ledger.jsonl")
        run.engine.load(tmp_path / "kept") if made > 5 else None
        run.engine.keep_in(tmp_path / "kept")
        while run.engine.released < made:
            for batch in run.loader:
                run.step(batch)
                if run.engine.released == made:
                    break
        certified = run.engine.get_certified_epsilon(1e-5)
        run.engine.close()
        contents = read_ledger(tmp_path / "ledger.jsonl")
        assert contents.spent == made
        assert spending(contents).epsilon == certified


def test_a_budget_ends_the_loop():
    options = {"target_epsilon": 2.0, "target_delta": 1e-5, "max_grad_norm": 1.0}
    model = small_model()
    engine = PrivacyEngine(seed=0, accountant="rdp")
    _, optimizer, loader = engine.make_private_with_epsilon(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(blobs(), batch_size=30),
        noise_multiplier=3.0,
        **options,
    )
    passes = 0
    while not loader.finished:
        passes += 1
        for x, y in loader:
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    assert passes == math.ceil(engine.released / 4)
    assert engine.get_certified_epsilon(1e-5) == engine.get_epsilon(1e-5) <= 2.0
    assert (
        engine.mechanism.with_releases(engine.released + 1).epsilon_after(
            engine.released + 1, delta=1e-5, accountant="rdp"
        )
        > 2.0
    )
    assert list(loader) == []
    for given in ({"noise_multiplier": 3.0, "epochs": 2}, {}):
        with pytest.raises(InputError, match="releases=None, epochs="):
            PrivacyEngine(seed=0).make_private_with_epsilon(
                module=model,
                optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
                data_loader=DataLoader(blobs(), batch_size=30),
                **options,
                **given,
            )


def test_a_hidden_reference_has_no_epsilon():
    run = Run(gate=ClippingBiasGate(gate_noise=1.0, reference_noise=4.0, hidden_reference=True)).loop()
    with pytest.raises(InputError, match="no epsilon is proved"):
        run.engine.get_epsilon(1e-5)
    with pytest.raises(InputError, match="no epsilon is proved"):
        run.engine.get_certified_epsilon(1e-5)
    assert run.engine.get_claimed_epsilon(1e-5) > 0


def test_calibration_meets_the_target_and_fills_in_the_gate():
    engine = PrivacyEngine(seed=1)
    model = small_model()
    _, _, loader = engine.make_private_with_epsilon(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(blobs(), batch_size=30),
        target_epsilon=2.0,
        target_delta=1e-5,
        releases=20,
        max_grad_norm=1.0,
        scaling=GlobalScaling(bound=8.0),
        gate=ClippingBiasGate(beta=3.0),
    )
    for _ in engine.releases(F.cross_entropy):
        pass
    assert 1.9 < engine.get_epsilon(1e-5) <= 2.0
    gate = engine.mechanism.gate
    assert isinstance(gate, ClippingBiasGate)
    assert gate.small_norm == 8.0
    assert gate.gate_noise is not None
    assert list(loader) == []
