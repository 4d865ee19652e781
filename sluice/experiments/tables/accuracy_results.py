"""Results of the accuracy table's cells: one small JSON file each, re-used as long as the settings are the same."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import sluice
from sluice._base.errors import DataError, InputError
from sluice._base.files import parse_json, read_bytes, write_atomically
from sluice.experiments.settings import TrainSettings
from sluice.experiments.tables.accuracy_cells import Cell, PlannedCell

_NEEDED = ("settings", "test_accuracy", "epsilon", "target_epsilon", "delta", "figures", "releases", "wall_seconds")


def result_path(results: Path, cell: Cell) -> Path:
    return results / f"{cell.name}.json"


def stored_result(results: Path, planned: PlannedCell) -> tuple[Mapping[str, Any] | None, str]:
    """The result of this very cell, or None and, where another one lies in its place, what is wrong with that."""
    path = result_path(results, planned.cell)
    if not path.exists():
        return None, ""
    found = parse_json(read_bytes(path), what=str(path))
    missing = [key for key in _NEEDED if key not in found] if isinstance(found, dict) else list(_NEEDED)
    if missing:
        raise DataError(
            f"{path} lacks {', '.join(missing)}: it is not the result of a cell. Move it away, or use --again."
        )
    different = _differences(found["settings"], planned.settings)
    if different:
        return None, f"{path} was made with other settings ({different})"
    return found, ""


def store_result(results: Path, cell: Cell, result: Mapping[str, Any]) -> None:
    content = json.dumps(result, indent=1, allow_nan=False) + "\n"
    write_atomically(result_path(results, cell), content.encode("utf-8"), public=True)


def _differences(stored: Any, settings: TrainSettings) -> str:
    """The names of settings that differ, or "". A setting younger than the file had its default then."""
    names = [field.name for field in fields(TrainSettings)]
    if not isinstance(stored, dict) or not set(stored) <= set(names):
        return "of another version"
    try:
        then = TrainSettings(**stored).to_dict()
    except InputError:
        return "of another version"
    now = settings.to_dict()
    return ", ".join(name for name in names if _plain(then.get(name)) != _plain(now.get(name)))


def _plain(value: Any) -> Any:
    """As it comes back from a file: JSON knows no tuples."""
    return json.loads(json.dumps(value))


@dataclass(frozen=True, kw_only=True)
class SourceState:
    """The code that a result was made by.

    Attributes:
        commit: of the repository that the package is in; None where it is installed without one.
        dirty: whether the package differed from that commit.
    """

    commit: str | None
    dirty: bool | None


def source_state() -> SourceState:
    """Asked once, when the command begins: later edits do not change the code that is already loaded."""
    package = Path(sluice.__file__).parent
    if _git(package, "ls-files", "--error-unmatch", "__init__.py") is None:
        return SourceState(commit=None, dirty=None)
    changes = _git(package, "status", "--porcelain", "--", ".")
    return SourceState(commit=_git(package, "rev-parse", "HEAD"), dirty=None if changes is None else bool(changes))


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=folder, capture_output=True, text=True, check=False, encoding="utf-8"
        )
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None
