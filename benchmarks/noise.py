"""What secure noise costs: a million normals beside torch.randn, and a release beside a training step.

All of it runs interleaved in one process on one thread, in processor time, so that the ratios mean something on a
busy machine. Run: python benchmarks/noise.py [--entries N] [--rounds N] [--output FILE]
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

from sluice.randomness.noise import SecureNoise, noisy_sum
from sluice.randomness.sampling import PoissonSampler


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
    """Milliseconds of processor time of each task in each round, after one round that is not counted."""
    times: dict[str, list[float]] = {name: [] for name in tasks}
    for _ in range(rounds + 1):
        for name, task in tasks.items():
            start = time.process_time()
            task()
            times[name].append(1000 * (time.process_time() - start))
    return {name: values[1:] for name, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--entries", type=int, default=1_000_000, help="normals per draw")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--output", type=Path, help="also write the JSON here")
    options = parser.parse_args()

    torch.set_num_threads(1)
    source = SecureNoise()
    raw_sum = [torch.zeros(options.entries)]
    small = PoissonSampler(dataset_size=60_000, sample_rate=1024 / 60_000, source=source)
    large = PoissonSampler(dataset_size=10_000_000, sample_rate=1e-4, source=source)
    times = measure(
        {
            "torch_randn": lambda: torch.randn(options.entries),
            "secure_normals": lambda: source.rounded_normal(options.entries, scale=1.5 * 2.0**25),
            "noisy_sum": lambda: noisy_sum(raw_sum, noise_multiplier=1.0, sensitivity=1.0, noise=source),
            "convolutional_step": training_step(*convolutional()),
            "dense_step": training_step(*dense()),
            "sample_60_thousand": small.sample,
            "sample_10_million": large.sample,
        },
        options.rounds,
    )

    def ratio(of: str, to: str) -> float:
        return statistics.median(a / b for a, b in zip(times[of], times[to], strict=True))

    result = {
        "entries": options.entries,
        "rounds": options.rounds,
        "median_milliseconds": {name: round(statistics.median(values), 3) for name, values in times.items()},
        "secure_normals_over_randn": round(ratio("secure_normals", "torch_randn"), 2),
        "noisy_sum_percent_of_convolutional_step": round(100 * ratio("noisy_sum", "convolutional_step"), 2),
        "noisy_sum_percent_of_dense_step": round(100 * ratio("noisy_sum", "dense_step"), 2),
        "torch": torch.__version__,
        "processor": platform.processor() or platform.machine(),
    }
    text = json.dumps(result, indent=2)
    print(text)
    if options.output is not None:
        options.output.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
