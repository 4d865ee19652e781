"""What one release costs beside gradients when several workers share it: a model, its constants, and a check of it.

    python benchmarks/scale_model.py                                            # the table of docs/scale.md
    python benchmarks/scale_model.py --measure --json results/bench/scale.json  # constants of this machine, and the check

`cost` is the model: every line of it says which part of the code it stands for. With ``--measure`` its constants are taken on
this machine, with two processes on the loopback address, and the model is held against `WorkerGroup.noisy_totals` as a whole,
which no constant was taken from but what it takes for a single entry. What one process does alone is taken in processor time, the rest by the clock, always the best
of many: on a machine that others use too, that is the nearest to what the code costs.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

FLOAT, DOUBLE = 4, 8


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Constants of a machine. Seconds, and bytes per second for one worker.

    Attributes:
        latency: of one operation over all workers.
        call: of one exchange, whatever its size, beside its operations.
        bandwidth: between this worker and the others, all of it together.
        noise: of one entry, made and added.
        copying: of one entry, into memory that is new.
        sampling: of one record: its coin.
        sync: until a line of the ledger is on disk.
        writing: bytes per second of the journal, which worker 0 writes.
        gather_bandwidth: in which FSDP gathers parameters; None where it is the same.
    """

    latency: float
    call: float
    bandwidth: float
    noise: float
    copying: float
    sampling: float
    sync: float
    writing: float
    gather_bandwidth: float | None = None


@dataclass(frozen=True, kw_only=True)
class Work:
    """One release, on average.

    Attributes:
        parameters: that are trained.
        whole: all of them, where the model is sharded; 0 where every worker has it.
        whole_bytes: of each of those.
        batch: records of an attempt.
        attempts: that are looked at, for each release (those that cannot be accepted cost nothing); 1 is without a gate.
        rows: of a chunk.
        kept: whether releases are logged and kept for resuming, as `sluice train` does it.
        record_seconds: forward, backward, norm and sum of one record on one worker.
    """

    workers: int
    parameters: int
    batch: float
    records: int
    rows: int
    record_seconds: float
    attempts: float = 1.0
    whole: int = 0
    whole_bytes: int = FLOAT
    kept: bool = True


def rounds(work: Work) -> int:
    """Chunks of the worker with the most records."""
    return max(1, math.ceil(work.batch / (work.rows * work.workers)))


def sent(work: Work) -> float:
    """Bytes that one worker sends for one release.

    | what | bytes |
    |---|---|
    | its part of the sum to each other worker (`all_to_all`) | 4 P (N - 1) / N |
    | its noisy part to each other worker (`all_gather`) | 4 P (N - 1) / N |
    | the metric and the number of records, each round of each attempt | 16 |
    | that the release is logged, and that all are in step | about 4096 + 64 |
    | sharded: instead of the first two, sums each round, and parameters gathered twice | (4 P + 2 b W) (N - 1) / N |
    """
    others = (work.workers - 1) / work.workers
    small = 16 * rounds(work) * work.attempts + 4160
    if work.workers == 1:
        return 0.0
    if work.whole:
        each_round = (FLOAT * work.parameters + 2 * work.whole_bytes * work.whole) * others
        return each_round * rounds(work) * work.attempts + small
    return 2 * FLOAT * work.parameters * others + small


def cost(work: Work, machine: Machine) -> dict[str, float]:
    """Seconds of one release, by what they are spent on."""
    n, p = work.workers, work.parameters
    others = (n - 1) / n
    several = n > 1
    turns = rounds(work) * work.attempts
    found = {
        "gradients": turns * work.rows * work.record_seconds,
        # Every worker draws the sample of all records: it is common to them, and nobody has to send it.
        "sampling": work.attempts * work.records * machine.sampling,
        "metric": turns * machine.latency * (several and work.attempts > 1),
        # Into one vector (which is zero first), received, added up in float64, rounded, gathered, put together.
        "copying": (7 * p * machine.copying if several else 0.0),
        "exchange": 0.0,
        "gathering": 0.0,
        "noise": p / n * machine.noise,
        # Being in step, the digest of the weights, and that worker 0 has written.
        "agreeing": 3 * machine.latency * several,
        "ledger": machine.sync * work.kept,
        "journal": FLOAT * p / machine.writing * work.kept,
    }
    if several and work.whole:
        fast = machine.gather_bandwidth or machine.bandwidth
        found["gathering"] = turns * 2 * work.whole_bytes * work.whole * others / fast
        found["exchange"] = turns * FLOAT * p * others / machine.bandwidth
        found["copying"] = turns * 4 * p * machine.copying
        found["journal"] = 0.0  # the state of a sharded model is not written
    elif several:
        found["exchange"] = machine.call + 2 * machine.latency + 2 * FLOAT * p * others / machine.bandwidth
    return found


def total(work: Work, machine: Machine) -> float:
    return sum(cost(work, machine).values())


def efficiency(work: Work, machine: Machine) -> float:
    """How many times as fast as one worker, over the number of workers."""
    return total(replace(work, workers=1, whole=0), machine) / (work.workers * total(work, machine))


#: Taken by --measure on two cores of an AMD EPYC, one thread each, on the loopback address; a virtual disk.
HERE = Machine(
    latency=1.3e-4, call=4e-4, bandwidth=1.3e9, noise=5.2e-9, copying=4.5e-10, sampling=1.55e-9, sync=2e-4, writing=1e9
)

#: What is assumed of machines that are not here. Noise is made by the processor, by one thread of each worker, as it is here.
NODE = replace(HERE, latency=5e-5, bandwidth=2e9, gather_bandwidth=200e9)
"""GPUs of one node: sums go through the processors (gloo), parameters of sharded models by NVLink."""
CLUSTER = replace(HERE, latency=2e-4, bandwidth=25e9 / 8 / 8, gather_bandwidth=25e9 / 8 / 8)
"""Nodes with 25 Gbit/s each, which its eight workers share."""

#: Of a GPU that sustains 1.2e14 operations a second: 105e9 for an image through a ViT-B (86 million parameters, forward and
#: backward and norms), 4 * 7e9 for each of 512 words through a model of 7 billion whose weights are frozen but for LoRA.
VIT, LORA = 105e9 / 1.2e14, 4 * 7e9 * 512 / 1.2e14
IMAGES = Work(workers=8, parameters=86_000_000, batch=4096, records=1_281_167, rows=64, record_seconds=VIT)
TEXTS = Work(workers=8, parameters=40_000_000, batch=1024, records=10**6, rows=4, record_seconds=LORA)

#: Releases of benchmarks/distributed.py: batches of 1024, two workers with one thread each, nothing kept. Gradients are those
#: of one thread, by results/bench/gradients.json.
PAPER = {
    name: Work(
        workers=2, parameters=parameters, batch=1024, records=8192, rows=64, record_seconds=seconds / 1024, kept=False
    )
    for name, parameters, seconds in (
        ("pixel CNN 551k", 550_570, 3.65),
        ("scattering CNN 187k", 187_210, 0.848),
        ("BiLSTM 2.0m", 2_021_202, 0.311),
        ("transformer", 266_250, 5.50),
    )
}

CASES: dict[str, tuple[Work, Machine]] = {
    **{f"{name}, 2 processes here": (work, HERE) for name, work in PAPER.items()},
    "ViT-B, 8 GPUs, one node": (IMAGES, NODE),
    "the same, gate with 3 attempts": (replace(IMAGES, attempts=3.0), NODE),
    "ViT-B, 64 GPUs, 25 Gbit/s": (replace(IMAGES, workers=64, batch=32768), CLUSTER),
    "7 billion, LoRA, 8 GPUs": (TEXTS, NODE),
    "7 billion, LoRA, 64 GPUs, 25 Gbit/s": (replace(TEXTS, workers=64, batch=8192), CLUSTER),
    "7 billion, LoRA, sharded, 8 GPUs": (replace(TEXTS, whole=7 * 10**9, whole_bytes=2, rows=16), NODE),
    "7 billion, LoRA, sharded, 64 GPUs, 25 Gbit/s": (
        replace(TEXTS, workers=64, batch=8192, whole=7 * 10**9, whole_bytes=2, rows=16),
        CLUSTER,
    ),
    "7 billion, all trained, sharded, 8 GPUs": (
        replace(TEXTS, parameters=7 * 10**9, whole=7 * 10**9, whole_bytes=2, rows=16, record_seconds=1.5 * LORA),
        NODE,
    ),
    "ViT-B, 8 GPUs, 10^9 records": (replace(IMAGES, records=10**9), NODE),
    "ViT-B, 64 GPUs, 10^9 records": (replace(IMAGES, records=10**9, workers=64, batch=32768), CLUSTER),
}


def print_cases() -> None:
    print(
        "| case | sent by a worker | gradients | sampling | exchange, gathering | noise | ledger, journal | rest | release | efficiency |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    for name, (work, machine) in CASES.items():
        found = cost(work, machine)
        columns = [
            found["gradients"],
            found["sampling"],
            found["exchange"] + found["gathering"],
            found["noise"],
            found["ledger"] + found["journal"],
            found["metric"] + found["copying"] + found["agreeing"],
            sum(found.values()),
        ]
        shown = " | ".join(_seconds(value) for value in columns)
        print(f"| {name} | {_bytes(sent(work))} | {shown} | {100 * efficiency(work, machine):.0f} % |")


def _seconds(value: float) -> str:
    return f"{value:.3g} s" if value >= 1 else f"{1e3 * value:.3g} ms"


def _bytes(value: float) -> str:
    return next(
        f"{value / unit:.3g} {name}"
        for unit, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1, "B"))
        if value >= unit or unit == 1
    )


SIZES = (10_000, 100_000, 550_570, 2_021_202)
REPEATS = 40


def best(job: Callable[[], Any], *, clock: Callable[[], float] = time.perf_counter, repeats: int = REPEATS) -> float:
    found = math.inf
    for _ in range(repeats):
        began = clock()
        job()
        found = min(found, clock() - began)
    return found


def measured_alone(folder: Path) -> dict[str, float]:
    """Constants of one process: noise and sampling as they are used here, in processor time."""
    import torch

    from sluice.randomness.noise import SecureNoise, noisy_sum
    from sluice.randomness.sampling import PoissonSampler

    def of_processor(job: Callable[[], Any], count: int) -> float:
        return best(job, clock=time.process_time, repeats=10) / count

    entries, records = 2_000_000, 10_000_000
    own = torch.zeros(entries, dtype=torch.float64)
    parts = [torch.zeros(entries) for _ in range(4)]
    sampler = PoissonSampler(dataset_size=records, sample_rate=1e-3)
    with (folder / "ledger").open("ab", buffering=0) as line, (folder / "journal").open("wb", buffering=0) as journal:

        def sync() -> None:
            line.write(b"x" * 300)
            os.fsync(line.fileno())

        def write() -> None:
            journal.seek(0)
            journal.write(bytes(FLOAT * entries))
            os.fsync(journal.fileno())

        return {
            "noise": of_processor(
                lambda: noisy_sum([own], noise_multiplier=1.0, sensitivity=1.0, noise=SecureNoise()), entries
            ),
            "copying": of_processor(lambda: torch.cat(parts), 4 * entries),
            "sampling": of_processor(sampler.sample, records),
            "sync": best(sync),
            "writing": FLOAT * entries / best(write, repeats=10),
        }


def measured_together(rank: int, store: str) -> dict[str, Any]:
    """Constants of two processes, and what `noisy_totals` takes as a whole."""
    import torch
    import torch.distributed as dist

    from sluice.randomness.noise import SecureNoise
    from sluice.training.distributed.group import WorkerGroup

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    small, large = torch.zeros(2, dtype=torch.float64), torch.zeros(1_000_000)
    received = torch.empty_like(large)
    latency = best(lambda: dist.all_reduce(small), repeats=400)
    sending = best(lambda: dist.all_to_all_single(received, large)) - latency
    # What the processor does for it: a machine that others use too tells no more than that.
    small_work = best(lambda: dist.all_reduce(small), clock=time.process_time, repeats=400)
    large_work = best(lambda: dist.all_to_all_single(received, large), clock=time.process_time)
    workers = WorkerGroup(timeout=600.0)
    noise = SecureNoise()
    totals, processor, bytes_sent = {}, {}, {}
    for size in (1, *SIZES):
        raw = {"weights": torch.zeros(size)}

        def release(raw: dict[str, Any] = raw) -> None:
            workers.noisy_totals(raw, noise_multiplier=1.0, sensitivity=1.0, noise=noise, sum_error=0.0)

        before = workers.sent
        release()
        bytes_sent[size] = workers.sent - before
        totals[size] = best(release)
        processor[size] = best(release, clock=time.process_time)
    return {
        "latency": latency,
        "call": max(0.0, processor[1] - 3 * small_work),
        "bandwidth": FLOAT * len(large) / 2 / sending,
        "operation_work": small_work,
        "byte_work": max(0.0, large_work - small_work) / (FLOAT * len(large) / 2),
        "totals": totals,
        "processor": processor,
        "sent": bytes_sent,
    }


def measure() -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        alone = measured_alone(folder)
        command = [sys.executable, __file__, "--store", str(folder / "store"), "--rank"]
        workers = [subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE, text=True) for rank in (0, 1)]
        texts = [worker.communicate(timeout=900)[0] for worker in workers]
        together = json.loads(texts[0])
    machine = Machine(**{name: together[name] for name in ("latency", "call", "bandwidth")}, **alone)
    checks = []
    for size in SIZES:
        work = Work(workers=2, parameters=size, batch=1, records=1, rows=1, record_seconds=0.0)
        found = cost(work, machine)
        local = found["copying"] + found["noise"]
        checks.append(
            {
                "parameters": size,
                "model_seconds": local + found["exchange"] + machine.latency,
                "measured_seconds": together["totals"][str(size)],
                "model_processor": machine.call
                + local
                + sent(work) * together["byte_work"]
                + 3 * together["operation_work"],
                "measured_processor": together["processor"][str(size)],
                "model_bytes": 2 * FLOAT * size / 2,
                "measured_bytes": together["sent"][str(size)],
            }
        )
    return {"machine": asdict(machine), "load": os.getloadavg()[0], "checks": checks}


def print_checks(found: dict[str, Any]) -> None:
    print(json.dumps(found["machine"]), f"load {found['load']:.1f}")
    print(
        "| parameters | by the clock: model | measured | of the processor: model | measured | bytes: model | counted |"
    )
    print("|---|---|---|---|---|---|---|")
    for check in found["checks"]:
        times = (check[f"{kind}_{of}"] for of in ("seconds", "processor") for kind in ("model", "measured"))
        print(
            f"| {check['parameters']:,} | {' | '.join(map(_seconds, times))} "
            f"| {check['model_bytes']:,.0f} | {check['measured_bytes']:,} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--measure", action="store_true", help="take the constants of this machine, and check the model"
    )
    parser.add_argument("--json", type=Path, help="write constants and checks here")
    parser.add_argument("--store", help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.store is not None:
        print(json.dumps(measured_together(given.rank, given.store)), flush=True)
        os._exit(0)  # the other one may be gone already, and taking the group down would wait for it
    if given.measure:
        found = measure()
        print_checks(found)
        if given.json is not None:
            given.json.write_text(json.dumps(found, indent=1) + "\n")
        return
    print_cases()


if __name__ == "__main__":
    main()
