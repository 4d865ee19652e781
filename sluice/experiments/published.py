"""A finished run put to use: features and weights from ``public/`` alone, without the training data."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from sluice._base.errors import DataError, InputError
from sluice._base.files import sha256_of_file
from sluice.data import Examples, ranked, unlabelled
from sluice.data.files import Kind
from sluice.data.targets import Targets
from sluice.experiments.encoded import MODEL
from sluice.experiments.mean_release import MEAN
from sluice.experiments.objective import Objective, model_of
from sluice.experiments.preparing import TEXT_DATA_SETS, WEIGHTED_WORDS, text_with_features, with_features
from sluice.experiments.run import FEATURES
from sluice.experiments.settings import TrainSettings, settings_of
from sluice.features import RowFeatures
from sluice.runs.folder import RunFolder
from sluice.runs.ledger import read_ledger
from sluice.runs.public_files import is_published

_ROWS_AT_ONCE = 1024


@dataclass(frozen=True, kw_only=True, eq=False)
class PublishedModel:
    """What a run has published, to predict records in the form of its training data.

    Guarantee:
        Read from ``public/``, so that whatever is computed with it is post-processing of the run's releases.

    Attributes:
        settings: of the run.
        classes: their names, in the order of the model's scores; none where a number is predicted.
        input_shape: of a record as the module sees it.
        module: the trained model, on what features give it.
        features: what makes rows of images, where the model sees rows.
        mean: the released mean of the rows, where one was released.
        function_words: the words, with their ranks, that tell how texts are read, where the model reads weighted words.
    """

    settings: TrainSettings
    classes: tuple[str, ...]
    input_shape: tuple[int, ...]
    module: nn.Module
    features: RowFeatures | None = None
    mean: Tensor | None = None
    function_words: Mapping[str, int] = field(default_factory=dict)

    def probabilities(self, records: Tensor | NDArray[Any]) -> Tensor:
        """The probability of each class for each record, ``(records, classes)``.

        Args:
            records: as the training data had them: images as bytes or numbers in 0..1, ``(n, height, width)`` or
                ``(n, channels, height, width)``; texts as rows of word ranks, the most frequent word being 1, filled up with 0.
        """
        if self.objective.predicts_numbers:
            raise InputError(
                f"loss={self.settings.loss!r} has no probabilities of classes: predict() gives its numbers."
            )
        return self._outputs(records).softmax(dim=1)

    def predict(self, records: Tensor | NDArray[Any]) -> Tensor:
        """The most probable class of each record, by number; or the number that the model was trained to predict, in float64."""
        if self.objective.predicts_numbers:
            return self.objective.predictions(self._outputs(records))
        return self.probabilities(records).argmax(dim=1)

    @property
    def objective(self) -> Objective:
        """What the run was trained by."""
        return Objective.of(self.settings)

    @property
    def targets(self) -> Targets:
        """How the targets of further records are read: as those of the training data were, with the classes that the model has."""
        kind = self.objective.target_kind
        if kind != "class":
            return Targets(kind=kind)
        are_numbers = self.classes == tuple(str(number) for number in range(len(self.classes)))
        return Targets(classes=len(self.classes)) if are_numbers else Targets(names=self.classes)

    def _outputs(self, records: Tensor | NDArray[Any]) -> Tensor:
        seen = self._seen(np.asarray(records))
        if seen.input_shape != self.input_shape:
            raise DataError(
                f"records (shape {tuple(np.shape(records))}) are not of the form of the training data: the model sees records of "
                f"shape {self.input_shape}, and these become {seen.input_shape}."
            )
        with torch.no_grad():
            parts = [
                self.module(seen.batch(positions)[0]) for positions in torch.arange(len(seen)).split(_ROWS_AT_ONCE)
            ]
        return torch.cat([torch.zeros(0, len(self.classes) or 1), *parts])

    def _seen(self, records: NDArray[Any]) -> Examples:
        if self.settings.dataset in TEXT_DATA_SETS or self.settings.features.startswith(WEIGHTED_WORDS):
            return text_with_features(self.settings, ranked(records), function_words=self.function_words)
        raw = unlabelled(self.settings.dataset, records, kind=self._kind)
        return with_features(self.settings, raw, rows=self.features, centre=self.mean)

    @property
    def _kind(self) -> Kind:
        """What records are: only images have three dimensions, or features other than what they are stored as."""
        return "image" if len(self.input_shape) == 3 or self.settings.features != "plain" else "features"


def load_model(run: str | Path) -> PublishedModel:
    """The model of a finished run, from its ``public/`` folder alone.

    Example::

        model = sluice.load_model("runs/mnist-dpsgd-1")
        model.predict(images)  # numbers of classes
        model.classes
    """
    folder = RunFolder.look(run)
    settings = settings_of(folder.config, where=str(folder.config_path))
    if not folder.ledger_path.exists() or not is_published(folder):
        raise DataError(
            f"{folder.path} is not finished, or its public files are not those of its ledger: sluice verify it."
        )
    weights, metadata = _read(folder.weights_path)
    if MODEL not in metadata:
        raise DataError(f"{folder.weights_path} does not name its classes: it was published by an earlier version.")
    model = json.loads(metadata[MODEL])
    classes = tuple(model["classes"])
    input_shape = tuple(model["input_shape"])
    module = model_of(settings, input_shape, classes=len(classes))
    module.load_state_dict(weights)
    module.eval()
    features = None
    if settings.has_rows:
        features = RowFeatures.from_tensors(*_read(_as_logged(folder, FEATURES)))
    mean = None
    if settings.mean_noise is not None:
        mean = _read(_as_logged(folder, MEAN))[0]["mean"]
    return PublishedModel(
        settings=settings,
        classes=classes,
        input_shape=input_shape,
        module=module,
        features=features,
        mean=mean,
        function_words=model.get("function_words", {}),
    )


def _as_logged(folder: RunFolder, name: str) -> Path:
    """A file in ``public/``, whose bytes must be those that the ledger has a hash of, where it has one."""
    path, logged = folder.public / name, read_ledger(folder.ledger_path).published.get(name)
    if logged is not None and sha256_of_file(path) != logged:
        raise DataError(f"{path} is not the file that the ledger has a hash of: restore it from a copy.")
    return path


def _read(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise DataError(f"{path} cannot be read: {error}.") from error


__all__ = ["PublishedModel", "load_model"]
