"""Does selection help? The same training with the gate, without it, and with a coin in its place.

    python benchmarks/selection.py --dataset mnist --epsilon 1 --seeds 0 1 2

Each cell is one seeded run of `sluice train`'s own code and becomes a small JSON file under results/selection, which is
re-used unless --again is given. Data passes and times are sensitive in real runs; here the data is public.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch

from sluice import __version__
from sluice._base.files import replaced_atomically
from sluice.data import DataSplits
from sluice.experiments.preparing import prepare
from sluice.experiments.run import Training
from sluice.experiments.settings import TrainSettings, settings_from
from sluice.runs.trace import TraceRow

RESULTS = Path(__file__).resolve().parent.parent / "results" / "selection"
GATES = ("clipping-bias", "none", "coin")
_SCATTERING = {"features": "scattering", "model": "linear", "lr": 0.1, "scaling_bound": 0.3, "ema_decay": 0.99}
LINEAR_ON_SCATTERING: dict[str, dict[str, object]] = {
    "mnist": {**_SCATTERING, "releases": 1500, "batch_size": 1024},
    "fashion-mnist": {**_SCATTERING, "releases": 2000, "batch_size": 2048},
}


def run_cell(settings: TrainSettings, splits: DataSplits) -> dict[str, object]:
    rows: list[TraceRow] = []
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        training = Training(
            settings=settings, splits=splits, report_private=rows.append, checkpoint_every=settings.releases
        )
        result = training.start(Path(folder) / "run")
    passes = [row.measured / settings.batch_size for row in rows]
    return {
        "settings": settings.to_dict(),
        "mechanism": result.mechanism.to_dict(),
        "epsilon": result.epsilon,
        "delta": result.delta,
        "accountant": result.accountant,
        "releases": result.releases,
        "test_accuracy": result.test_accuracy,
        "held_out_accuracy": result.held_out_accuracy,
        "data_passes_per_release": statistics.fmean(passes),
        "attempts_per_release": statistics.fmean(row.attempts for row in rows),
        "seconds_per_release": statistics.median(row.seconds for row in rows),
        "wall_seconds": time.monotonic() - began,
        "threads": torch.get_num_threads(),
        "version": __version__,
        "commit": subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
        ).stdout.strip(),
    }


def spread(values: list[float]) -> str:
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{100 * statistics.fmean(values):.2f} ± {100 * deviation:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", default="mnist")
    parser.add_argument("--epsilon", type=float, default=1.0)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--gates", nargs="+", choices=GATES, default=GATES)
    parser.add_argument("--hold-out", type=float, default=0.0, help="choose settings: leave the test set alone")
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="change a setting (JSON value)"
    )
    parser.add_argument("--tag", default="", help="a word in the names of the result files")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--again", action="store_true", help="run cells that have a result already")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)

    changes = {}
    for item in options.set:
        name, _, value = item.partition("=")
        try:
            changes[name] = json.loads(value)
        except json.JSONDecodeError:
            changes[name] = value
    base = settings_from(
        {
            "dataset": options.dataset,
            "epsilon": options.epsilon,
            **LINEAR_ON_SCATTERING.get(options.dataset, {}),
            "hold_out": options.hold_out,
            **({} if options.hold_out else {"evaluate_every": 0}),
            **changes,
        },
        recipe="paper",
    )
    splits = prepare(base)
    for gate in options.gates:
        cells = []
        for seed in options.seeds:
            name = "-".join(
                filter(None, [options.dataset, f"eps{options.epsilon:g}", gate, options.tag, f"seed{seed}"])
            )
            path = options.output / f"{name}.json"
            if options.again or not path.exists():
                cell = run_cell(replace(base, gate=gate, seed=seed), splits)
                with replaced_atomically(path) as temporary:
                    temporary.write_text(json.dumps(cell, indent=1) + "\n")
            cells.append(json.loads(path.read_text()))
        key = "held_out_accuracy" if options.hold_out else "test_accuracy"
        print(
            f"{options.dataset} epsilon {options.epsilon:g} gate {gate:13s} {key} {spread([c[key] for c in cells])} % "
            f"(epsilon {max(c['epsilon'] for c in cells):.4f}), passes per release "
            f"{statistics.fmean(c['data_passes_per_release'] for c in cells):.2f}, seconds per release "
            f"{statistics.fmean(c['seconds_per_release'] for c in cells):.4f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
