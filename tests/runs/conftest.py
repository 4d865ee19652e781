from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from sluice._base.files import write_atomically
from sluice.mechanism.gates import ClippingBiasGate
from sluice.mechanism.scaling import GlobalScaling
from sluice.mechanism.selective_release import SelectiveRelease
from sluice.runs.folder import RunFolder
from sluice.runs.ledger import Ledger, LedgerHeader, read_ledger
from sluice.runs.trace import TraceFile, TraceRow

MakeRun = Callable[..., RunFolder]


@pytest.fixture
def spend_again() -> Callable[[RunFolder], Path]:
    """Write the ledger of an audit on the run's own records, as a rehearsal leaves it; its path."""

    def spend(folder: RunFolder) -> Path:
        header = read_ledger(folder.ledger_path).header
        with Ledger.create(folder.audit_ledger_path, header=replace(header, configuration=None)) as ledger:
            for number in range(1, header.planned_releases + 1):
                ledger.append_release(number)
        return folder.audit_ledger_path

    return spend


@pytest.fixture
def make_run(tmp_path: Path) -> MakeRun:
    """A run folder as a trainer leaves it, with weights of seven bytes."""

    def make(
        name: str = "run",
        *,
        planned: int = 8,
        made: int | None = None,
        gated: bool = True,
        hidden: bool = False,
        attempts: int = 2,
        prior_releases: tuple[float, ...] = (),
        noise_multiplier: float = 2.0,
        **header: object,
    ) -> RunFolder:
        gate = ClippingBiasGate(gate_noise=1.0, reference_noise=10.0, small_norm=1.0, hidden_reference=hidden)
        mechanism = SelectiveRelease(
            sample_rate=0.02,
            expected_batch_size=20.0,
            scaling=GlobalScaling(bound=8.0),
            noise_multiplier=noise_multiplier,
            releases=planned,
            gate=gate if gated else None,
            prior_releases=prior_releases,
        )
        folder = RunFolder.create(tmp_path / name, config={"data": "digits", "batch": 20})
        settings = {"delta": 1e-5, "configuration": folder.config_hash, "accountant": "rdp"} | header
        trace = TraceFile(folder.trace_path)
        with Ledger.create(
            folder.ledger_path, header=LedgerHeader(mechanism=mechanism.to_dict(), **settings)
        ) as ledger:
            for number in range(1, (planned if made is None else made) + 1):
                ledger.append_release(number)
                trace.append(TraceRow(release=number, attempts=attempts, measured=20, metric=number / 7, seconds=0.1))
            if made is None:
                ledger.append_published("model.safetensors", sha256=hashlib.sha256(b"weights").hexdigest())
                write_atomically(folder.weights_path, b"weights", public=True)
        folder.close()
        return folder

    return make
