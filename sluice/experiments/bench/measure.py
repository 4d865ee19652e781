"""Interleaved timing, and peak memory in processes of their own."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from sluice._base.errors import InputError
from sluice.experiments.bench.peers import Skipped
from sluice.experiments.bench.steps import FLOORS, METHODS, PEERS, Step, make_step
from sluice.experiments.bench.suites import SCENARIOS

#: A peer this many times slower than ours, or whose step takes this many seconds, is measured once, cold. Ordinary steps and
#: ours that take so long are measured once after the first one, in which ours learns the model.
_HOPELESS = 20.0
_LONG_SECONDS = 4.0
#: A peer is left out where its time or memory on a smaller batch says that it would take more than this, or where that time
#: was this many times that of the library's best mode.
_MOST_SECONDS = 120.0
_MOST_MEGABYTES = 10_000.0
_NOT_THE_BEST = 1.6


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """Median time of one step of one method, and its peak memory beyond the model and the batch.

    Attributes:
        repeats: how many steps the median is taken of.
        skipped: why there is no time.
    """

    model: str
    batch: int
    threads: int
    method: str
    seconds: float | None
    megabytes: float | None
    skipped: str | None
    repeats: int = 0


def measure(
    models: Sequence[str],
    batches: Sequence[int],
    threads: Sequence[int],
    *,
    repeats: int,
    memory: bool,
    report: Callable[[str], None],
) -> list[Measurement]:
    """Measure every method on every combination. Methods take turns, so that a busy machine slows all alike."""
    if memory and not Path("/proc/self/clear_refs").exists():
        raise InputError(
            "memory=True is not allowed here: peaks are read from /proc, which this system lacks. Leave it out."
        )
    results: list[Measurement] = []
    before = torch.get_num_threads()
    try:
        for count in threads:
            torch.set_num_threads(count)
            for model in models:
                for batch in batches:
                    report(f"{model}, batch {batch}, {count} thread{'s' if count > 1 else ''}")
                    # Memory hardly depends on threads, so it is measured once.
                    with_memory = memory and count == threads[0]
                    smaller = [r for r in results if r.model == model and r.batch < batch]
                    results.extend(
                        _combination(model, batch, count, repeats=repeats, memory=with_memory, smaller=smaller)
                    )
    finally:
        torch.set_num_threads(before)
    return results


def _combination(
    model: str, batch: int, threads: int, *, repeats: int, memory: bool, smaller: Sequence[Measurement]
) -> list[Measurement]:
    scenario = SCENARIOS[model]
    torch.manual_seed(0)
    net = scenario.model()
    # One thread is timed by the processor's clock, which other processes do not move; more need the clock on the wall.
    clock = time.process_time if threads == 1 else time.perf_counter

    def timed(step: Step) -> float:
        start = clock()
        step()
        return clock() - start

    steps: dict[str, Step] = {}
    skipped: dict[str, str] = {}
    times: dict[str, list[float]] = {}
    ours = float("inf")
    for method in METHODS:
        try:
            if method in PEERS:
                _refuse_too_slow(method, smaller, batch, threads)
            step = make_step(method, scenario, net, batch)
            first = timed(step)
        except Skipped as reason:
            skipped[method] = str(reason)
        except Exception as error:
            if method not in PEERS:
                raise
            # A peer that cannot run this model, for whatever reason, is a result, not a failure of the benchmark.
            skipped[method] = f"{type(error).__name__}: {str(error).splitlines()[0][:120] if str(error) else ''}"
        else:
            ours = min(ours, first) if method == "sluice" else ours
            if method in PEERS and first > min(_LONG_SECONDS, _HOPELESS * ours):
                times[method] = [first]
            elif first > _LONG_SECONDS and (second := timed(step)) > _LONG_SECONDS:
                times[method] = [second]
            else:
                steps[method], times[method] = step, []
    for _ in range(repeats):
        for method, step in steps.items():
            times[method].append(timed(step))
    return [
        Measurement(
            model=model,
            batch=batch,
            threads=threads,
            method=method,
            seconds=statistics.median(times[method]) if method in times else None,
            megabytes=peak_memory(model, batch, method) if memory and method in times else None,
            skipped=skipped.get(method),
            repeats=len(times.get(method, [])),
        )
        for method in METHODS
    ]


def _refuse_too_slow(method: str, smaller: Sequence[Measurement], batch: int, threads: int) -> None:
    """Time and memory grow at least in proportion to the batch where no smaller one was too much already."""
    library = method.split()[0]
    for result in [r for r in smaller if r.method == method]:
        growth = batch / result.batch
        if result.megabytes is not None and result.megabytes * growth > _MOST_MEGABYTES:
            raise Skipped(f"would need about {result.megabytes * growth / 1000:.0f} GB")
        if result.seconds is None or result.threads != threads:
            continue
        if result.seconds * growth > _MOST_SECONDS:
            raise Skipped(f"would take about {result.seconds * growth:.0f} s a step")
        others = [
            r for r in smaller if r.method.startswith(library) and (r.batch, r.threads) == (result.batch, threads)
        ]
        best = min(r.seconds for r in others if r.seconds is not None)
        if result.seconds > _NOT_THE_BEST * best:
            raise Skipped(
                f"took {result.seconds / best:.1f} times as long as the library's best mode at {result.batch}"
            )


def peak_memory(model: str, batch: int, method: str) -> float:
    """Peak resident memory, in MB, that two steps need beyond the model and the batch; in a fresh process (Linux)."""
    command = [sys.executable, "-m", "sluice.experiments.bench.measure", model, str(batch), method]
    result = subprocess.run(command, check=True, capture_output=True, text=True)
    return float(json.loads(result.stdout)["megabytes"])


def _report_own_peak(model: str, batch: int, method: str) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    # A step on a few samples first: code and libraries that it loads are no part of what grows with the batch.
    net = SCENARIOS[model].model()
    make_step(method, SCENARIOS[model], net, 2)()
    step = make_step(method, SCENARIOS[model], net, batch)
    # The kernel forgets the peak so far, which importing made, and starts again from what is resident now.
    Path("/proc/self/clear_refs").write_text("5")
    start = _peak_kilobytes()
    step()
    step()
    print(json.dumps({"megabytes": (_peak_kilobytes() - start) / 1024}))


def _peak_kilobytes() -> int:
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))


def ratios(results: Sequence[Measurement]) -> list[dict[str, object]]:
    """For each combination: a release over the fastest ordinary step, parts of it, and the peers over a release."""
    rows: list[dict[str, object]] = []
    for key in dict.fromkeys((r.model, r.batch, r.threads) for r in results):
        group = [r for r in results if (r.model, r.batch, r.threads) == key]
        seconds = {r.method: r.seconds for r in group if r.seconds is not None}
        memory = {r.method: r.megabytes for r in group if r.megabytes is not None}
        floor = min((m for m in FLOORS if m in seconds), key=lambda m: seconds[m])
        ours = seconds["sluice"]

        def best(library: str, among: dict[str, float] = seconds) -> str | None:
            return min((m for m in among if m.startswith(library)), key=lambda m: among[m], default=None)

        peers = {library: best(library) for library in ("vmap", "opacus", "fastdp")}
        opacus = peers["opacus"]
        rows.append(
            {
                "model": key[0],
                "batch": key[1],
                "threads": key[2],
                "fastest_ordinary": floor,
                "best_opacus": opacus,
                "release_over_ordinary": ours / seconds[floor],
                "gradients_over_ordinary": seconds["sluice, gradients only"] / seconds[floor],
                "norms_over_gradients": seconds["sluice, norms only"] / seconds["sluice, gradients only"],
                **{f"{library}_over_release": seconds[m] / ours if m else None for library, m in peers.items()},
                "memory_over_opacus": memory["sluice"] / memory[opacus] if opacus and memory.get(opacus) else None,
            }
        )
    return rows


if __name__ == "__main__":
    _report_own_peak(sys.argv[1], int(sys.argv[2]), sys.argv[3])
