"""``sluice reproduce beta``: which runs there are, and the lines of the table."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import scipy

from sluice._base.errors import InputError
from sluice.experiments.beta.attempts import AttemptStudy, Sampling
from sluice.experiments.tables.accuracy_cells import Cell, Plan, PlannedCell, plan_cells

DATASETS = ("fashion-mnist", "imdb")
BETAS = (0.0, 1.0, 2.0, 3.0, 4.0, 5.0)
GATE, COIN = "clipping-bias", "coin"
CONFIDENCE = 0.95

METHOD = "dpsr-cg"


@dataclass(frozen=True, kw_only=True)
class BetaPlan:
    """The cells of the figure: for each, which threshold and which gate it is about."""

    plan: Plan
    about: Mapping[Cell, tuple[float, str]]


def plan_betas(
    *,
    datasets: Sequence[str],
    betas: Sequence[float],
    epsilon: float,
    seeds: Sequence[int],
    overrides: Mapping[str, Any],
    tag: str,
) -> BetaPlan:
    """The runs of the figure, with the paper's nets and settings, at one proved epsilon. No record is read."""
    if not betas:
        raise InputError("betas is empty: give at least one.")
    if bool(overrides) != bool(tag):
        raise InputError("set and tag belong together: other settings need a name of their own.")
    cells: list[PlannedCell] = []
    about: dict[Cell, tuple[float, str]] = {}
    for gate in (GATE, COIN):
        for beta in betas:
            found = plan_cells(
                datasets=datasets,
                methods=(METHOD,),
                epsilons=(epsilon,),
                seeds=seeds,
                overrides={**overrides, "beta": beta, "gate": gate},
                tag="_".join(filter(None, (f"{'coin' if gate == COIN else ''}beta{beta:g}", tag))).replace("-", "m"),
            )
            cells += found.cells
            about |= {planned.cell: (beta, gate) for planned in found.cells}
    return BetaPlan(plan=Plan(cells=tuple(cells), left_out={}), about=about)


@dataclass(frozen=True, kw_only=True)
class AttemptWatch:
    """Makes the study of a cell's run: about ``looks`` accepted attempts, and as many rejected ones.

    The coin's acceptance depends on nothing, so its attempts are not looked at.
    """

    looks: int
    records: int | None

    def __call__(self, planned: PlannedCell, folder: Path) -> AttemptStudy:
        settings = planned.settings
        looks = 0 if settings.chosen_gate == COIN else self.looks
        assert settings.seed is not None
        return AttemptStudy(
            seed=settings.seed,
            sampling=sampling_for(settings.releases, settings.beta, looks=looks, records=self.records),
            path=folder / "attempts.jsonl",
        )

    def lacks(self, result: Mapping[str, Any]) -> str:
        """What a stored result lacks to be one of this study."""
        settings, study = result["settings"], result.get("study")
        if study is None:
            return "was stored without a study of its attempts"
        looks = 0 if settings["gate"] == COIN else self.looks
        wanted = sampling_for(settings["releases"], settings["beta"], looks=looks, records=self.records).to_dict()
        return "" if {name: study.get(name) for name in wanted} == wanted else "was studied with other rates"


def sampling_for(releases: int, beta: float, *, looks: int, records: int | None) -> Sampling:
    """Rates that give about as many rejected looks as accepted ones, from public values alone."""
    # With gate noise of about 2, which is not known before calibration; only the number of looks depends on it.
    accepted = float(scipy.special.ndtr(-beta / 8.0))
    return Sampling(
        release_rate=min(1.0, looks / releases), rejected_rate=min(1.0, accepted / (1 - accepted)), records=records
    )


@dataclass(frozen=True, kw_only=True)
class Share:
    """How many of those looked at were good, with an exact binomial interval."""

    good: int
    evaluated: int

    @property
    def value(self) -> float | None:
        return self.good / self.evaluated if self.evaluated else None

    @property
    def interval(self) -> tuple[float, float]:
        bad, tail = self.evaluated - self.good, (1 - CONFIDENCE) / 2
        low = 0.0 if self.good == 0 else float(scipy.special.betaincinv(self.good, bad + 1, tail))
        high = 1.0 if bad == 0 else float(scipy.special.betaincinv(self.good + 1, bad, 1 - tail))
        return low, high


@dataclass(frozen=True, kw_only=True)
class Line:
    """All seeds of one data set, threshold and gate.

    Attributes:
        accepted, rejected: how many of the updates looked at were good.
        acceptance: accepted attempts over all.
        passes: records measured for a release, over the expected size of a batch.
        metric: that of accepted batches, on average; None for a coin, which measures none.
        accuracies: test accuracy in percent, one for each seed.
    """

    dataset: str
    beta: float
    gate: str
    seeds: tuple[int, ...]
    missing: tuple[int, ...]
    accepted: Share
    rejected: Share
    acceptance: float | None
    passes: float | None
    metric: float | None
    accuracies: tuple[float, ...]
    epsilon: float | None
    releases: int | None

    @property
    def accuracy(self) -> float | None:
        return statistics.fmean(self.accuracies) if self.accuracies else None

    @property
    def deviation(self) -> float | None:
        return statistics.stdev(self.accuracies) if len(self.accuracies) > 1 else None


def lines_of(found: BetaPlan, results: Mapping[Cell, Mapping[str, Any]]) -> list[Line]:
    """The lines of the table: data sets, within them gates, within them thresholds."""
    groups: dict[tuple[str, str, float], list[Cell]] = {}
    for cell, (beta, gate) in found.about.items():
        groups.setdefault((cell.dataset, gate, beta), []).append(cell)
    order = list(dict.fromkeys(dataset for dataset, _, _ in groups))
    keys = sorted(groups, key=lambda key: (order.index(key[0]), key[1] != GATE, key[2]))
    return [_line(key, groups[key], results) for key in keys]


def _line(key: tuple[str, str, float], cells: Sequence[Cell], results: Mapping[Cell, Mapping[str, Any]]) -> Line:
    dataset, gate, beta = key
    done = [results[cell] for cell in cells if cell in results]
    studies = [result["study"] for result in done]
    attempts, releases = (sum(study[name] for study in studies) for name in ("attempts", "releases"))
    batches = sum(result["mechanism"]["expected_batch_size"] * result["releases"] for result in done)
    return Line(
        dataset=dataset,
        beta=beta,
        gate=gate,
        seeds=tuple(cell.seed for cell in cells if cell in results),
        missing=tuple(cell.seed for cell in cells if cell not in results),
        accepted=_share(studies, "accepted"),
        rejected=_share(studies, "rejected"),
        acceptance=releases / attempts if attempts else None,
        passes=sum(study["measured"] for study in studies) / batches if batches else None,
        metric=statistics.fmean(study["metric"] for study in studies) if studies and gate == GATE else None,
        accuracies=tuple(100 * result["test_accuracy"] for result in done),
        epsilon=max(float(result["epsilon"]) for result in done) if done else None,
        releases=done[0]["releases"] if done else None,
    )


def _share(studies: Sequence[Mapping[str, Any]], kind: str) -> Share:
    return Share(
        good=sum(study[kind]["good"] for study in studies),
        evaluated=sum(study[kind]["evaluated"] for study in studies),
    )


__all__ = ["BETAS", "COIN", "DATASETS", "GATE", "AttemptWatch", "BetaPlan", "Line", "Share", "lines_of", "plan_betas"]
