"""``sluice reproduce selection``: stored cells become lines, each compared with "no gate" seed by seed."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import scipy

from sluice._base.errors import DataError
from sluice._base.files import parse_json, read_bytes, write_atomically
from sluice.experiments.tables.selection_cells import ARMS, CONTROL, METHOD, RECORDS, REGIMES

CONFIDENCE = 0.95


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Accuracy less that of "no gate" with the same seed, in points.

    Attributes:
        mean: over the seeds that both have.
        half_width: of its confidence interval by Student's t; None for fewer than two seeds.
        seeds: how many.
    """

    mean: float
    half_width: float | None
    seeds: int

    @property
    def verdict(self) -> str:
        if self.half_width is None:
            return "one seed"
        if abs(self.mean) <= self.half_width:
            return "no difference shown"
        return "better" if self.mean > 0 else "worse"


@dataclass(frozen=True, kw_only=True)
class SelectionLine:
    """One arm on one data set, in one regime and at one epsilon.

    Attributes:
        accuracies: test accuracy in percent, by seed.
        strength: of thinning, or of the weights in its place; None for other arms.
        difference: to "no gate"; None for that itself, and where no seed has both.
        epsilon: the largest that is proved for any of the runs; None where none is finite.
    """

    dataset: str
    regime: str
    heading: float
    arm: str
    accuracies: Mapping[int, float]
    strength: float | None
    difference: Difference | None
    epsilon: float | None

    @property
    def mean(self) -> float:
        return statistics.fmean(self.accuracies.values())

    @property
    def deviation(self) -> float | None:
        """Standard deviation over seeds; None for fewer than two."""
        return statistics.stdev(self.accuracies.values()) if len(self.accuracies) > 1 else None

    def as_dict(self) -> dict[str, Any]:
        verdict = None if self.difference is None else self.difference.verdict
        return {**asdict(self), "mean": self.mean, "deviation": self.deviation, "verdict": verdict}


Key = tuple[str, str, float]
Stored = Mapping[tuple[Key, str], Mapping[int, Mapping[str, Any]]]


def stored_lines(results: Path) -> Stored:
    """All stored results of the folder, by data set, regime, heading and arm, and by seed."""
    found: dict[tuple[Key, str], dict[int, Mapping[str, Any]]] = {}
    for path in sorted(results.glob(f"*-{METHOD}+*-seed*.json")):
        result = parse_json(read_bytes(path), what=str(path))
        try:
            arm, _, regime = result["variant"].partition("-")
            key = (result["dataset"], regime or "plain", float(result["settings"]["epsilon"]))
            found.setdefault((key, arm), {})[int(result["seed"])] = result
        except (KeyError, TypeError, AttributeError) as error:
            raise DataError(f"{path} is not the result of a cell of this study: {error!r}. Move it away.") from error
    return found


def selection_lines(stored: Stored) -> list[SelectionLine]:
    """The lines of the table: data sets, regimes, epsilons and arms in the order in which the study names them."""
    lines = []
    for (key, arm), cells in sorted(stored.items(), key=lambda item: _place(*item[0])):
        accuracies = {seed: 100 * cells[seed]["test_accuracy"] for seed in sorted(cells)}
        control = stored.get((key, CONTROL), {})
        settings = next(iter(cells.values()))["settings"]
        lines.append(
            SelectionLine(
                dataset=key[0],
                regime=key[1],
                heading=key[2],
                arm=arm,
                accuracies=accuracies,
                strength=settings.get("strength", settings.get("tempering")),
                difference=None if arm == CONTROL else paired(accuracies, control),
                epsilon=_epsilon(cells.values()),
            )
        )
    return lines


def paired(accuracies: Mapping[int, float], control: Mapping[int, Mapping[str, Any]]) -> Difference | None:
    """Differences seed by seed: what seeds have in common, such as the test set's hard records, drops out.

    >>> paired({0: 90.0, 1: 91.0}, {0: {"test_accuracy": 0.89}, 1: {"test_accuracy": 0.90}})
    Difference(mean=1.0, half_width=0.0, seeds=2)
    """
    both = [round(accuracies[seed] - 100 * control[seed]["test_accuracy"], 9) for seed in accuracies if seed in control]
    if not both:
        return None
    half_width = None
    if len(both) > 1:
        quantile = float(scipy.special.stdtrit(len(both) - 1, (1 + CONFIDENCE) / 2))
        half_width = quantile * statistics.stdev(both) / math.sqrt(len(both))
    return Difference(mean=statistics.fmean(both), half_width=half_width, seeds=len(both))


def write_selection(lines: Sequence[SelectionLine], results: Path, *, inclusion: str = "") -> dict[str, Path]:
    """Write table.md, table.csv and table.png into the folder of results, each as a whole or not at all."""
    from sluice.experiments.tables.selection_plot import selection_png
    from sluice.experiments.tables.selection_texts import as_csv, markdown

    paths = {kind: results / f"table.{kind}" for kind in ("md", "csv", "png")}
    results.mkdir(parents=True, exist_ok=True)
    page = markdown(lines, plot=paths["png"].name, inclusion=inclusion)
    write_atomically(paths["md"], page.encode("utf-8"), public=True)
    write_atomically(paths["csv"], as_csv(lines).encode("utf-8"), public=True)
    write_atomically(paths["png"], selection_png(lines), public=True)
    return paths


def _place(key: Key, arm: str) -> tuple[int, int, float, int]:
    dataset, regime, heading = key
    return _order(REGIMES, regime), _order(RECORDS, dataset), -heading, _order(ARMS, arm)


def _order(known: Iterable[str], name: str) -> int:
    names = list(known)
    return names.index(name) if name in names else len(names)


def _epsilon(cells: Iterable[Mapping[str, Any]]) -> float | None:
    values = [cell["epsilon"] for cell in cells]
    return None if any(not isinstance(value, float | int) for value in values) else float(max(values))
