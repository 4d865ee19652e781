"""What commands cost before and beside their work: processor time of whole processes, interleaved with `import torch`.

    python benchmarks/startup.py [--rounds 7] [--json results/bench/startup.json]

Each command runs in a fresh interpreter, in a folder of its own, with one thread; user and system time are added up. The
first round fills the file cache, compiles what an installed package brings compiled, and is not counted. On a machine that others use too, processor time rises with their
load, so look at the last column, which divides by what importing PyTorch costs in the same rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parent.parent
RUN = "--dataset-size 60000 --batch-size 1024 --releases 1000 --delta 1e-5"
TRAIN = "train --dataset digits --epsilon 3 --releases 200 --threads 1"
TORCH = "import torch"
PROGRAMS = {
    TORCH: ["-c", "import torch"],
    "import sluice": ["-c", "import sluice"],
    "sluice.PrivacyEngine": ["-c", "from sluice import PrivacyEngine"],
}
COMMANDS = {
    "sluice --help": "--help",
    "sluice methods": "methods",
    "sluice epsilon": f"epsilon {RUN} --noise-multiplier 2 --gate-noise 1",
    "sluice plan": f"plan {RUN} --epsilon 1",
    "sluice verify": "verify runs/first",
    "sluice train, 200 releases": TRAIN,
    "the same, seeded": f"{TRAIN} --seed 1",
}


def processor_seconds(arguments: list[str], folder: Path) -> float:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": ""}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, *arguments], check=True, capture_output=True, cwd=folder, env=environment)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


def measure(rounds: int) -> dict[str, list[float]]:
    programs = PROGRAMS | {name: ["-m", "sluice", *command.split()] for name, command in COMMANDS.items()}
    times: dict[str, list[float]] = {name: [] for name in programs}
    with tempfile.TemporaryDirectory() as folder:
        processor_seconds(["-m", "sluice", *TRAIN.split(), "--run", "first"], Path(folder))
        for number in range(rounds + 1):
            for name, arguments in programs.items():
                seconds = processor_seconds(arguments, Path(folder))
                if number > 0:
                    times[name].append(seconds)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    times = measure(options.rounds)
    torch = statistics.median(times[TORCH])
    rows = {
        name: {
            "median": statistics.median(seconds),
            "fastest": min(seconds),
            "of_torch": statistics.median(seconds) / torch,
        }
        for name, seconds in times.items()
    }
    table = Table("program", "median [s]", "fastest [s]", "of importing torch", box=None)
    for name, row in rows.items():
        table.add_row(name, f"{row['median']:.2f}", f"{row['fastest']:.2f}", f"{row['of_torch']:.2f}")
    Console().print(table)
    if options.json is not None:
        options.json.write_text(json.dumps({"rounds": options.rounds, "programs": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
