"""What one release costs: with the gate, without it, and in the ordinary loop, in one interleaved run.

    python benchmarks/releases.py --json results/bench/releases.json

Processor time, median over rounds. Records are random (81 x 7 x 7, as scattering coefficients are), so nothing has to be
loaded; the gate's reference settles during the first releases, which are not counted.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.utils.data import TensorDataset

from sluice import ClippingBiasGate, CoinGate, GlobalScaling, PrivacyEngine
from sluice._base.files import replaced_atomically
from sluice.mechanism.gates import Gate
from sluice.models import create_model

GATE = ClippingBiasGate(beta=3.0, gate_noise=2.5, reference_noise=12.5)


def steps(model_name: str, data: TensorDataset, batch: int, gate: Gate | None, *, ordinary: bool) -> Iterator[None]:
    """One release for each iteration."""
    torch.manual_seed(0)
    model = create_model(model_name, (81, 7, 7), 10)
    engine = PrivacyEngine(seed=0)
    _, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
        data_loader=data,
        noise_multiplier=2.5,
        max_grad_norm=1.0,
        releases=10**6,
        sample_rate=batch / len(data),
        scaling=GlobalScaling(bound=0.3),
        gate=gate,
        max_physical_batch_size=256 if ordinary else 1024,
    )
    if not ordinary:
        for _ in engine.releases(F.cross_entropy):
            yield
    made = 0
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        if engine.released > made:
            made = engine.released
            # The hooks of the ordinary loop are process-wide; the other ways are not to pay for them.
            engine.close()
            yield
            loader._capture.attach()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="scattering-cnn")
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(1)
    data = TensorDataset(torch.randn(20_000, 81, 7, 7), torch.randint(0, 10, (20_000,)))
    ways: dict[str, Callable[[], Iterator[None]]] = {
        "no gate": lambda: steps(options.model, data, options.batch, None, ordinary=False),
        "gate": lambda: steps(options.model, data, options.batch, GATE, ordinary=False),
        "coin": lambda: steps(options.model, data, options.batch, CoinGate(probability=0.38), ordinary=False),
        "no gate, ordinary loop": lambda: steps(options.model, data, options.batch, None, ordinary=True),
    }
    running = {name: make() for name, make in ways.items()}
    times: dict[str, list[float]] = {name: [] for name in ways}
    for round_number in range(options.rounds + 5):
        for name, way in running.items():
            began = time.process_time()
            next(way)
            if round_number >= 5:
                times[name].append(time.process_time() - began)
    # A gated release may need several passes over data: its cost is a mean, the others vary little.
    cost = {name: statistics.fmean(values) for name, values in times.items()}
    found = {
        "model": options.model,
        "batch": options.batch,
        "threads": options.threads,
        "rounds": options.rounds,
        "processor_seconds_per_release": cost,
        "gate / no gate": cost["gate"] / cost["no gate"],
        "ordinary loop / full speed": cost["no gate, ordinary loop"] / cost["no gate"],
    }
    print(json.dumps(found, indent=1))
    if options.json:
        with replaced_atomically(options.json) as temporary:
            temporary.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
