"""What it costs to lose at most one release in a crash: runs that keep every release against runs that keep none.

    python benchmarks/durability.py --json results/bench/durability.json

Each case is trained from its settings into a run folder, as ``sluice train`` does it, with secure noise. The two variants
differ in what is kept alone (the ledger is written ahead in both) and take turns in one process. Beside whole releases, the
time that training waits for what keeps them is taken by itself, which other programs disturb less; what the disk does in the
background is in the whole releases. Times are by the clock and of the processor, on one thread, medians and means over
releases: a whole checkpoint is made only now and then. The first releases of each run are left out (``--skip``): files are
made then that are written over later; and so is the first round, in which the process gets its memory. Disks differ: the runs
are put where ``--folder`` says.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from sluice._base.files import replaced_atomically
from sluice._base.memory import keep_freed_memory
from sluice.data import DataSplits, TensorExamples
from sluice.experiments.preparing import prepare
from sluice.experiments.run import Progress, Training
from sluice.experiments.settings import TrainSettings, settings_from
from sluice.training.keeping import StateKeeper

NEVER = 10**9
"""Checkpoints this far apart: none but the first and the last."""

COMMON = {"evaluate_every": 0, "accountant": "rdp", "noise_multiplier": 2.0}
CASES: dict[str, dict[str, Any]] = {
    "bilstm": {"dataset": "imdb", "model": "bilstm", "batch_size": 256},
    "matrix": {"method": "matrix", "model": "mlp", "batch_size": 16, "options": {"bands": 16}},
    "mlp": {"method": "dpsgd", "model": "mlp", "batch_size": 256, "optimizer": "adam", "ema_decay": 0.99},
    "linear": {"dataset": "mnist", "model": "linear"},
}
WIDE = ("matrix", "mlp")
"""Cases on random records wide enough for two million weights."""


Times = tuple[float, float]


def now() -> Times:
    return time.perf_counter(), time.process_time()


@dataclass
class Stopwatch:
    """Takes times, by the clock and of the processor."""

    wall: list[float] = field(default_factory=list)
    processor: list[float] = field(default_factory=list)

    def add(self, wall: float, processor: float) -> None:
        self.wall.append(wall)
        self.processor.append(processor)

    def figures(self) -> dict[str, float]:
        return {
            f"{name}_{kind.__name__}_ms": round(1000 * kind(times), 2)
            for name, times in (("wall", self.wall), ("processor", self.processor))
            for kind in (statistics.median, statistics.mean)
        }


@dataclass
class Watched:
    """The releases of one variant, and what it took to keep them."""

    skip: int
    releases: Stopwatch = field(default_factory=Stopwatch)
    keeping: Stopwatch = field(default_factory=Stopwatch)
    last: Times | None = None
    kept: Times = (0.0, 0.0)

    def report(self, progress: Progress) -> None:
        here = now()
        if self.last is not None and progress.release > self.skip:
            self.releases.add(here[0] - self.last[0], here[1] - self.last[1])
            self.keeping.add(*self.kept)
        self.last, self.kept = here, (0.0, 0.0)

    def watch(self, name: str) -> Callable[..., Any]:
        """A method of the keeper, with the time in it taken."""
        original = METHODS[name]

        def watched(*args: Any) -> None:
            began = now()
            original(*args)
            ended = now()
            self.kept = self.kept[0] + ended[0] - began[0], self.kept[1] + ended[1] - began[1]

        return watched


METHODS = {name: getattr(StateKeeper, name) for name in ("before_update", "after_release")}


def random_records(width: int = 31_250, count: int = 512) -> DataSplits:
    generator = torch.Generator().manual_seed(0)
    inputs, labels = torch.randn(count, width, generator=generator), torch.arange(count) % 2
    examples = TensorExamples(inputs, labels, lambda batch: batch)
    return DataSplits(name="random", kind="features", train=examples, test=examples, classes=("no", "yes"))


def measure(settings: TrainSettings, splits: DataSplits, *, rounds: int, skip: int, folder: Path) -> dict[str, Any]:
    variants = {"every release kept": Watched(skip=skip), "none kept": Watched(skip=skip)}
    order = list(zip(variants.items(), (None, NEVER), strict=True))
    for number in range(rounds + 1):
        order.reverse()
        for (name, watched), every in order:
            watched.last, watched.skip = None, skip if number else settings.releases
            for method in METHODS:
                setattr(StateKeeper, method, watched.watch(method))
            run = folder / f"{name.replace(' ', '-')}-{number}"
            Training(settings=settings, splits=splits, checkpoint_every=every, report=watched.report).start(run)
    found: dict[str, Any] = {name: watched.releases.figures() for name, watched in variants.items()}
    kept, none = found.values()
    found["keeping alone"] = variants["every release kept"].keeping.figures()
    found["share of a release"] = {
        "whole releases": {key: round(kept[key] / none[key] - 1, 4) for key in kept},
        "keeping alone": {
            key: round(found["keeping alone"][key] / none[key.replace("mean", "median")], 4) for key in kept
        },
    }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", choices=CASES, action="append")
    parser.add_argument("--releases", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--skip", type=int, default=10)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()  # as `sluice train` does
    results: dict[str, Any] = {}
    for name in options.case or CASES:
        settings = settings_from({**COMMON, **CASES[name], "releases": options.releases})
        splits = random_records() if name in WIDE else prepare(settings, show_progress=False)
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            results[name] = measure(settings, splits, rounds=options.rounds, skip=options.skip, folder=Path(folder))
        print(name, json.dumps(results[name], indent=2), flush=True)
    if options.json is not None:
        with replaced_atomically(options.json) as temporary:
            temporary.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
