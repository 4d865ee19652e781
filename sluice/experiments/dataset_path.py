"""Where a run's own data lies: a path can tell who trains on what, so only the last name of it is published."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from sluice._base.files import read_bytes, write_atomically
from sluice.data import names as data_set_names
from sluice.experiments.settings import TrainSettings
from sluice.runs.folder import RunFolder

PATH = "dataset"
"""The path as it was given, in ``private/``, where it is more than a name."""


def published_config(settings: TrainSettings) -> dict[str, Any]:
    """The settings as ``public/config.json`` has them: of a path to data of the user's own, the last name alone."""
    return {**settings.to_dict(), "dataset": _published(settings.dataset)}


def keep_path(folder: RunFolder, settings: TrainSettings) -> None:
    """Remember the path of the data in ``private/``, to resume the run."""
    if _published(settings.dataset) != settings.dataset:
        write_atomically(folder.private / PATH, settings.dataset.encode("utf-8"), public=False)


def with_path(folder: RunFolder, settings: TrainSettings) -> TrainSettings:
    """The settings of a run folder with the path of its data, where it is remembered."""
    kept = folder.private / PATH
    return replace(settings, dataset=read_bytes(kept).decode("utf-8")) if kept.exists() else settings


def is_config_of(settings: TrainSettings, config: Mapping[str, Any]) -> bool:
    """Whether a run began with these settings. Earlier versions published the whole path."""
    return config in (published_config(settings), settings.to_dict())


def _published(dataset: str) -> str:
    if dataset in data_set_names():
        return dataset
    name = Path(dataset).name or dataset
    return f"./{name}" if name in data_set_names() else name  # a file of the user's own that is called as a data set is


__all__ = ["PATH", "is_config_of", "keep_path", "published_config", "with_path"]
