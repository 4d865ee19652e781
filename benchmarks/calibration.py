"""Calibrating plain DP-SGD: Sluice beside dp-accounting (PLD) and Opacus (PRV), by turns in one process.

All three look for the smallest noise multiplier that keeps a target epsilon. To compare at equal tightness, each is
asked for the accuracy that Sluice aims at (a few parts in 10,000 of epsilon), and a referee, Sluice's accountant on a
ten times finer grid, says which epsilon each answer really spends. Caches are emptied before every turn. Times are
process times; only their ratios mean something on a shared machine.

    python benchmarks/calibration.py --repeats 3 --json calibration.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import dp_accounting as dpa
from dp_accounting import pld

from sluice.accounting import calibration, loss_solver, selective_rdp
from sluice.accounting.events import plain_release
from sluice.accounting.pld_accountant import SelectivePLDAccountant

DELTA = 1e-5
TARGET_SPEEDUP = 3.0


@dataclass(frozen=True, kw_only=True)
class Setting:
    sample_rate: float
    releases: int
    epsilon: float


SETTINGS = (
    Setting(sample_rate=0.02, releases=500, epsilon=1.0),
    Setting(sample_rate=1024 / 60000, releases=2000, epsilon=3.0),
    Setting(sample_rate=0.02, releases=500, epsilon=10.0),
)


def by_sluice(setting: Setting) -> float:
    calibration._calibrate.cache_clear()
    loss_solver._remembered.cache_clear()
    selective_rdp._cached.cache_clear()
    return calibration.calibrate(
        sample_rate=setting.sample_rate,
        releases=setting.releases,
        target_epsilon=setting.epsilon,
        target_delta=DELTA,
    ).noise_multiplier


def by_dp_accounting(setting: Setting) -> float:
    def event(noise_multiplier: float) -> dpa.DpEvent:
        step = dpa.PoissonSampledDpEvent(setting.sample_rate, dpa.GaussianDpEvent(noise_multiplier))
        return dpa.SelfComposedDpEvent(step, setting.releases)

    return float(
        dpa.calibrate_dp_mechanism(
            pld.PLDAccountant, event, setting.epsilon, DELTA, dpa.LowerEndpointAndGuess(0.0, 1.0), tol=5e-4
        )
    )


def by_opacus(setting: Setting) -> float:
    from opacus.accountants.utils import get_noise_multiplier

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return float(
            get_noise_multiplier(
                target_epsilon=setting.epsilon,
                target_delta=DELTA,
                sample_rate=setting.sample_rate,
                steps=setting.releases,
                accountant="prv",
                epsilon_tolerance=4e-4 * setting.epsilon,
                eps_error=4e-4 * setting.epsilon,
            )
        )


METHODS: dict[str, Callable[[Setting], float]] = {
    "sluice": by_sluice,
    "dp-accounting": by_dp_accounting,
    "opacus": by_opacus,
}


def spent(setting: Setting, noise_multiplier: float) -> float:
    event = plain_release(sampling_probability=setting.sample_rate, noise_multiplier=noise_multiplier)
    return SelectivePLDAccountant(tolerance=1e-5).compose(event, setting.releases).get_epsilon(DELTA)


def measure(setting: Setting, repeats: int) -> dict[str, dict[str, float]]:
    times: dict[str, list[float]] = {name: [] for name in METHODS}
    answers: dict[str, float] = {}
    for _ in range(repeats):
        for name, method in METHODS.items():
            start = time.process_time()
            answers[name] = method(setting)
            times[name].append(time.process_time() - start)
    return {
        name: {
            "seconds": statistics.median(times[name]),
            "noise_multiplier": answers[name],
            "epsilon_spent": spent(setting, answers[name]),
        }
        for name in METHODS
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, default=None, help="write all measurements to this file")
    arguments = parser.parse_args()
    by_sluice(SETTINGS[0])  # the first call of anything pays for imports
    results = []
    for setting in SETTINGS:
        figures = measure(setting, arguments.repeats)
        fastest = min(figures[name]["seconds"] for name in METHODS if name != "sluice")
        speedup = fastest / figures["sluice"]["seconds"]
        results.append({"setting": asdict(setting), "methods": figures, "speedup": speedup})
        print(f"q={setting.sample_rate:.4g} releases={setting.releases} epsilon={setting.epsilon:g}")
        for name, figure in figures.items():
            print(
                f"  {name:14s} {figure['seconds']:8.3f} s   noise {figure['noise_multiplier']:.5f}"
                f"   spends {figure['epsilon_spent']:.5f}"
            )
        verdict = "reached" if speedup >= TARGET_SPEEDUP else "NOT reached"
        print(
            f"  {speedup:.1f} times as fast as the faster of the others (target {TARGET_SPEEDUP:g}: {verdict})",
            flush=True,
        )
    print(f"smallest speed-up: {min(float(result['speedup']) for result in results):.1f}")  # type: ignore[arg-type]
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({"delta": DELTA, "results": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
