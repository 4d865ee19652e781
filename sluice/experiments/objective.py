"""What a run trains and is judged by: classes by cross-entropy, numbers by squared error, counts by Poisson likelihood.

Numbers and counts have a model with one output. Public constants alone turn a target into what the loss sees, so that a
record's gradient stays a function of that record and of the weights.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sluice._base.errors import DataError
from sluice.data import DataSplits, Examples
from sluice.data.targets import TargetKind
from sluice.experiments.evaluation import outputs
from sluice.experiments.objective_settings import POISSON, SQUARED, predicts_numbers, range_of
from sluice.experiments.settings import TrainSettings
from sluice.models import create_model, create_regressor
from sluice.runs.scores import DEVIANCE, R_SQUARED, SQUARED_ERROR

_LARGEST_LOGARITHM = 20.0
"""Where the rate of a count goes on as a straight line: an exponential would soon be infinite, and so would gradients."""


@dataclass(frozen=True, kw_only=True)
class Objective:
    """The loss of a run, what its model's output means, and how good that is.

    Attributes:
        loss: its name, as in the settings.
        bounds: the public range that targets are clipped to in training; squared error is of numbers that are scaled so
            that it becomes -1 to 1. None leaves targets as they are.
    """

    loss: str | None = None
    bounds: tuple[float, float] | None = None

    @classmethod
    def of(cls, settings: TrainSettings) -> Objective:
        return cls(
            loss=settings.loss, bounds=None if settings.target_range is None else range_of(settings.target_range)
        )

    @property
    def predicts_numbers(self) -> bool:
        return predicts_numbers(self.loss)

    @property
    def target_kind(self) -> TargetKind:
        """What a record's target is, as `sluice.data.load` names it."""
        if not self.predicts_numbers:
            return "class"
        return "count" if self.loss == POISSON else "number"

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        """The mean loss of a batch.

        Guarantee:
            A mean over records of terms that each depend on one record and on public constants. Terms are not
            negative, but for rounding.
        """
        if not self.predicts_numbers:
            return F.cross_entropy(output, target)
        said, wanted = output.squeeze(1), target.to(output.dtype)
        if self.bounds is not None:
            wanted = wanted.clamp(*self.bounds)
        if self.loss == SQUARED:
            return F.mse_loss(said, (wanted - self._middle) / self._half)
        return (_rate(said) - wanted + torch.xlogy(wanted, wanted) - wanted * said).mean()

    def predictions(self, output: Tensor) -> Tensor:
        """The numbers that a model's outputs ``(records, 1)`` stand for, in float64; counts are expected ones."""
        said = output.squeeze(1).nan_to_num().double()  # what is infinite in float32 counts as its largest number
        return _rate(said) if self.loss == POISSON else said * self._half + self._middle

    def scores(self, predicted: Tensor, target: Tensor) -> dict[str, float]:
        """How good predictions are, by name: mean squared error and R squared, or the mean Poisson deviance.

        R squared is left out where all targets are equal. The targets are as they were given: no range clips them here.
        """
        wanted = target.double()
        if self.loss == POISSON:
            rate = predicted.clamp(min=torch.finfo(torch.float64).tiny)
            parts = torch.xlogy(wanted, wanted) - torch.xlogy(wanted, rate) - (wanted - rate)
            return {DEVIANCE: float(2 * parts.mean())}
        squared = (predicted - wanted).square()
        spread = (wanted - wanted.mean()).square().sum()
        found = {SQUARED_ERROR: float(squared.mean())}
        return found | {R_SQUARED: float(1 - squared.sum() / spread)} if spread > 0 else found

    def scores_on(self, model: nn.Module, examples: Examples) -> dict[str, float]:
        """`scores` on records.

        Guarantee:
            None for these records: they must be public, as test records are, or the result be kept private.
        """
        found = [(self.predictions(output), y) for output, y in outputs(model, examples)]
        return self.scores(torch.cat([said for said, _ in found]), torch.cat([y for _, y in found]))

    def require_targets(self, splits: DataSplits) -> None:
        """Refuse records whose targets are not what the loss is for."""
        if splits.train.labels.is_floating_point() != self.predicts_numbers:
            found = "classes" if self.predicts_numbers else "numbers"
            raise DataError(
                f"the targets of {splits.name} were loaded as {found}, which loss={self.loss or 'cross-entropy'!r} is not "
                "for: load them with the run's settings (sluice.experiments.preparing.prepare)."
            )

    @property
    def _middle(self) -> float:
        return 0.0 if self.bounds is None else (self.bounds[0] + self.bounds[1]) / 2

    @property
    def _half(self) -> float:
        return 1.0 if self.bounds is None else (self.bounds[1] - self.bounds[0]) / 2


def model_of(settings: TrainSettings, input_shape: tuple[int, ...], *, classes: int) -> nn.Module:
    """A fresh model of the settings, for records of this shape: an output for each class, or one for a number."""
    if settings.predicts_numbers:
        return create_regressor(settings.model, input_shape, settings.activation)
    return create_model(settings.model, input_shape, classes, settings.activation)


def _rate(logarithm: Tensor) -> Tensor:
    """The exponential, and its tangent from a large public constant on."""
    beyond = (logarithm - _LARGEST_LOGARITHM).clamp(min=0)
    return logarithm.clamp(max=_LARGEST_LOGARITHM).exp() * (1 + beyond)


__all__ = ["Objective", "model_of"]
