"""What the workers of a test do: small runs, whose results are told as plain numbers."""

from __future__ import annotations

import hashlib
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

from sluice import ClippingBiasGate, GlobalScaling, PrivacyEngine
from sluice.data import load
from sluice.experiments.run import Training, recorded_run
from sluice.experiments.settings import settings_from
from sluice.gradients import GradientOptions
from sluice.mechanism.clipped_release import ClippedRelease
from sluice.mechanism.clipping import QuantileClipping
from sluice.mechanism.selective_release import SelectiveRelease
from sluice.mechanism.thinning import ThinningGate
from sluice.methods import planned_mechanism
from sluice.randomness.model_state import ModelRandomness
from sluice.randomness.noise import SecureNoise, SeededNoise
from sluice.runs.ledger import read_ledger
from sluice.training import keeping
from sluice.training.distributed import Workers, join
from sluice.training.options import TrainingOptions
from sluice.training.selective_release import SelectiveReleaseExecutor
from sluice.training.weights import WeightUpdater

sys.path.insert(0, str(Path(__file__).parents[2] / "experiments"))

from kill_server import log_updates

RECORDS = 300
RUN = {"releases": 3, "epsilon": 2.0, "accountant": "rdp", "evaluate_every": 2, "batch_size": 64}


def data(records: int = RECORDS) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(records, 6, generator=generator)
    return TensorDataset(x, (x[:, 0] + 0.3 * x[:, 1] > 0).long())


def model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def selective(*, gate: bool, releases: int, rate: float = 0.1) -> SelectiveRelease:
    decision = ClippingBiasGate(beta=0.5, gate_noise=1.0, reference_noise=5.0, small_norm=0.5, large_norm=2.0)
    return SelectiveRelease(
        expected_batch_size=rate * RECORDS,
        sample_rate=rate,
        scaling=GlobalScaling(bound=2.0, max_grad_norm=1.0),
        noise_multiplier=1.0,
        gate=decision.for_batches_of(rate * RECORDS, small_norm=0.5) if gate else None,
        releases=releases,
    )


def weights_of(module: nn.Module) -> list[float]:
    return [float(x) for p in module.parameters() for x in p.detach().double().flatten()]


def digest(module: nn.Module) -> str:
    return hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in module.parameters())).hexdigest()


def told(engine: PrivacyEngine, module: nn.Module) -> dict[str, Any]:
    trace = engine._executor.trace
    return {
        "weights": weights_of(module),
        "digest": digest(module),
        "attempts": trace.attempts,
        "measured": trace.measured,
        "metrics": trace.metrics,
        "released": engine.released,
    }


def set_up(
    mechanism: Any, *, seed: int | None, lr: float = 0.5, options: TrainingOptions | None = None, own: bool = False
) -> tuple[PrivacyEngine, nn.Module]:
    module = model(rank() if own else 0)
    engine = PrivacyEngine(seed=seed)
    optimizer = torch.optim.SGD(module.parameters(), lr=lr, momentum=0.5)
    engine.make_private_by(mechanism, module=module, optimizer=optimizer, data_loader=data(), options=options)
    return engine, module


def train(
    *,
    gate: bool = True,
    releases: int = 100,
    seed: int | None = 3,
    rate: float = 0.1,
    chunk: int | None = None,
    own: bool = False,
    ledger: str | None = None,
) -> dict[str, Any]:
    """A run by `engine.releases`."""
    options = TrainingOptions(gradient_options=GradientOptions(chunk_size=chunk) if chunk else None, ledger=ledger)
    engine, module = set_up(selective(gate=gate, releases=releases, rate=rate), seed=seed, options=options, own=own)
    for _ in engine.releases(nn.functional.cross_entropy):
        pass
    engine.close()
    return told(engine, module)


def warm_up(settings: dict[str, Any] | None = None) -> None:
    """Do once what every worker would do: the first calibration and the first optimizer load a lot."""
    train(releases=1)
    Training(settings=settings_from(RUN), splits=load("digits"))


def measured_by_rejected(*, chunk: int, seeds: int = 6) -> list[list[int]]:
    """Attempts and records measured for a first release, whose reference no batch comes near to."""
    found = []
    for seed in range(seeds):
        ended = train(releases=1, rate=0.5, chunk=chunk, seed=seed)
        found.append([ended["attempts"][0], ended["measured"][0]])
    return found


def train_by_loop(
    *, gate: bool = True, releases: int = 20, seed: int = 3, rate: float = 0.1, piece: int = 8
) -> dict[str, Any]:
    """A run by a loop of the user's own."""
    options = TrainingOptions(max_physical_batch_size=piece)
    engine, module = set_up(selective(gate=gate, releases=releases, rate=rate), seed=seed, options=options)
    private, optimizer, loader = engine.ordinary_loop()
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(private(x), y).backward()
        optimizer.step()
    engine.close()
    return told(engine, module)


def train_other(*, kind: str, by_loop: bool, releases: int = 20, seed: int = 3) -> dict[str, Any]:
    """A run whose records are thinned by coins, or whose bound follows a quantile."""
    mechanism = {
        "thinning": lambda: replace(
            selective(gate=False, releases=releases),
            gate=ThinningGate(strength=3.0, small_norm=0.2, large_norm=1.0, moved_records=8),
        ),
        "quantile": lambda: ClippedRelease(
            expected_batch_size=0.1 * RECORDS,
            sample_rate=0.1,
            noise_multiplier=1.0,
            releases=releases,
            clipping=QuantileClipping(max_grad_norm=0.5, noise=2.0, smallest=0.01, largest=10.0),
        ),
    }[kind]()
    engine, module = set_up(mechanism, seed=seed, options=TrainingOptions(max_physical_batch_size=8))
    if by_loop:
        private, optimizer, loader = engine.ordinary_loop()
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(private(x), y).backward()
            optimizer.step()
    else:
        for _ in engine.releases(nn.functional.cross_entropy):
            pass
    engine.close()
    return told(engine, module)


def train_method(*, method: str, settings: dict[str, Any], seed: int | None = 3) -> dict[str, Any]:
    """A run of a method of `sluice.methods`."""
    given = {"dataset": "digits", "method": method, "seed": seed, **settings}
    mechanism = planned_mechanism(settings_from(given), dataset_size=RECORDS)
    engine, module = set_up(mechanism, seed=seed, lr=0.1)
    for _ in engine.releases(nn.functional.cross_entropy):
        pass
    return told(engine, module)


def noisy_sum_of_ranks(*, entries: int, noise_multiplier: float, seed: int | None) -> list[list[float]]:
    """Two tensors to which each worker adds its rank plus one, released twice."""
    workers = join()
    noise = workers.common_noise(SecureNoise() if seed is None else SeededNoise(seed))
    released = []
    for _ in range(2):
        raw = {"a": torch.full((entries // 3,), rank() + 1.0), "b": torch.full((entries - entries // 3,), rank() + 1.0)}
        noisy = workers.noisy_totals(
            raw, noise_multiplier=noise_multiplier, sensitivity=1.0, noise=noise, sum_error=0.0
        )
        released.append(torch.cat(list(noisy.values())).tolist())
    return released


def common_draws() -> dict[str, Any]:
    """What workers draw from a secure source that they have in common."""
    noise = join().common_noise(SecureNoise())
    return {
        "common": noise.uniform((5,)).tolist() + noise.random_order(torch.arange(20)).tolist(),
        "again": noise.uniform((5,)).tolist(),
        "own": ModelRandomness(noise)._own["torch"][24:64].tolist(),
    }


def train_wrapped() -> None:
    module = nn.parallel.DistributedDataParallel(model())
    PrivacyEngine().make_private_by(
        selective(gate=False, releases=1),
        module=module,
        optimizer=torch.optim.SGD(module.parameters(), lr=0.1),
        data_loader=data(),
    )


def train_unshared() -> None:
    """A method that says nothing about workers."""
    SelectiveReleaseExecutor.takes_workers = False
    set_up(selective(gate=False, releases=1), seed=1)


def train_differently(*, what: str) -> None:
    """Workers that were not given the same."""
    mechanism = selective(gate=False, releases=2 + (rank() if what == "mechanism" else 0))
    module = model()
    engine = PrivacyEngine(seed=1)
    records = data(RECORDS - (rank() if what == "records" else 0))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1 + (0.1 * rank() if what == "lr" else 0.0))
    engine.make_private_by(mechanism, module=module, optimizer=optimizer, data_loader=records)
    for _ in engine.releases(nn.functional.cross_entropy):
        pass


def train_on_record(*, ledger: str) -> dict[str, Any]:
    """Look into the ledger, on every worker, whenever a release is about to be applied."""
    seen = []
    apply = WeightUpdater.apply

    def watched(self: WeightUpdater, released: Any) -> None:
        seen.append(read_ledger(Path(ledger)).spent)
        apply(self, released)

    WeightUpdater.apply = watched
    return {**train(releases=5, seed=None, ledger=ledger), "seen": seen}


def fail_at(*, release: int, worker: int, timeout: float = 10.0) -> None:
    """One worker fails while the others go on."""
    join(timeout=timeout)
    engine, _ = set_up(selective(gate=False, releases=50), seed=1)

    def failing(output: Any, target: Any) -> Any:
        if rank() == worker and engine.released == release:
            raise ValueError("a record is broken")
        return nn.functional.cross_entropy(output, target)

    for _ in engine.releases(failing):
        pass


def endless(*, timeout: float) -> None:
    join(timeout=timeout)
    train(gate=True, releases=100_000, seed=None)


def keep(*, folder: str, releases: int, seed: int | None, stop_after: int | None = None) -> dict[str, Any]:
    """A run that is kept in a folder, and goes on from there if it has begun."""
    path = Path(folder)
    options = TrainingOptions(ledger=path / "ledger.jsonl", ema_decay=0.5)
    begun = join().from_first((path / "ledger.jsonl").exists)
    engine, module = set_up(selective(gate=True, releases=releases), seed=seed, options=options)
    if begun:
        engine.load(path / "checkpoints")
    engine.keep_in(path / "checkpoints", every=None if seed is None else 1)
    for number in engine.releases(nn.functional.cross_entropy):
        if number == stop_after:
            break
    engine.close()
    with engine.averaged() as averaged:
        return {**told(engine, module), "average": weights_of(averaged)}


def run_in_folder(*, run: str, settings: dict[str, Any], log: str, timeout: float) -> None:
    """`sluice train`, as each worker carries it out."""
    workers = join(timeout=timeout)
    log_updates(f"{log}.{workers.rank}")
    path = Path(run)
    keeping._MOST_ENTRIES = 2
    with workers.announced():
        _carry_out(path, settings, workers)
        workers.leave()


def _carry_out(path: Path, settings: dict[str, Any], workers: Workers) -> None:
    begun = workers.from_first((path / "public" / "config.json").exists)
    recorded = workers.from_first(lambda: recorded_run(path) if begun else None)
    if recorded is not None and recorded.result is not None:
        return
    chosen = settings_from(settings) if recorded is None else recorded.settings
    mechanism = None if recorded is None else recorded.mechanism
    training = Training(settings=chosen, mechanism=mechanism, splits=load("digits"))
    if not workers.is_first:
        training.assist()
    elif begun:
        training.resume(path)
    else:
        training.start(path)


def leave(*, failing: int | None = None, slow: int | None = None, timeout: float = 10.0) -> float:
    """The end of a run, which one worker may not reach, or reach late; how many seconds the others waited for it."""
    workers = join(timeout=timeout)
    began = time.monotonic()
    with workers.announced():
        if rank() == slow:
            time.sleep(1.0)
        if rank() == failing:
            raise ValueError("the disk is full")
        workers.leave()
    return time.monotonic() - began
