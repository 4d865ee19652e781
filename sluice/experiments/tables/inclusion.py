"""How much rarer a gate makes records with large gradients: measured in a run, against the exponential tilt.

For the developer's eyes: it reads the metrics of accepted batches and of all records, which no run publishes.
"""

from __future__ import annotations

import json
import math
import tempfile
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from sluice._base.errors import InputError
from sluice._base.files import parse_json, read_bytes, write_atomically
from sluice.experiments.preparing import prepare
from sluice.experiments.run import Training
from sluice.experiments.settings import TrainSettings
from sluice.experiments.tables.selection_cells import RECORDS, arm_settings, strength_of_the_gate
from sluice.gradients import Chunk
from sluice.mechanism.registry import register
from sluice.mechanism.selective_release import SelectiveRelease
from sluice.methods import planned_mechanism
from sluice.training.context import Loss
from sluice.training.executor import Draft
from sluice.training.selective_release import AcceptedBatch, SelectiveReleaseExecutor

CLASSES = 6
"""Records are counted by metric: 0, four classes of equal width between 0 and 1, and 1."""

# Gates whose decision is this sharp, beside the calibrated one: there is more to see.
GATE_NOISES = (None, 1.0)


class Tally:
    """How many records of each class were in accepted batches, and in the data, over all releases. Sensitive."""

    def __init__(self) -> None:
        self.accepted = torch.zeros(CLASSES, dtype=torch.float64)
        self.present = torch.zeros(CLASSES, dtype=torch.float64)
        self.metric = torch.zeros(CLASSES, dtype=torch.float64)

    def add(self, accepted: Tensor, present: Tensor) -> None:
        self.accepted += _counts(accepted)
        self.present += _counts(present)
        self.metric += _counts(present, weights=present)


def _counts(metrics: Tensor, *, weights: Tensor | None = None) -> Tensor:
    inner = 1 + (metrics * (CLASSES - 2)).floor().clamp(max=CLASSES - 3).long()
    inner[metrics <= 0], inner[metrics >= 1] = 0, CLASSES - 1
    return torch.bincount(inner, weights=weights, minlength=CLASSES).double()


@dataclass(frozen=True, kw_only=True)
class WatchedRelease(SelectiveRelease):
    """Selective release whose batches are counted as they are accepted."""

    kind: ClassVar[str] = "watched selective release"


class WatchedExecutor(SelectiveReleaseExecutor):
    """Counts before each release the metrics of its batch, and of all records at the same weights."""

    takes_workers = False
    tally: ClassVar[Tally] = Tally()

    def draw(self) -> Tensor:
        self._metrics: list[Tensor] = []
        return super().draw()

    def absorb(self, chunk: Chunk | None) -> bool:
        if chunk is not None:
            self._metrics.append(self._measured_by_gate(chunk))
        return super().absorb(chunk)

    def prepare(self, loss: Loss) -> Draft[AcceptedBatch]:
        draft = super().prepare(loss)
        everybody = torch.arange(self.context.dataset_size)
        present = [self._measured_by_gate(chunk) for chunk in self.context.chunks(everybody, loss)]
        self.tally.add(torch.cat([torch.zeros(0, dtype=torch.float64), *self._metrics]), torch.cat(present))
        return draft

    def _measured_by_gate(self, chunk: Chunk) -> Tensor:
        assert self.mechanism.gate is not None
        return self.mechanism.gate.measure(chunk.norms)


register(WatchedRelease, executor=WatchedExecutor)


def measure_inclusion(
    dataset: str, epsilon: float, *, gate_noise: float | None, data_dir: Path | None
) -> dict[str, Any]:
    """Train once with the clipping-bias gate, and compare with the tilt: odds of each class over those of metric 0.

    Guarantee:
        None: what it returns is read off the records. For public data.
    """
    settings = arm_settings(dataset, epsilon, "gate", "plain")
    settings = replace(settings, seed=0, gate_noise=gate_noise)
    if settings.has_rows and settings.mean_noise is not None:
        raise InputError(f"dataset={dataset!r} is not allowed: its mean is released first, which is not counted here.")
    mechanism = planned_mechanism(settings, dataset_size=RECORDS[dataset])
    assert isinstance(mechanism, SelectiveRelease)
    watched = WatchedRelease(**{each.name: getattr(mechanism, each.name) for each in fields(mechanism)})
    WatchedExecutor.tally = tally = Tally()
    with tempfile.TemporaryDirectory() as folder:
        splits = prepare(settings, data_dir=data_dir, show_progress=False)
        Training(settings=settings, splits=splits, mechanism=watched).start(Path(folder) / "run")
    return described(tally, settings)


def described(tally: Tally, settings: TrainSettings) -> dict[str, Any]:
    """Factors of the odds with standard errors, the strength fitted to them, and the gate's at most."""
    rows = []
    base = _odds(tally, 0)
    for place in range(CLASSES):
        if tally.accepted[place] < 1 or base is None or (odds := _odds(tally, place)) is None:
            continue
        factor = odds / base
        error = factor * math.sqrt(1 / float(tally.accepted[place]) + (1 / float(tally.accepted[0]) if place else 0.0))
        rows.append(
            {
                "metric": float(tally.metric[place] / tally.present[place]),
                "accepted": float(tally.accepted[place]),
                "factor": factor,
                "error": error if place else 0.0,
            }
        )
    return {
        "dataset": settings.dataset,
        "epsilon": settings.epsilon,
        "gate_noise": settings.gate_noise,
        "strength_at_most": strength_of_the_gate(settings),
        "fitted": fitted_strength(rows),
        "classes": rows,
        "settings": settings.to_dict(),
    }


def _odds(tally: Tally, place: int) -> float | None:
    if not 0 < tally.accepted[place] < tally.present[place]:
        return None
    rate = float(tally.accepted[place] / tally.present[place])
    return rate / (1 - rate)


def fitted_strength(rows: list[dict[str, float]]) -> dict[str, float] | None:
    """The strength whose tilt fits best, weighted by errors, and its standard error.

    >>> rows = [{"metric": 0.0, "factor": 1.0, "error": 0.0}, {"metric": 1.0, "factor": math.exp(-0.5), "error": 0.01}]
    >>> round(fitted_strength(rows)["strength"], 6)
    0.5
    """
    used = [row for row in rows if row["error"] > 0]
    total = sum((row["metric"] * row["factor"] / row["error"]) ** 2 for row in used)
    if not total:
        return None
    along = sum(-math.log(row["factor"]) * row["metric"] * (row["factor"] / row["error"]) ** 2 for row in used)
    return {"strength": along / total, "error": total**-0.5}


def inclusion_path(results: Path, dataset: str, epsilon: float, gate_noise: float | None) -> Path:
    noise = "calibrated" if gate_noise is None else f"{gate_noise:g}"
    return results / f"inclusion-{dataset}-eps{epsilon:g}-noise-{noise}.json"


def run_inclusion(results: Path, dataset: str, epsilon: float, *, data_dir: Path | None) -> None:
    """Measure, for each sharpness of the gate, and store; what is stored is not measured again."""
    for gate_noise in GATE_NOISES:
        path = inclusion_path(results, dataset, epsilon, gate_noise)
        if not path.exists():
            found = measure_inclusion(dataset, epsilon, gate_noise=gate_noise, data_dir=data_dir)
            write_atomically(path, (json.dumps(found, indent=1) + "\n").encode("utf-8"), public=True)


def stored_inclusion(results: Path) -> list[dict[str, Any]]:
    return [parse_json(read_bytes(path), what=str(path)) for path in sorted(results.glob("inclusion-*.json"))]


def inclusion_markdown(stored: list[dict[str, Any]]) -> str:
    """A table for each measurement: how often records were accepted, and what the tilt says."""
    parts = []
    for found in stored:
        noise = "calibrated gate noise" if found["gate_noise"] is None else f"gate noise {found['gate_noise']:g}"
        fitted = found["fitted"]
        said = "nothing to fit" if fitted is None else f"{fitted['strength']:.3f} ± {fitted['error']:.3f}"
        strengths = [found["strength_at_most"], *([] if fitted is None else [fitted["strength"]])]
        rows = []
        for row in found["classes"]:
            tilts = " | ".join(f"{math.exp(-strength * row['metric']):.3f}" for strength in strengths)
            measured = f"{row['factor']:.3f} ± {row['error']:.3f}"
            rows.append(f"| {row['metric']:.2f} | {row['accepted']:.0f} | {measured} | {tilts} |")
        parts.append(
            f"{found['dataset']}, epsilon {found['epsilon']:g}, {noise}: strength at most {found['strength_at_most']:g}, fitted "
            f"{said}.\n\n| mean metric | records accepted | odds over those of metric 0 | tilt, at most | tilt, fitted |\n"
            "|---|---|---|---|---|\n" + "\n".join(rows)
        )
    return "\n\n".join(parts)
