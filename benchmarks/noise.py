"""What secure noise costs: releases of several sizes beside torch.randn, and beside a training step.

All of it runs interleaved in one process, so that the ratios mean something on a busy machine: in processor time on one
thread, else in elapsed time. Run: python benchmarks/noise.py [--threads N] [--rounds N] [--output FILE]; with
SLUICE_NATIVE=0 for the torch operations that take over where there is no compiler.
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from sluice.randomness.native.kernels import available
from sluice.randomness.noise import SecureNoise, noisy_sum
from sluice.randomness.sampling import PoissonSampler

SIZES = {
    "26 thousand": [26_000],
    "187 thousand": [187_000],
    "1.9 million": [1_900_000],
    "100 tensors of 260": [260] * 100,
    "100 tensors of 1870": [1870] * 100,
}


def convolutional() -> tuple[torch.nn.Module, torch.Tensor]:
    """An eight-layer net for 32x32 images, and a batch of 256."""
    widths = [3, 32, 32, 64, 64, 128, 128, 192, 256]
    layers: list[torch.nn.Module] = []
    for place, (before, after) in enumerate(itertools.pairwise(widths)):
        layers += [torch.nn.Conv2d(before, after, 3, padding=1), torch.nn.GroupNorm(8, after), torch.nn.ReLU()]
        if place % 2:
            layers.append(torch.nn.MaxPool2d(2))
    model = torch.nn.Sequential(*layers, torch.nn.Flatten(), torch.nn.Linear(4 * widths[-1], 10))
    images = torch.randn(256, 3, 32, 32).to(memory_format=torch.channels_last)
    return model.to(memory_format=torch.channels_last), images


def dense() -> tuple[torch.nn.Module, torch.Tensor]:
    """The least work that a million parameters can do for a record, and a batch of 1024."""
    model = torch.nn.Sequential(torch.nn.Linear(784, 784), torch.nn.ReLU(), torch.nn.Linear(784, 490))
    return model, torch.randn(1024, 784)


def training_step(model: torch.nn.Module, inputs: torch.Tensor) -> Callable[[], None]:
    """One non-private step, forward and backward."""
    labels = torch.randint(0, 10, (len(inputs),))

    def step() -> None:
        model.zero_grad()
        torch.nn.functional.cross_entropy(model(inputs), labels).backward()

    return step


def measure(tasks: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Nanoseconds of each task in each round, after one round that is not counted."""
    clock = time.process_time_ns if torch.get_num_threads() == 1 else time.perf_counter_ns
    times: dict[str, list[float]] = {name: [] for name in tasks}
    for _ in range(rounds + 1):
        for name, task in tasks.items():
            start = clock()
            task()
            times[name].append(clock() - start)
    return {name: values[1:] for name, values in times.items()}


def release(sizes: list[int], rounds: int) -> dict[str, float]:
    """A release of tensors with these numbers of entries, in nanoseconds for each entry, and `torch.randn` of as many."""
    raw_sum, entries, source = [torch.zeros(size) for size in sizes], sum(sizes), SecureNoise()
    times = measure(
        {
            "torch_randn": lambda: torch.randn(entries),
            "noisy_sum": lambda: noisy_sum(raw_sum, noise_multiplier=1.0, sensitivity=1.0, noise=source),
        },
        rounds,
    )
    each = {name: round(statistics.median(values) / entries, 2) for name, values in times.items()}
    return {**each, "ratio": round(ratio(times, "noisy_sum", "torch_randn"), 2)}


def ratio(times: dict[str, list[float]], of: str, to: str) -> float:
    return statistics.median(a / b for a, b in zip(times[of], times[to], strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--output", type=Path, help="also write the JSON here")
    options = parser.parse_args()

    torch.set_num_threads(options.threads)
    source = SecureNoise()
    raw_sum = [torch.zeros(1_000_000)]
    small = PoissonSampler(dataset_size=60_000, sample_rate=1024 / 60_000, source=source)
    large = PoissonSampler(dataset_size=10_000_000, sample_rate=1e-4, source=source)
    indices = torch.arange(1024)
    times = measure(
        {
            "noisy_sum": lambda: noisy_sum(raw_sum, noise_multiplier=1.0, sensitivity=1.0, noise=source),
            "convolutional_step": training_step(*convolutional()),
            "dense_step": training_step(*dense()),
            "one_number": lambda: source.noisy_number(0.0, noise_multiplier=1.0, sensitivity=1.0),
            "sample_60_thousand": small.sample,
            "sample_10_million": large.sample,
            "order_1024": lambda: source.random_order(indices),
        },
        max(options.rounds // 3, 1),
    )
    result = {
        "threads": options.threads,
        "rounds": options.rounds,
        "compiled": available(1),
        "nanoseconds_per_entry": {name: release(sizes, options.rounds) for name, sizes in SIZES.items()},
        "median_milliseconds": {name: round(statistics.median(each) / 1e6, 3) for name, each in times.items()},
        "noisy_sum_percent_of_convolutional_step": round(100 * ratio(times, "noisy_sum", "convolutional_step"), 2),
        "noisy_sum_percent_of_dense_step": round(100 * ratio(times, "noisy_sum", "dense_step"), 2),
        "torch": torch.__version__,
        "processor": platform.processor() or platform.machine(),
    }
    text = json.dumps(result, indent=2)
    print(text)
    if options.output is not None:
        options.output.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
