"""What a run writes into ``public/``: test accuracy over releases, the model, the certificate, plots."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from sluice._base import codec
from sluice._base.errors import DataError, InputError
from sluice._base.files import parse_json, read_bytes, sha256_hex, sha256_of_file, write_atomically
from sluice.runs.accuracy import AccuracyPoint, accuracy_svg
from sluice.runs.certificate import certified_head, write_certificate
from sluice.runs.folder import RunFolder
from sluice.runs.ledger import Ledger, read_ledger

PLOT = "accuracy.svg"

_EPSILON_KEY = "epsilon_if_planned_to_stop_here"
#: Its name in the files of earlier runs.
_EARLIER_KEY = "epsilon"


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """How good the model is on the public test records after a number of releases.

    Attributes:
        epsilon_if_planned_to_stop_here: what a run costs whose plan ends with this release; None where nothing is
            proved. It is not what this run guarantees, not even if it stops here (`sluice.runs.privacy_spent`).
        test_accuracy: of classes; None where a number is predicted.
        test_scores: by name, the main one first, where a number is predicted, else None.
    """

    release: int
    epsilon_if_planned_to_stop_here: float | None
    test_accuracy: float | None = None
    test_scores: Mapping[str, float] | None = None

    def as_json(self) -> dict[str, Any]:
        """Plain data, with the one of accuracy and scores that there is."""
        absent = "test_scores" if self.test_scores is None else "test_accuracy"
        return {name: value for name, value in asdict(self).items() if name != absent}


def scores_text(scores: Mapping[str, float]) -> str:
    """Scores as words.

    >>> scores_text({"mean_squared_error": 0.25, "r_squared": 0.5})
    'mean squared error 0.25, r squared 0.5'
    """
    return ", ".join(f"{name.replace('_', ' ')} {value:.4g}" for name, value in scores.items())


class PublicFiles:
    """The public files of one run. Each is replaced as a whole.

    Guarantee:
        What is written depends on the released weights, on the ledger and on test records, and on nothing else.
    """

    def __init__(self, folder: RunFolder, *, delta: float) -> None:
        self._folder = folder
        self._delta = delta
        self._evaluations = {each.release: each for each in read_evaluations(folder)}

    def keep_up_to(self, release: int) -> None:
        """Drop what was written after the checkpoint from which the run resumes."""
        self._evaluations = {number: each for number, each in self._evaluations.items() if number <= release}

    def has(self, release: int) -> bool:
        """Whether the evaluation after this release is written."""
        return release in self._evaluations

    def add(self, evaluation: Evaluation) -> None:
        self._evaluations[evaluation.release] = evaluation
        lines = [json.dumps(each.as_json()) + "\n" for each in self._evaluations.values()]
        write_atomically(self._folder.accuracy_path, "".join(lines).encode("ascii"), public=True)

    def publish_model(self, weights: bytes, ledger: Ledger) -> None:
        """The weights, encoded as safetensors."""
        publish(self._folder, self._folder.weights_path.name, weights, ledger)

    def publish_certificate(self) -> None:
        """The certificate, and test accuracy over epsilon as a plot where there is something to draw."""
        points = [
            AccuracyPoint(epsilon=each.epsilon_if_planned_to_stop_here, test_accuracy=each.test_accuracy)
            for each in self._evaluations.values()
            if each.epsilon_if_planned_to_stop_here is not None and each.test_accuracy is not None
        ]
        if points:
            svg = accuracy_svg(points, delta=self._delta)
            write_atomically(self._folder.public / PLOT, svg.encode("utf-8"), public=True)
        write_certificate(self._folder)


def publish(folder: RunFolder, name: str, content: bytes, ledger: Ledger) -> None:
    """Put a file into ``public/``; its hash is in the ledger, once, before the file is in place."""
    digest = sha256_hex(content)
    if read_ledger(ledger.path).published.get(name) != digest:
        ledger.append_published(name, sha256=digest)
    write_atomically(folder.public / name, content, public=True)


def read_evaluations(folder: RunFolder) -> list[Evaluation]:
    """The evaluations that a run has published so far, by release."""
    if not folder.accuracy_path.exists():
        return []
    found = []
    for number, line in enumerate(read_bytes(folder.accuracy_path).splitlines(), start=1):
        place = f"{folder.accuracy_path}, line {number}"
        data = parse_json(line, what=place)
        try:
            if isinstance(data, dict) and _EARLIER_KEY in data:
                data[_EPSILON_KEY] = data.pop(_EARLIER_KEY)
            result = "test_scores" if isinstance(data, dict) and "test_scores" in data else "test_accuracy"
            codec.require_keys(data, what="the line", required=("release", _EPSILON_KEY, result))
        except InputError as error:
            raise DataError(f"{place}: {error}") from error
        found.append(Evaluation(**data))
    return sorted(found, key=lambda each: each.release)


def is_published(folder: RunFolder) -> bool:
    """Whether the run is over: the weights in the ledger are in place, and a certificate of all that is in the ledger too."""
    contents = read_ledger(folder.ledger_path)
    logged = contents.published.get(folder.weights_path.name)
    return (
        logged is not None
        and folder.certificate_path.is_file()
        and folder.weights_path.is_file()
        and sha256_of_file(folder.weights_path) == logged
        and certified_head(folder) == contents.head
    )
