"""How good a run's model was on the public test records, release by release: ``public/accuracy.jsonl``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from sluice._base import codec
from sluice._base.errors import DataError, InputError
from sluice._base.files import parse_json, read_bytes
from sluice._base.line_plot import Point
from sluice.runs.folder import RunFolder
from sluice.runs.scores import by_name

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

    @property
    def scores(self) -> Mapping[str, float]:
        """Accuracy or the scores of numbers, by name (`sluice.runs.scores`), the main one first."""
        return by_name(self.test_accuracy, self.test_scores)

    def as_json(self) -> dict[str, Any]:
        """Plain data, with the one of accuracy and scores that there is."""
        absent = "test_scores" if self.test_scores is None else "test_accuracy"
        return {name: value for name, value in asdict(self).items() if name != absent}


def main_score(evaluations: Sequence[Evaluation]) -> str | None:
    """The name of the score that a run is judged by; None where it has published none."""
    return next(iter(evaluations[-1].scores), None) if evaluations else None


def over_epsilon(evaluations: Sequence[Evaluation]) -> list[Point]:
    """Epsilon of a run planned to stop there, and the main score; nothing where no epsilon is proved."""
    score = main_score(evaluations)
    return [
        (each.epsilon_if_planned_to_stop_here, value)
        for each in evaluations
        for name, value in each.scores.items()
        if each.epsilon_if_planned_to_stop_here is not None and name == score
    ]


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
        evaluation = Evaluation(**data)
        _require_numbers(evaluation, place)
        found.append(evaluation)
    return sorted(found, key=lambda each: each.release)


def _require_numbers(evaluation: Evaluation, place: str) -> None:
    if not isinstance(evaluation.scores, Mapping) or not all(map(_is_number, evaluation.scores.values())):
        raise DataError(f"{place}: scores must be numbers, by name.")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


__all__ = ["Evaluation", "main_score", "over_epsilon", "read_evaluations"]
