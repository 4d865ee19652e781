"""What it costs to lose at most one release in a crash: runs that keep every release against runs that keep none.

    python benchmarks/durability.py --json results/bench/durability.json

Each case is trained from its settings into a run folder, as ``sluice train`` does it, with secure noise. The two variants
differ in checkpoints alone (the ledger is written ahead in both) and take turns in one process. Times are medians over releases
(the first few are not counted), by the clock and of the processor, on one thread; the mean is given too, because a whole
checkpoint is made only now and then. Disks differ: the runs are put where ``--folder`` says.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from sluice._base.files import replaced_atomically
from sluice.data import DataSplits, TensorExamples
from sluice.experiments.preparing import prepare
from sluice.experiments.run import Progress, Training
from sluice.experiments.settings import TrainSettings, settings_from

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


@dataclass
class Stopwatch:
    """Takes the time from one release to the next."""

    skip: int
    wall: list[float] = field(default_factory=list)
    processor: list[float] = field(default_factory=list)
    _last: tuple[float, float] | None = None

    def report(self, progress: Progress) -> None:
        now = time.perf_counter(), time.process_time()
        if self._last is not None and progress.release > self.skip:
            self.wall.append(now[0] - self._last[0])
            self.processor.append(now[1] - self._last[1])
        self._last = now

    def figures(self) -> dict[str, float]:
        return {
            f"{name}_{kind.__name__}_ms": round(1000 * kind(times), 2)
            for name, times in (("wall", self.wall), ("processor", self.processor))
            for kind in (statistics.median, statistics.mean)
        }


def random_records(width: int = 31_250, count: int = 512) -> DataSplits:
    generator = torch.Generator().manual_seed(0)
    inputs, labels = torch.randn(count, width, generator=generator), torch.arange(count) % 2
    examples = TensorExamples(inputs, labels, lambda batch: batch)
    return DataSplits(name="random", kind="features", train=examples, test=examples, classes=("no", "yes"))


def measure(settings: TrainSettings, splits: DataSplits, *, rounds: int, folder: Path) -> dict[str, Any]:
    watches = {"every release kept": Stopwatch(skip=4), "none kept": Stopwatch(skip=4)}
    for number in range(rounds):
        for (name, watch), every in zip(watches.items(), (None, NEVER), strict=True):
            watch._last = None
            run = folder / f"{name.replace(' ', '-')}-{number}"
            Training(settings=settings, splits=splits, checkpoint_every=every, report=watch.report).start(run)
    found: dict[str, Any] = {name: watch.figures() for name, watch in watches.items()}
    kept, none = found.values()
    found["share of a release"] = {
        key.removesuffix("_ms"): round(kept[key] / none[key] - 1, 4) for key in kept if key.endswith("_ms")
    }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", choices=CASES, action="append")
    parser.add_argument("--releases", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    results: dict[str, Any] = {}
    for name in options.case or CASES:
        settings = settings_from({**COMMON, **CASES[name], "releases": options.releases})
        splits = random_records() if name in WIDE else prepare(settings, show_progress=False)
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            results[name] = measure(settings, splits, rounds=options.rounds, folder=Path(folder))
        print(name, json.dumps(results[name], indent=2), flush=True)
    if options.json is not None:
        with replaced_atomically(options.json) as temporary:
            temporary.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
