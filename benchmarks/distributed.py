"""What several workers gain: releases of Sluice by one and by two processes, and steps of Opacus with DDP, interleaved.

    python benchmarks/distributed.py --json results/bench/distributed.json

Each way is a group of processes that stay; in each round every group makes one release while the others wait, so that all see the
same machine. Elapsed seconds, median and quartiles over rounds. Data is random; sampling, reading, secure noise and the update are part of a
release of Sluice, as `sluice train` makes it, without a gate and without a ledger. Opacus gets batches of fixed size from memory and
its fastest mode. Bytes are those that one worker sends for a release.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MODELS = ("pixel-cnn-551k", "scattering-cnn-187k", "bilstm-2.0m", "transformer")
_UNCOUNTED = 2


@dataclass(frozen=True, kw_only=True)
class Way:
    """A way to make a release.

    Attributes:
        library: "sluice", or a mode of Opacus.
        workers, threads: processes, and threads of each.
    """

    library: str
    workers: int
    threads: int

    @property
    def name(self) -> str:
        return f"{self.library}, {self.workers} x {self.threads}"


SLUICE = (
    Way(library="sluice", workers=1, threads=1),
    Way(library="sluice", workers=1, threads=2),
    Way(library="sluice", workers=2, threads=1),
)
OPACUS = (Way(library="hooks", workers=2, threads=1), Way(library="ghost", workers=2, threads=1))


class Group:
    """The processes of one way; each makes a release when it is told to."""

    def __init__(self, way: Way, *, model: str, batch: int, folder: Path) -> None:
        self.way = way
        store = folder / f"{way.name}.store".replace(" ", "-")
        arguments = [f"--model={model}", f"--batch={batch}", f"--way={way.library}", f"--threads={way.threads}"]
        self._processes = [
            subprocess.Popen(
                [
                    sys.executable,
                    __file__,
                    "--worker",
                    *arguments,
                    f"--rank={rank}",
                    f"--size={way.workers}",
                    f"--store={store}",
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=os.environ | {"OMP_NUM_THREADS": str(way.threads)},
            )
            for rank in range(way.workers)
        ]
        self.works = all(self._answers())

    def release(self) -> tuple[float, int]:
        """Elapsed seconds until the last process is done, and bytes that the first one has sent."""
        began = time.perf_counter()
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        sent = self._answers()
        return time.perf_counter() - began, sent[0]

    def close(self) -> None:
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.close()
        for process in self._processes:
            process.wait()

    def _answers(self) -> list[Any]:
        found = []
        for process in self._processes:
            assert process.stdout is not None
            line = process.stdout.readline()
            found.append(json.loads(line) if line else False)
        return found


def sluice_steps(model: str, batch: int) -> tuple[Callable[[], None], Callable[[], int]]:
    from sluice.experiments.bench.paper import SCENARIOS
    from sluice.experiments.bench.steps import release_step
    from sluice.training.distributed import join

    scenario = SCENARIOS[model]
    return release_step(scenario, scenario.model(), batch), lambda: getattr(join(), "sent", 0)


def opacus_steps(mode: str, model: str, batch: int, workers: int) -> tuple[Callable[[], None], Callable[[], int]]:
    from opacus.distributed import DifferentiallyPrivateDistributedDataParallel
    from opacus.grad_sample.utils import wrap_model
    from opacus.optimizers import get_optimizer_class
    from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping
    from opacus.validators import ModuleValidator
    from torch import nn

    from sluice.experiments.bench.paper import SCENARIOS
    from sluice.experiments.bench.scenarios import sgd

    scenario = SCENARIOS[model]
    module = ModuleValidator.fix(scenario.model())
    x, y = scenario.batch(batch // workers)
    wrapped = wrap_model(
        DifferentiallyPrivateDistributedDataParallel(module),
        grad_sample_mode=mode,
        batch_first=True,
        loss_reduction="mean",
    )
    kind = get_optimizer_class(clipping="flat", distributed=True, grad_sample_mode=mode)
    private = kind(sgd(module), noise_multiplier=1.0, max_grad_norm=1.0, expected_batch_size=len(y))
    criterion: Callable[..., Any] = nn.CrossEntropyLoss()
    if mode == "ghost":
        criterion = DPLossFastGradientClipping(wrapped, private, nn.CrossEntropyLoss())

    def step() -> None:
        criterion(wrapped(x), y).backward()
        private.step()
        private.zero_grad()

    parameters = sum(p.numel() for p in module.parameters())
    return step, lambda: 4 * parameters  # an all-reduce between two, not counted by itself


def work(options: argparse.Namespace) -> None:
    """A process of a group."""
    import torch
    import torch.distributed as dist

    warnings.simplefilter("ignore")
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    try:
        if options.size > 1:
            method = f"file://{options.store}"
            dist.init_process_group("gloo", init_method=method, rank=options.rank, world_size=options.size)
        if options.way == "sluice":
            step, sent = sluice_steps(options.model, options.batch)
        else:
            step, sent = opacus_steps(options.way, options.model, options.batch, options.size)
        step()
    except Exception as error:
        print(f"{options.way} cannot run {options.model}: {error}", file=sys.stderr)
        print(json.dumps(False), flush=True)
        return
    print(json.dumps(True), flush=True)
    for _ in sys.stdin:
        before = sent()
        step()
        print(json.dumps(sent() - before if options.way == "sluice" else sent()), flush=True)


def measured(model: str, ways: Sequence[Way], *, batch: int, rounds: int) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        groups = [Group(way, model=model, batch=batch, folder=Path(folder)) for way in ways]
        times: dict[str, list[float]] = {group.way.name: [] for group in groups if group.works}
        sent: dict[str, int] = {}
        for number in range(_UNCOUNTED + rounds):
            for group in groups:
                if group.works:
                    seconds, sent[group.way.name] = group.release()
                    if number >= _UNCOUNTED:
                        times[group.way.name].append(seconds)
        for group in groups:
            group.close()
    return [
        {
            "model": model,
            "way": name,
            "seconds": statistics.median(each),
            "quartiles": statistics.quantiles(each, n=4)[::2] if len(each) > 1 else None,
            "bytes": sent[name],
        }
        for name, each in times.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--without-opacus", action="store_true")
    parser.add_argument("--json", type=Path, default=None)
    for hidden in ("--model", "--way", "--store"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    for hidden in ("--rank", "--size", "--threads"):
        parser.add_argument(hidden, type=int, help=argparse.SUPPRESS)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options)
        return
    ways = SLUICE if options.without_opacus else (*SLUICE, *OPACUS)
    results = []
    for model in options.models.split(","):
        found = measured(model, ways, batch=options.batch, rounds=options.rounds)
        results += found
        one = found[0]["seconds"]
        for each in found:
            print(
                f"{model:22} {each['way']:16} {each['seconds']:8.3f} s   {one / each['seconds']:5.2f}   {each['bytes']:>12,} bytes"
            )
    load = os.getloadavg()[0]
    if options.json:
        from sluice._base.files import replaced_atomically

        settings = {"batch": options.batch, "rounds": options.rounds, "processors": os.cpu_count(), "load": load}
        content = {"settings": settings, "python": platform.python_version(), "results": results}
        with replaced_atomically(options.json) as temporary:
            temporary.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
