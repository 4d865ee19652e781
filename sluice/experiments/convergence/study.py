"""``sluice reproduce convergence``: which runs there are, what is stored of them, and the lines of the table."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from statistics import fmean
from typing import Any

from sluice._base.errors import DataError
from sluice._base.files import parse_json, read_bytes, write_atomically
from sluice.experiments.convergence.bound import Terms
from sluice.experiments.convergence.measure import Run, descent_of, measured_run
from sluice.experiments.convergence.problems import PROBLEMS, Problem
from sluice.experiments.jobs import JobOptions, Lost, run_jobs
from sluice.experiments.tables.accuracy_results import source_state
from sluice.mechanism.gates import ClippingBiasGate
from sluice.mechanism.rates import exact_sample_rate
from sluice.mechanism.registry import mechanism_from_dict
from sluice.mechanism.scaling import GlobalScaling
from sluice.mechanism.selective_release import SelectiveRelease

DELTA = 1e-5


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One line of the table: what is run, with several seeds.

    Attributes:
        bound: S of the scaling; C is 1.
        beta: of the gate; None for no gate.
    """

    problem: str
    bound: float
    epsilon: float
    lr: float
    beta: float | None = 3.0
    releases: int = 200
    batch_size: int = 200

    @property
    def name(self) -> str:
        gate = "ungated" if self.beta is None else f"beta{self.beta:g}"
        return f"{self.problem}-S{self.bound:g}-eps{self.epsilon:g}-lr{self.lr:g}-{gate}"

    def mechanism(self, problem: Problem) -> SelectiveRelease:
        """With the noise that is proved to hold epsilon."""
        size = len(problem.records)
        rate = exact_sample_rate(batch_size=self.batch_size, dataset_size=size)
        gate = None
        if self.beta is not None:
            gate = ClippingBiasGate(beta=self.beta).for_batches_of(rate * size, small_norm=self.bound)
        return SelectiveRelease(
            sample_rate=rate,
            expected_batch_size=rate * size,
            scaling=GlobalScaling(bound=self.bound),
            releases=self.releases,
            gate=gate,
        ).calibrate(epsilon=self.epsilon, delta=DELTA)


@dataclass(frozen=True, kw_only=True)
class Line:
    """A setting with what its runs showed, and what the bounds say of each."""

    setting: Setting
    runs: tuple[Run, ...]
    terms: tuple[Terms, ...]
    paper: tuple[Terms, ...]
    noise_multiplier: float

    @property
    def largest_share(self) -> float:
        """Of the bound that a run's mean squared gradient norm reached, the largest over runs: below 1 where the bound holds in all."""
        return max(run.mean / terms.total for run, terms in zip(self.runs, self.terms, strict=True))

    @property
    def paper_share(self) -> float | None:
        """The same for the paper's, which is about the *smallest* norm of a run; averaged over runs, as it is about the mean."""
        if not self.paper:
            return None
        return fmean(run.smallest for run in self.runs) / fmean(terms.total for terms in self.paper)

    @property
    def paper_bias_share(self) -> float | None:
        """The squared bias that was there, over what the paper's proof bounds it by."""
        if not self.paper:
            return None
        return fmean(run.paper_bias for run in self.runs) / self.paper[0].bias


def settings() -> tuple[Setting, ...]:
    """All lines: both problems, with gradients that are clipped (S = 1) and that are hardly (S = 8), short and long steps."""
    base = Setting(problem="quadratic", bound=8.0, epsilon=3.0, lr=0.05)
    lines = [
        replace(base, bound=bound, epsilon=epsilon, lr=lr)
        for bound, rates in ((1.0, (0.05, 0.5)), (8.0, (0.05, 4.0)))
        for lr in rates
        for epsilon in (1.0, 3.0, 8.0)
    ]
    lines += [replace(base, beta=beta) for beta in (1.0, 5.0)]
    lines += [replace(base, beta=None, lr=lr) for lr in (0.05, 4.0)]
    digits = replace(base, problem="digits", batch_size=256)
    lines += [
        replace(digits, bound=bound, epsilon=epsilon, lr=lr)
        for bound, rates in ((1.0, (0.02, 0.15)), (8.0, (0.16, 1.2)))
        for lr in rates
        for epsilon in (1.0, 3.0, 8.0)
    ]
    lines += [replace(digits, bound=3.0, lr=lr) for lr in (0.06, 0.45)]
    lines += [replace(digits, beta=None, lr=1.2)]
    return tuple(lines)


@lru_cache(maxsize=2)
def problem_of(name: str) -> Problem:
    return PROBLEMS[name]()


def stored_line(results: Path, setting: Setting, seeds: Sequence[int]) -> Line | None:
    """What is stored of this very setting and all of these seeds, or None."""
    path = results / f"{setting.name}.json"
    if not path.exists():
        return None
    found = parse_json(read_bytes(path), what=str(path))
    try:
        runs = {run["seed"]: Run(**run) for run in found["runs"]}
        same = found["setting"] == asdict(setting) and set(seeds) <= set(runs)
        return _line(setting, found["mechanism"], [runs[seed] for seed in seeds]) if same else None
    except (KeyError, TypeError) as error:
        raise DataError(f"{path} is not what this command stores: {error}. Move it away, or use --again.") from error


def run_setting(results: Path, setting: Setting, seeds: Iterable[int]) -> Line:
    """Run a setting with each seed and store what came of it."""
    return _stored(results, setting, _measured(setting, seeds=tuple(seeds)))


def _measured(setting: Setting, *, seeds: Sequence[int]) -> dict[str, Any]:
    """What is stored of a setting."""
    problem = problem_of(setting.problem)
    mechanism = setting.mechanism(problem)
    runs = [measured_run(problem, mechanism, lr=setting.lr, seed=seed) for seed in seeds]
    return {
        "setting": asdict(setting),
        "mechanism": mechanism.to_dict(),
        "delta": DELTA,
        "runs": [run.to_dict() for run in runs],
        **asdict(source_state()),
    }


def _stored(results: Path, setting: Setting, found: Mapping[str, Any]) -> Line:
    content = json.dumps(found, indent=1, allow_nan=False) + "\n"
    write_atomically(results / f"{setting.name}.json", content.encode("utf-8"), public=True)
    return _line(setting, found["mechanism"], [Run(**run) for run in found["runs"]])


def lines_of(
    results: Path,
    wanted: Sequence[Setting],
    seeds: Sequence[int],
    *,
    again: bool,
    run: bool,
    options: JobOptions = JobOptions(),
) -> Iterator[Line]:
    """The lines of the table: those that are stored, then those that are run now, in the order in which they end."""
    not_stored = []
    for setting in wanted:
        found = None if again else stored_line(results, setting, seeds)
        if found is None:
            not_stored.append(setting)
        else:
            yield found
    lost = []
    for setting, ending in run_jobs(partial(_measured, seeds=seeds), not_stored if run else [], options):
        if isinstance(ending, Lost):
            lost.append(f"{setting.name}: {ending.reason}")
        else:
            yield _stored(results, setting, ending)
    if lost:
        raise DataError(f"not run: {'; '.join(lost)}. What is stored is kept: run the same command again.")


def _line(setting: Setting, stored: Mapping[str, Any], runs: Sequence[Run]) -> Line:
    mechanism = mechanism_from_dict(stored)
    assert isinstance(mechanism, SelectiveRelease)
    descent = descent_of(problem_of(setting.problem), mechanism, lr=setting.lr)
    papers = [descent.paper_terms(loss_gap=run.loss_gap, releases=setting.releases) for run in runs]
    return Line(
        setting=setting,
        runs=tuple(runs),
        terms=tuple(
            descent.terms(loss_gap=run.loss_gap, squared_bias=run.squared_bias, releases=setting.releases)
            for run in runs
        ),
        paper=tuple(terms for terms in papers if terms is not None),
        noise_multiplier=mechanism.sigma,
    )


__all__ = ["Line", "Setting", "lines_of", "settings"]
