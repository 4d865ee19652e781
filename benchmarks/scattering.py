"""How much faster the scattering transform is than kymatio's, on the same images, threads and precision.

Both run interleaved in one process. The medians say what a user waits on the machine as it is. On a machine that
others use too, the fastest rounds tell more about the programs and less about the others. With SLUICE_NATIVE=0 ours runs by
matrix products instead of the kernel in C.
Run: python benchmarks/scattering.py [--threads 2] [--rounds 15] [--planes 768] [--json PATH]
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import scipy.special
import torch
from torch import Tensor

from sluice.features import Scattering
from sluice.features.native.kernels import library

SHAPES = {"grey 28x28": (1, 28, 28), "colour 32x32": (3, 32, 32)}


def kymatio_transform(height: int, width: int) -> Callable[[Tensor], Tensor]:
    # kymatio 0.3 imports a function that newer versions of scipy have under another name.
    if not hasattr(scipy.special, "sph_harm"):
        scipy.special.sph_harm = lambda m, n, theta, phi: scipy.special.sph_harm_y(n, m, phi, theta)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from kymatio.torch import Scattering2D

        return Scattering2D(J=2, shape=(height, width), L=8)


def measure(tasks: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Seconds that each task takes in each round, after one round that is not counted."""
    times: dict[str, list[float]] = {name: [] for name in tasks}
    for number in range(rounds + 1):
        for name, task in tasks.items():
            start = time.perf_counter()
            task()
            if number > 0:
                times[name].append(time.perf_counter() - start)
    return times


def compare(shape: tuple[int, int, int], planes: int, rounds: int) -> dict[str, float]:
    channels, height, width = shape
    images = torch.rand(planes // channels, *shape, generator=torch.Generator().manual_seed(0))
    ours, theirs = Scattering(height=height, width=width), kymatio_transform(height, width)
    expected = theirs(images).flatten(1, 2)
    error = (ours(images) - expected).abs().amax(dim=(0, 2, 3)) / expected.amax(dim=(0, 2, 3))
    times = measure({"sluice": lambda: ours(images), "kymatio": lambda: theirs(images)}, rounds)
    result = {"images": len(images), "largest_relative_error": float(error.max())}
    for kind, choose in (("median", statistics.median), ("fastest", min)):
        for name, seconds in times.items():
            result[f"{name}_{kind}_microseconds_per_image"] = choose(seconds) / len(images) * 1e6
        result[f"{kind}_ratio"] = choose(times["kymatio"]) / choose(times["sluice"])
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--planes", type=int, default=768, help="images times channels in a batch")
    parser.add_argument("--json", type=Path, help="write the figures to this file, too")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)

    results = {name: compare(shape, options.planes, options.rounds) for name, shape in SHAPES.items()}
    way = "matrix products" if library() is None else "kernel in C"
    print(f"{way}, {options.threads} threads, medians of {options.rounds} interleaved rounds, microseconds per image")
    for name, result in results.items():
        print(
            f"{name:13} sluice {result['sluice_median_microseconds_per_image']:7.0f}   "
            f"kymatio {result['kymatio_median_microseconds_per_image']:7.0f}   "
            f"ratio {result['median_ratio']:5.2f}   (fastest rounds {result['fastest_ratio']:5.2f}, "
            f"largest relative error {result['largest_relative_error']:.1e})"
        )
    if options.json:
        setting = {"threads": options.threads, "rounds": options.rounds, "planes": options.planes, "way": way}
        versions = {"torch": torch.__version__, "python": platform.python_version(), "machine": platform.machine()}
        options.json.write_text(json.dumps({**setting, **versions, "results": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
