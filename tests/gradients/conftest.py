"""The oracle that every rule is held to: one sample at a time, in float64, by plain autograd."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

Loss = Callable[[Any, Tensor], Tensor]


@dataclass(frozen=True)
class Truth:
    """norms: [n]; gradients: parameter name -> [n, *shape], trainable parameters only; all float64."""

    norms: Tensor
    gradients: dict[str, Tensor]

    def weighted_sum(self, weights: Tensor) -> dict[str, Tensor]:
        return {name: torch.tensordot(weights.double(), g, dims=1) for name, g in self.gradients.items()}


def _rows(batch: Any, rows: slice, dtype: torch.dtype | None = None) -> Any:
    if isinstance(batch, Tensor):
        part = batch[rows]
        return part.to(dtype) if dtype is not None and part.is_floating_point() else part
    if isinstance(batch, dict):
        return {key: _rows(value, rows, dtype) for key, value in batch.items()}
    return tuple(_rows(value, rows, dtype) for value in batch)


def _call(model: nn.Module, x: Any) -> Any:
    if isinstance(x, dict):
        return model(**x)
    return model(*x) if isinstance(x, tuple) else model(x)


def truth(model: nn.Module, x: Any, y: Tensor, loss: Loss) -> Truth:
    """Per-sample gradients by the slowest and plainest way there is. ``loss(output, y)`` gives one value per sample."""
    exact = copy.deepcopy(model).double()
    trainable = {name: p for name, p in exact.named_parameters() if p.requires_grad}
    rows: dict[str, list[Tensor]] = {name: [] for name in trainable}
    for i in range(y.shape[0]):
        one = slice(i, i + 1)
        target = _rows(y, one, torch.float64)
        value = loss(_call(exact, _rows(x, one, torch.float64)), target).sum()
        gradients = torch.autograd.grad(value, list(trainable.values()), allow_unused=True)
        for (name, p), g in zip(trainable.items(), gradients, strict=True):
            rows[name].append(torch.zeros_like(p) if g is None else g)
    stacked = {
        name: torch.stack(rows[name]) if rows[name] else torch.zeros(0, *p.shape, dtype=torch.float64)
        for name, p in trainable.items()
    }
    squares = [g.reshape(g.shape[0], -1).square().sum(1) for g in stacked.values() if g.shape[0]]
    norms = torch.stack(squares).sum(0).sqrt() if squares else torch.zeros(y.shape[0], dtype=torch.float64)
    return Truth(norms=norms, gradients=stacked)


def assert_matches(model: nn.Module, x: Any, y: Tensor, loss: Loss, *, tolerance: float = 1e-5, **options: Any) -> None:
    """Norms and weighted sums agree with the oracle, relative to the largest value of each, with and without kernels in C."""
    from sluice.gradients import GradientOptions

    expected = truth(model, x, y, loss)
    for compiled in (True, False):
        # The checks of a model do not depend on kernels: once is enough.
        chosen = GradientOptions(**{"compiled": compiled, "verify": compiled, **options})
        _assert_matches(expected, model, x, y, loss, tolerance=tolerance, options=chosen)


def _assert_matches(
    expected: Truth, model: nn.Module, x: Any, y: Tensor, loss: Loss, *, tolerance: float, options: Any
) -> None:
    from sluice.gradients import PerSampleGradients

    engine = PerSampleGradients(model, options=options)
    norms = engine.norms(x, y, loss)
    assert norms.shape == (y.shape[0],)
    scale = expected.norms.max().item() if y.shape[0] else 0.0
    torch.testing.assert_close(norms.double(), expected.norms, rtol=tolerance, atol=tolerance * scale * 0.1 + 1e-12)

    weights = torch.linspace(0.25, 1.0, y.shape[0])
    norms_again, sums = engine.weighted_sum(x, y, loss, lambda n: weights)
    torch.testing.assert_close(norms_again, norms, rtol=1e-6, atol=1e-8)
    wanted = expected.weighted_sum(weights)
    assert set(sums) == set(wanted)
    # Sums may cancel; what rounding can do is relative to the gradients that are added up.
    size = max(
        [
            float(sum(g.reshape(g.shape[0], -1).norm(dim=1).max() for g in expected.gradients.values() if g.shape[0])),
            1e-12,
        ]
    )
    for name, value in wanted.items():
        error = (sums[name].double() - value).norm().item()
        allowed = tolerance * max(value.norm().item(), 0.1 * size)
        assert error <= allowed, f"{name}: error {error:.3g} > {allowed:.3g}"


def squared_error(output: Any, y: Tensor) -> Tensor:
    """A loss that reaches every entry of the output with a different derivative."""
    flat = output.flatten(1)
    ramp = torch.linspace(-1.0, 1.0, flat.shape[1], dtype=flat.dtype, device=flat.device)
    return ((flat - ramp) ** 2).sum(1) + flat[:, 0] * y.to(flat.dtype)


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    with torch.random.fork_rng():
        torch.manual_seed(20261101)
        yield


@pytest.fixture(scope="session")
def oracle() -> Callable[..., Truth]:
    return truth


@pytest.fixture(scope="session")
def matches() -> Callable[..., None]:
    """``matches(model, x, y, loss)``: x a tensor, tuple or dict, batch first; loss(output, y) -> [n]."""
    return assert_matches


@pytest.fixture(scope="session")
def reaching_loss() -> Loss:
    return squared_error
