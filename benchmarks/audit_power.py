"""How much of a true epsilon does an audit find: for each method, by black-box canaries, by repeated runs, and by two runs?

    python benchmarks/audit_power.py --only matrix,dpis,dpagd --audits 3
    python benchmarks/audit_power.py --only two-runs,two-runs-noise-halved

Rehearsals on digits, as `sluice audit rehearse` makes them. Each case writes a small file into results/audit/.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from sluice.audit.bounds import gaussian_fit_mu
from sluice.audit.evidence import Evidence
from sluice.audit.trials import Trials
from sluice.experiments.preparing import prepare
from sluice.experiments.rehearsal import Rehearsal
from sluice.experiments.settings import settings_from
from sluice.experiments.two_runs import two_runs
from sluice.methods import planned_mechanism

_FILE = Path(__file__).with_name("audit.py")
_SPECIFICATION = importlib.util.spec_from_file_location("planted_errors", _FILE)
assert _SPECIFICATION is not None
assert _SPECIFICATION.loader is not None
planted = importlib.util.module_from_spec(_SPECIFICATION)
sys.modules["planted_errors"] = planted  # dataclasses look their module up
_SPECIFICATION.loader.exec_module(planted)

METHODS = ("dpsgd", "dpsr-cg", "dpsur", "matrix", "dpis", "dpagd")
EPSILON = 8.0


def rehearsal(**settings: Any) -> Rehearsal:
    """Of a run on digits with these settings."""
    chosen = settings_from({"dataset": "digits", **settings})
    splits = prepare(chosen, show_progress=False)
    mechanism = planned_mechanism(chosen, dataset_size=len(splits.train))
    return Rehearsal(settings=chosen, splits=splits, mechanism=mechanism)


def of_method(method: str) -> Evidence:
    """A thousand loud canaries in a run of the method's own defaults."""
    return rehearsal(method=method, epsilon=EPSILON).once(canaries=1000)


def of_inputs(kind: Any) -> Evidence:
    """Canaries that are records, found by what the final model says of them. Digits has 360 test records."""
    return rehearsal(method="dpsgd", epsilon=EPSILON, model="mlp").once(canaries=360, kind=kind)


def repeated() -> Trials:
    """Three hundred runs of ten releases with one canary each."""
    settings = {"method": "dpsgd", "epsilon": EPSILON, "releases": 10, "batch_size": 0}
    return rehearsal(**settings).repeatedly(runs=300)


def tight(**noise: float) -> Trials:
    """Two runs of 4,000 releases, noise multiplier 1 in all."""
    return two_runs(rehearsal(method="dpsr-cg", gate_noise=3.0, **noise), releases=4000)


def of_sum() -> Trials:
    return tight(noise_multiplier=1.0, reference_noise=1e6)


def of_both() -> Trials:
    return tight(noise_multiplier=2**0.5, reference_noise=2**0.5)


def reference_without_noise() -> Any:
    """What is published of the metric has a tenth of its noise."""
    from unittest.mock import patch

    from sluice.randomness.noise import NoiseSource

    original = NoiseSource.noisy_number

    def quieter(source: NoiseSource, raw: float, *, noise_multiplier: float, **others: Any) -> float:
        return original(source, raw, noise_multiplier=noise_multiplier / 10, **others)

    return patch.object(NoiseSource, "noisy_number", quieter)


CASES: dict[str, tuple[Callable[[], Evidence | Trials], Callable[[], Any]]] = {
    **{method: (lambda method=method: of_method(method), nullcontext) for method in METHODS},
    "mislabelled": (lambda: of_inputs("mislabelled"), nullcontext),
    "blank": (lambda: of_inputs("blank"), nullcontext),
    "runs": (repeated, nullcontext),
    "two-runs": (of_sum, nullcontext),
    "two-runs-reference": (of_both, nullcontext),
    "two-runs-noise-halved": (of_sum, planted.noise_halved),
    "two-runs-reference-noise-tenth": (of_both, reference_without_noise),
}


def study(name: str, *, audits: int) -> dict[str, Any]:
    """Several audits of one case."""
    make, plant = CASES[name]
    began = time.process_time()
    with plant():
        evidence = [make() for _ in range(audits)]
    found = [each.result for each in evidence]
    seconds = (time.process_time() - began) / audits
    methods = [bound.method for bound in found[0].bounds]
    by_method = {
        method: planted._spread([each.bounds[number].lower_bound for each in found])
        for number, method in enumerate(methods)
    }
    result = {
        "what": name,
        "claimed": found[0].claimed,
        "proved": found[0].proved,
        "canaries": found[0].canaries,
        "kind": found[0].kind,
        "audits": audits,
        "refuted": sum(each.refuted for each in found),
        "lower_bound": by_method,
        "p_values": [each.p_value for each in found],
        "scores": sorted({bound.score for each in found for bound in each.bounds}),
        "ceiling": {bound.method: bound.ceiling for bound in found[0].bounds},
        "cpu_seconds_each": seconds,
    }
    if name.startswith("two-runs"):
        result["mu"] = [gaussian_fit_mu(**each.counts("gaussian-fit")) for each in evidence if isinstance(each, Trials)]
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(CASES), help="Names of cases, separated by commas.")
    parser.add_argument("--audits", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(1)
    for name in options.only.split(","):
        found = study(name, audits=options.audits)
        planted.write(f"power-{name}", found)
        print(json.dumps(found, indent=1), flush=True)


if __name__ == "__main__":
    main()
