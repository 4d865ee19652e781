"""Losses whose constants are known: a quadratic, and regularised logistic regression on digits."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import scipy
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from sluice.data import load

Array = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, eq=False)
class Point:
    """The loss at some weights, exactly.

    Attributes:
        value: the mean loss of all records.
        norms: of each record's gradient.
        gradients: such that ``mean(weights)`` is the mean over records of weight times gradient, flat.
    """

    value: float
    norms: Array
    gradients: Any

    def mean(self, weights: Array) -> Array:
        result: Array = self.gradients(weights)
        return result

    @property
    def gradient(self) -> Array:
        return self.mean(np.ones_like(self.norms))


class Problem(ABC):
    """A mean of smooth losses, one for each record.

    Attributes:
        name: by which it is asked for.
        smoothness: the largest eigenvalue of a matrix that bounds the curvature of the mean loss everywhere.
        trace: the trace of that matrix.
        least: a lower bound on the mean loss.
    """

    name: str
    smoothness: float
    trace: float
    least: float

    @property
    @abstractmethod
    def records(self) -> TensorDataset: ...

    @abstractmethod
    def model(self) -> nn.Module:
        """The model at its first weights."""

    @abstractmethod
    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """The mean loss of a batch."""

    @abstractmethod
    def at(self, weights: Array) -> Point:
        """The loss at flat weights, in the order of the model's parameters."""

    def now(self, model: nn.Module) -> Point:
        flat = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
        return self.at(flat.double().numpy())


class _Difference(nn.Module):
    def __init__(self, dimension: int) -> None:
        super().__init__()
        self.place = nn.Parameter(torch.zeros(dimension))

    def forward(self, x: Tensor) -> Tensor:
        return self.place - x


class Quadratic(Problem):
    """Half the squared distance from each of some points, which lie around one that is ``distance`` away from the start."""

    name = "quadratic"
    smoothness = 1.0

    def __init__(self, *, records: int = 2000, dimension: int = 10, distance: float = 20.0) -> None:
        generator = np.random.default_rng(0)
        centre = np.full(dimension, distance / np.sqrt(dimension))
        self.points: Array = np.asarray(
            (centre + generator.standard_normal((records, dimension))).astype(np.float32), dtype=np.float64
        )
        self.trace = float(dimension)
        self.least = float(((self.points - self.points.mean(axis=0)) ** 2).sum(axis=1).mean()) / 2

    @property
    def records(self) -> TensorDataset:
        points = torch.from_numpy(self.points).float()
        return TensorDataset(points, torch.zeros(len(points)))

    def model(self) -> nn.Module:
        return _Difference(self.points.shape[1])

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return output.square().sum(dim=1).mean() / 2

    def at(self, weights: Array) -> Point:
        each = weights - self.points
        norms = np.linalg.norm(each, axis=1)
        return Point(
            value=float((norms**2).mean()) / 2,
            norms=norms,
            gradients=lambda factors: (factors[:, None] * each).mean(axis=0),
        )


class _RegularisedSoftmax(nn.Module):
    """Scores of the classes, and the penalty in a last column, so that each record's loss contains it."""

    def __init__(self, inputs: int, classes: int, decay: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(classes, inputs))
        self.decay = decay

    def forward(self, x: Tensor) -> Tensor:
        scores = F.linear(x, self.weight)
        penalty = self.decay / 2 * self.weight.square().sum()
        return torch.cat([scores, penalty.expand(len(x), 1)], dim=1)


class Digits(Problem):
    """Logistic regression on digits, its pixels in 0..1 and a constant, each record's loss with ``decay / 2`` times the squared weights.

    The second derivative of cross-entropy by the scores has eigenvalues of at most 1/2, so its curvature by the weights is at most half the
    mean of ``x x'`` for each class, with decay on top. It is strongly convex with ``decay``: a point with gradient ``g``
    is within ``|g|^2 / (2 decay)`` of the smallest value.
    """

    name = "digits"

    def __init__(self, *, decay: float = 0.01) -> None:
        train = load("digits").train
        pixels, labels = train.batch(torch.arange(len(train)))
        self._inputs = F.pad(pixels.flatten(1).float(), (0, 1), value=1.0)
        self._labels = labels
        self._decay = decay
        self._classes = int(labels.max()) + 1
        self._x: Array = self._inputs.double().numpy()
        self._one_hot: Array = np.eye(self._classes)[labels.numpy()]
        largest = float(np.linalg.eigvalsh(self._x.T @ self._x / len(self._x))[-1])
        self.smoothness = largest / 2 + decay
        weights = self._classes * self._x.shape[1]
        self.trace = self._classes * float((self._x**2).sum(axis=1).mean()) / 2 + decay * weights

    @cached_property
    def least(self) -> float:  # type: ignore[override]
        def value_and_gradient(weights: Array) -> tuple[float, Array]:
            point = self.at(weights)
            return point.value, point.gradient

        start = np.zeros(self._classes * self._x.shape[1])
        found = scipy.optimize.minimize(
            value_and_gradient, start, jac=True, method="L-BFGS-B", options={"maxiter": 5000, "gtol": 1e-7}
        )
        reached = self.at(found.x)
        return reached.value - float(reached.gradient @ reached.gradient) / (2 * self._decay)

    @property
    def records(self) -> TensorDataset:
        return TensorDataset(self._inputs, self._labels)

    def model(self) -> nn.Module:
        return _RegularisedSoftmax(self._x.shape[1], self._classes, self._decay)

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output[:, :-1], target) + output[:, -1].mean()

    def at(self, weights: Array) -> Point:
        matrix = weights.reshape(self._classes, -1)
        scores = self._x @ matrix.T
        logs = scores - scipy.special.logsumexp(scores, axis=1, keepdims=True)
        off = np.exp(logs) - self._one_hot
        squared = float((matrix**2).sum())
        lengths = (self._x**2).sum(axis=1)
        cross = (off * scores).sum(axis=1)
        norms = np.sqrt(
            np.maximum((off**2).sum(axis=1) * lengths + 2 * self._decay * cross + self._decay**2 * squared, 0.0)
        )
        return Point(
            value=float(-(logs * self._one_hot).sum(axis=1).mean()) + self._decay / 2 * squared,
            norms=norms,
            gradients=lambda factors: (
                (factors[:, None] * off).T @ self._x / len(self._x) + self._decay * factors.mean() * matrix
            ).ravel(),
        )


PROBLEMS: dict[str, type[Problem]] = {"quadratic": Quadratic, "digits": Digits}

__all__ = ["PROBLEMS", "Digits", "Point", "Problem", "Quadratic"]
