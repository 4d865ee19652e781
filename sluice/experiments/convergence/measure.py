"""A run of the engine on a problem whose constants are known, with all that the bounds speak of measured before each release."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from sluice.experiments.convergence.bound import Descent
from sluice.experiments.convergence.problems import Point, Problem
from sluice.mechanism.selective_release import SelectiveRelease
from sluice.training.engine import PrivacyEngine
from sluice.training.options import TrainingOptions


@dataclass(frozen=True, kw_only=True)
class Run:
    """What one run showed. Sensitive, but for the problems here, whose records are public.

    Attributes:
        mean, smallest: of the squared gradient norms before each release.
        first: the first of them.
        squared_bias: the mean of the squared bound on the bias (`Descent.bias`); ``squared_bias_by_norms`` from norms alone.
        paper_bias: the mean squared distance of the gradient from the mean of the scaled ones: what the paper's proof
            bounds by its selection term.
        clipped: the share of records whose gradients are clipped, on average.
        acceptance: accepted attempts over all.
        loss_gap: the first loss less the lower bound; ``last_gap`` the last one's.
    """

    seed: int
    mean: float
    smallest: float
    first: float
    squared_bias: float
    squared_bias_by_norms: float
    paper_bias: float
    clipped: float
    acceptance: float
    loss_gap: float
    last_gap: float

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def descent_of(problem: Problem, mechanism: SelectiveRelease, *, lr: float) -> Descent:
    """The constants of a run on this problem."""
    return Descent(
        mechanism=mechanism,
        dataset_size=len(problem.records),
        lr=lr,
        smoothness=problem.smoothness,
        trace=problem.trace,
        dimension=sum(parameter.numel() for parameter in problem.model().parameters()),
    )


def measured_run(problem: Problem, mechanism: SelectiveRelease, *, lr: float, seed: int) -> Run:
    """Train with the engine itself, by gradient descent without momentum.

    Guarantee:
        None: for problems whose records are public.
    """
    descent = descent_of(problem, mechanism, lr=lr)
    model = problem.model()
    engine = PrivacyEngine(seed=seed)
    engine.make_private_by(
        mechanism,
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=lr),
        data_loader=problem.records,
        options=TrainingOptions(max_physical_batch_size=1024),
    )
    rows, attempts = [], 0
    point = start = problem.now(model)
    for _ in engine.releases(problem.loss):
        rows.append(_row(descent, point))
        attempts += engine.last_private_trace()[0]
        point = problem.now(model)
    engine.close()
    means = np.mean(rows, axis=0)
    return Run(
        seed=seed,
        mean=float(means[0]),
        smallest=float(np.min([row[0] for row in rows])),
        first=float(rows[0][0]),
        squared_bias=float(means[1]),
        squared_bias_by_norms=float(means[2]),
        paper_bias=float(means[3]),
        clipped=float(means[4]),
        acceptance=len(rows) / attempts,
        loss_gap=start.value - problem.least,
        last_gap=point.value - problem.least,
    )


def _row(descent: Descent, point: Point) -> tuple[float, float, float, float, float]:
    bound, gradient, norms = descent.scaling.bound, point.gradient, point.norms
    kept = float(np.minimum(norms, bound).mean())
    lost = point.mean(1 - bound / np.maximum(norms, bound))
    bias = descent.bias(cut_off=float(np.linalg.norm(lost)), kept=kept)
    by_norms = descent.bias(cut_off=float(np.maximum(norms - bound, 0).mean()), kept=kept)
    off = gradient - descent.longest * point.mean(1 / np.maximum(norms, bound))
    clipped = float((norms > bound).mean())
    return float(gradient @ gradient), bias**2, by_norms**2, float(off @ off), clipped


__all__ = ["Run", "descent_of", "measured_run"]
