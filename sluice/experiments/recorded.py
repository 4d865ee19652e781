"""What a run folder says about the run that it holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sluice._base.errors import DataError
from sluice._base.files import canonical_json, parse_json, read_bytes, write_atomically
from sluice.experiments.dataset_path import with_path
from sluice.experiments.evaluation import ClassAccuracy
from sluice.experiments.mean_release import MEAN
from sluice.experiments.settings import TrainSettings, settings_of
from sluice.mechanism.base import Mechanism
from sluice.runs.evaluations import read_evaluations
from sluice.runs.folder import RunFolder
from sluice.runs.ledger import read_ledger
from sluice.runs.privacy_spent import mechanism_of, spending
from sluice.runs.public_files import CLASSES, is_published

HELD_OUT = "held-out.json"


@dataclass(frozen=True, kw_only=True)
class TrainResult:
    """What a run says of itself.

    Attributes:
        epsilon: what the run guarantees, by its own accountant: that of all planned releases, also where it stopped
            early; None where nothing is proved.
        releases: releases in the ledger.
        test_accuracy: None where records were held out: the test set is not read then.
        by_class: accuracy on the test records of each class; empty where the test set is not read, or in older runs.
        held_out_accuracy: of private records, so not to be published; None where none were held out.
        test_scores, held_out_scores: what stands in their places where a number is predicted, by name.
        notes: what the user should know, such as what a crash has cost, or why the run ended before its last release.
    """

    run: Path
    mechanism: Mechanism
    epsilon: float | None
    delta: float
    accountant: str
    releases: int
    test_accuracy: float | None
    held_out_accuracy: float | None
    by_class: tuple[ClassAccuracy, ...] = ()
    notes: tuple[str, ...] = ()
    test_scores: Mapping[str, float] | None = None
    held_out_scores: Mapping[str, float] | None = None


@dataclass(frozen=True, kw_only=True)
class RecordedRun:
    """What a run folder says about the run that it holds.

    Attributes:
        mechanism: None if the run was stopped before its mechanism was logged; it is planned again then.
        result: None while the run is not finished.
    """

    settings: TrainSettings
    mechanism: Mechanism | None
    result: TrainResult | None


def recorded_run(path: Path) -> RecordedRun:
    """Read a run without changing anything."""
    folder = RunFolder.look(path)
    settings = with_path(folder, settings_of(folder.config, where=str(folder.config_path)))
    if not folder.ledger_path.exists():
        require_untouched(folder)
        return RecordedRun(settings=settings, mechanism=None, result=None)
    return RecordedRun(
        settings=settings,
        mechanism=mechanism_of(read_ledger(folder.ledger_path).header),
        result=result_of(folder, notes=()) if is_published(folder) else None,
    )


def write_classes(folder: RunFolder, found: Sequence[ClassAccuracy]) -> None:
    """Publish accuracy by class."""
    content = canonical_json([asdict(each) for each in found]) + b"\n"
    write_atomically(folder.public / CLASSES, content, public=True)


def read_classes(folder: RunFolder) -> tuple[ClassAccuracy, ...]:
    """What `write_classes` wrote; nothing where it did not."""
    path = folder.public / CLASSES
    if not path.exists():
        return ()
    try:
        return tuple(ClassAccuracy(**each) for each in parse_json(read_bytes(path), what=str(path)))
    except TypeError as error:
        raise DataError(f"{path} is not a list of classes with name, records and accuracy.") from error


def require_untouched(folder: RunFolder) -> None:
    """Refuse a run without a ledger unless nothing can have been released in it."""
    later = (
        *(folder.checkpoints, folder.trace_path, folder.accuracy_path, folder.weights_path, folder.certificate_path),
        *(folder.private / MEAN, folder.public / MEAN),
    )
    if any(path.exists() for path in later):
        raise DataError(
            f"{folder.ledger_path} is missing though the run had begun, so what it spent is unknown: restore it from a "
            "copy."
        )


def result_of(folder: RunFolder, *, notes: tuple[str, ...]) -> TrainResult:
    contents = read_ledger(folder.ledger_path)
    evaluations = read_evaluations(folder)
    held_out_path = folder.private / HELD_OUT
    held_out: dict[str, Any] = {}
    if held_out_path.exists():
        held_out = parse_json(read_bytes(held_out_path), what=str(held_out_path))
    mechanism = mechanism_of(contents.header)
    ending = mechanism.ending_after(contents.spent)
    return TrainResult(
        run=folder.path,
        mechanism=mechanism,
        epsilon=spending(contents).epsilon,
        delta=contents.header.delta,
        accountant=contents.header.accountant,
        releases=contents.spent,
        test_accuracy=evaluations[-1].test_accuracy if evaluations else None,
        held_out_accuracy=held_out.get("held_out_accuracy"),
        by_class=read_classes(folder),
        notes=(*notes, ending) if ending else notes,
        test_scores=evaluations[-1].test_scores if evaluations else None,
        held_out_scores=held_out.get("held_out_scores"),
    )


__all__ = [
    "CLASSES",
    "HELD_OUT",
    "RecordedRun",
    "TrainResult",
    "read_classes",
    "recorded_run",
    "require_untouched",
    "result_of",
    "write_classes",
]
