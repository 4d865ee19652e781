"""Does the audit catch what is false? Errors planted into the real engine, and the share of audits that refute the claim.

    python benchmarks/audit.py --audits 8 --canaries 1000
    python benchmarks/audit.py --only sound-4,sound-8 --canaries 10000 --audits 3

Nothing in the package can be told to do any of this: the errors are patched in from here. Each case writes a small file into
results/audit/. Records are those of digits, whose test set stands in for the training set, as in any rehearsal.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from sluice import Clip, ClippingBiasGate, GlobalScaling, PrivacyEngine, SelectiveRelease, TrainingOptions
from sluice._base.files import replaced_atomically
from sluice.audit import AuditResult, Canaries
from sluice.audit.bounds import clopper_pearson
from sluice.audit.canaries import Kind
from sluice.data import load
from sluice.experiments.rehearsal import StandIns
from sluice.gradients import Chunk
from sluice.mechanism.attempt import Attempt, ReferenceState
from sluice.mechanism.scaling import ScalingRule
from sluice.randomness.noise import NoiseSource
from sluice.training import selective_release
from sluice.training.context import RawSum, TrainingContext
from sluice.training.selective_release import SelectiveReleaseExecutor

RESULTS = Path(__file__).resolve().parent.parent / "results" / "audit"
DELTA = 1e-5
FORCED = 29


@contextmanager
def clip_bound_twice_too_long() -> Iterator[None]:
    def weights(rule: Clip, norms: Tensor) -> Tensor:
        return (2 * rule.max_grad_norm / norms).clamp(max=1.0)

    with patch.object(Clip, "_weights", weights):
        yield


@contextmanager
def noise_halved() -> Iterator[None]:
    original = TrainingContext.noisy

    def halved(
        context: TrainingContext, raw_sum: RawSum, *, noise_multiplier: float, sensitivity: float
    ) -> dict[str, Tensor]:
        return original(context, raw_sum, noise_multiplier=noise_multiplier / 2, sensitivity=sensitivity)

    with patch.object(TrainingContext, "noisy", halved):
        yield


@contextmanager
def sampled_four_times_as_often() -> Iterator[None]:
    original = selective_release.PoissonSampler

    def sampler(*, sample_rate: float, **others: Any) -> Any:
        return original(sample_rate=4 * sample_rate, **others)

    with patch.object(selective_release, "PoissonSampler", sampler):
        yield


@contextmanager
def as_coded_by_the_authors() -> Iterator[None]:
    """Long gradients keep length S, the first attempts are accepted whatever they are, and the reference has no noise."""

    def weights(rule: GlobalScaling, norms: Tensor) -> Tensor:
        return torch.where(norms <= rule.bound, rule.max_grad_norm / rule.bound, rule.bound / norms)

    original = ClippingBiasGate.begin

    def begin(
        gate: ClippingBiasGate, reference: ReferenceState, noise: NoiseSource, *, attempts_left: int | None = None
    ) -> Attempt:
        if reference.weight < FORCED:
            return Attempt(limit=math.inf, count=1, measure=gate.measure)
        return original(gate, reference, noise, attempts_left=attempts_left)

    def next_reference(
        gate: ClippingBiasGate, reference: ReferenceState, raw_metric: float, noise: NoiseSource
    ) -> ReferenceState:
        return ReferenceState(value=raw_metric, weight=reference.weight + 1)

    with (
        patch.object(GlobalScaling, "_weights", weights),
        patch.object(ClippingBiasGate, "begin", begin),
        patch.object(ClippingBiasGate, "next_reference", next_reference),
    ):
        yield


@contextmanager
def momentum_kept_on_rejection() -> Iterator[None]:
    """A rejected update is applied and the weights put back, but not what it left in the optimizer."""
    accepted = SelectiveReleaseExecutor._is_accepted

    def absorb(executor: SelectiveReleaseExecutor, chunk: Chunk | None) -> bool:
        executor._measure(chunk)
        if chunk is not None:
            executor._add_to_sum(chunk, executor.mechanism.scaling(chunk.norms))
        return True

    def is_accepted(executor: SelectiveReleaseExecutor) -> bool:
        raw_sum, was_rejected = executor._raw_sum, executor._rejected
        passes = accepted(executor)
        if not passes and not was_rejected and raw_sum is not None:
            updater = executor.context.updater
            weights = updater.weights()
            updater.step(executor._with_noise(raw_sum))
            updater._set(weights)
            updater.remember()
        return passes

    with (
        patch.object(SelectiveReleaseExecutor, "absorb", absorb),
        patch.object(SelectiveReleaseExecutor, "_is_accepted", is_accepted),
    ):
        yield


@contextmanager
def reference_and_gate_without_noise() -> Iterator[None]:
    def begin(
        gate: ClippingBiasGate, reference: ReferenceState, noise: NoiseSource, *, attempts_left: int | None = None
    ) -> Attempt:
        return Attempt(limit=gate.limit(reference, 0.0), count=1, measure=gate.measure)

    def next_reference(
        gate: ClippingBiasGate, reference: ReferenceState, raw_metric: float, noise: NoiseSource
    ) -> ReferenceState:
        return ReferenceState(value=raw_metric)

    with (
        patch.object(ClippingBiasGate, "begin", begin),
        patch.object(ClippingBiasGate, "next_reference", next_reference),
    ):
        yield


Plant = Callable[[], AbstractContextManager[None]]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A mechanism, what is planted into it, and what is claimed of it.

    Attributes:
        kind: of the canaries. Loud ones would be all that the gate of `choosy` sees.
        claimed: None for what the mechanism's own accountant says.
    """

    mechanism: SelectiveRelease
    plant: Plant = nullcontext
    claimed: float | None = None
    kind: Kind = "loud"


def plain(epsilon: float, *, rate: float = 0.05, releases: int = 200) -> SelectiveRelease:
    """DP-SGD, calibrated."""
    return _mechanism(Clip(), rate, releases).calibrate(epsilon=epsilon, delta=DELTA)


def _mechanism(scaling: ScalingRule, rate: float, releases: int, **others: Any) -> SelectiveRelease:
    return SelectiveRelease(sample_rate=rate, expected_batch_size=1.0, scaling=scaling, releases=releases, **others)


def published_setting() -> SelectiveRelease:
    """The authors' for epsilon 1 on MNIST, with the reference made public."""
    gate = ClippingBiasGate(gate_noise=2.5, reference_noise=12.5, small_norm=8.0, initial_reference=1e4)
    return _mechanism(GlobalScaling(bound=8.0), 916 / 60000, 563, noise_multiplier=2.5, gate=gate)


def choosy() -> SelectiveRelease:
    """A gate that rejects most of the batches that it measures, calibrated to epsilon 2."""
    gate = ClippingBiasGate(
        beta=15.0,
        clip_range=15.0,
        gate_noise=2.0,
        reference_noise=20.0,
        small_norm=1.0,
        large_norm=30.0,
        initial_reference=20.0,
    )
    return _mechanism(Clip(), 0.2, 20, gate=gate).calibrate(epsilon=2.0, delta=DELTA)


def cases() -> dict[str, Callable[[], Case]]:
    return {
        "sound": lambda: Case(mechanism=plain(1.0)),
        "clip-bound-x2": lambda: Case(mechanism=plain(1.0), plant=clip_bound_twice_too_long),
        "noise-halved": lambda: Case(mechanism=plain(1.0), plant=noise_halved),
        "sampled-x4": lambda: Case(mechanism=plain(1.0), plant=sampled_four_times_as_often),
        "as-coded": lambda: Case(mechanism=published_setting(), plant=as_coded_by_the_authors, claimed=1.0),
        "published-setting-sound": lambda: Case(mechanism=published_setting()),
        "momentum-kept": lambda: Case(mechanism=choosy(), plant=momentum_kept_on_rejection, kind="quiet"),
        "momentum-sound": lambda: Case(mechanism=choosy(), kind="quiet"),
        "sound-4": lambda: Case(mechanism=plain(4.0, rate=1.0, releases=50)),
        "sound-8": lambda: Case(mechanism=plain(8.0, rate=1.0, releases=50)),
        "sound-4-sampled": lambda: Case(mechanism=plain(4.0, rate=0.1, releases=100)),
        "sound-8-sampled": lambda: Case(mechanism=plain(8.0, rate=0.1, releases=100)),
    }


def audit(case: Case, *, canaries: int) -> AuditResult:
    """One audit by one run of the real engine."""
    splits = load("digits")
    records = max(1, 1437 - canaries // 2)
    mechanism = replace(case.mechanism, expected_batch_size=case.mechanism.sample_rate * (records + canaries // 2))
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    engine = PrivacyEngine()
    with case.plant():
        engine.make_private_by(
            mechanism,
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
            data_loader=StandIns(splits.test, records),
            options=TrainingOptions(canaries=Canaries(count=canaries, kind=case.kind)),
        )
        for _ in engine.releases(F.cross_entropy):
            pass
    return engine.audit(delta=DELTA, claimed_epsilon=case.claimed)


@dataclass(frozen=True, kw_only=True)
class HiddenReference:
    """One canary among others that all add a little to the metric and the same to the sum (docs/accounting.md, section 4).

    How many others a batch has can be read off its release. Where the reference and the gate have no noise, no batch has
    more of them than the last one, unless the canary was in that.
    """

    others: int = 400
    rate: float = 0.3
    share: float = 0.02
    sigma: float = 2.6

    def mechanism(self) -> SelectiveRelease:
        # With the jump removed, a metric of `share` begins this far above the small norm.
        gate = ClippingBiasGate(
            beta=0.0,
            clip_range=4.0,
            gate_noise=1.0,
            reference_noise=5.0,
            small_norm=1.0,
            large_norm=2.0,
            initial_reference=100.0,
        )
        return SelectiveRelease(
            sample_rate=self.rate,
            expected_batch_size=self.rate * self.others,
            scaling=Clip(),
            noise_multiplier=self.sigma,
            releases=2,
            gate=gate,
        )

    def score(self, plant: Plant, *, mechanism: SelectiveRelease) -> tuple[float, bool]:
        """By how many records the second batch seems to exceed the first one, and whether the canary was in."""
        length = 1.0 + 1.0001 * self.share
        data = TensorDataset(torch.full((self.others, 1), length), torch.zeros(self.others))
        model = nn.Linear(1, 1, bias=False)
        canary = Canaries(count=1, kind="loud", loss=_linear)
        engine = PrivacyEngine()
        seen: list[float] = []
        with plant():
            engine.make_private_by(
                mechanism,
                module=model,
                optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
                data_loader=data,
                options=TrainingOptions(canaries=canary),
            )
            before = float(model.weight.detach())
            for _ in engine.releases(_linear):
                after = float(model.weight.detach())
                seen.append((before - after) * mechanism.expected_batch_size)
                before = after
        return seen[1] - seen[0], bool(canary.members[0])

    def audit(self, plant: Plant, *, runs: int) -> dict[str, Any]:
        """Clopper-Pearson over independent runs; the threshold is fixed before: 2.5 standard deviations of the difference."""
        mechanism = self.mechanism()
        threshold = 2.5 * math.sqrt(2) * self.sigma
        results = [self.score(plant, mechanism=mechanism) for _ in range(runs)]
        inside = [score > threshold for score, member in results if member]
        outside = [score > threshold for score, member in results if not member]
        claimed = mechanism.epsilon_after(2, delta=DELTA, accountant="pld")
        bound = clopper_pearson(
            hits=sum(inside), with_canary=len(inside), alarms=sum(outside), without=len(outside), delta=DELTA
        )
        return {
            "claimed": claimed,
            "lower_bound": bound,
            "refuted": bound > claimed,
            "runs": runs,
            "hits": [sum(inside), len(inside)],
            "alarms": [sum(outside), len(outside)],
        }


def _linear(output: Tensor, target: Tensor) -> Tensor:
    return output.mean()


def study(name: str, *, canaries: int, audits: int) -> dict[str, Any]:
    """Several audits of one case."""
    case = cases()[name]()
    began = time.process_time()
    found = [audit(case, canaries=canaries) for _ in range(audits)]
    by_method = {
        method: [bound.lower_bound for each in found for bound in each.bounds if bound.method == method]
        for method in ("one-run", "f-dp")
    }
    return {
        "what": name,
        "claimed": found[0].claimed,
        "canaries": canaries,
        "kind": case.kind,
        "audits": audits,
        "refuted": sum(each.refuted for each in found),
        "lower_bound": {method: _spread(values) for method, values in by_method.items()},
        "p_values": [each.p_value for each in found],
        "scores": sorted({bound.score for each in found for bound in each.bounds}),
        "ceiling": max(bound.ceiling for each in found for bound in each.bounds),
        "cpu_seconds_each": (time.process_time() - began) / audits,
    }


def _spread(values: list[float]) -> dict[str, float]:
    return {
        "mean": statistics.fmean(values),
        "deviation": statistics.stdev(values) if len(values) > 1 else 0.0,
        "least": min(values),
        "most": max(values),
    }


def write(name: str, found: dict[str, Any]) -> None:
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    with replaced_atomically(RESULTS / f"{name}.json") as temporary:
        temporary.write_text(json.dumps({**found, "commit": commit.stdout.strip()}, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="Names of cases, separated by commas; all but the long ones if not given.")
    parser.add_argument("--canaries", type=int, default=1000)
    parser.add_argument("--audits", type=int, default=8)
    parser.add_argument("--runs", type=int, default=2000, help="Of the audit of a hidden reference.")
    options = parser.parse_args()
    torch.set_num_threads(1)
    names = options.only.split(",") if options.only else [name for name in cases() if not name.startswith("sound-")]
    for name in names:
        if name.startswith("hidden-reference"):
            plant = nullcontext if name.endswith("sound") else reference_and_gate_without_noise
            found = HiddenReference().audit(plant, runs=options.runs)
            write(name, {"what": name, **found})
        else:
            found = study(name, canaries=options.canaries, audits=options.audits)
            write(f"{name}-{options.canaries}", found)
        print(json.dumps(found, indent=1, default=float), flush=True)


if __name__ == "__main__":
    main()
