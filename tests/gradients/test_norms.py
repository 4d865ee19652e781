"""A norm is never too small: not by cancellation, not by long sums, not by squares that leave the range of floats."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from sluice.gradients import GradientOptions, PerSampleGradients
from sluice.gradients.contributions import SINGLE, Tap, squared_norms
from sluice.gradients.positions import LinearContribution

ALLOWED = 5e-6
not_finite = pytest.mark.filterwarnings("ignore:A sample's gradient is not finite")


def exact(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.bmm(b.double().transpose(1, 2), a.double()).flatten(1).norm(dim=1)


def contribution(a: torch.Tensor, b: torch.Tensor, strategy: str, **options) -> LinearContribution:
    tap = Tap(b.shape, b.dtype, b.device)
    tap.bind(b)
    parameter = torch.zeros(b.shape[2], a.shape[2])
    return LinearContribution(parameter, tap, a, strategy=strategy, options=GradientOptions(**options))


def two_tones(share: float, *, positions: int, inputs: int, few: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs of two values that are nearly the same, derivatives of opposite signs: all rounding errors agree.

    ``few``: all but two positions have no derivative at all.
    """
    n = 100
    base, change = torch.rand(n, 1, inputs) + 0.5, torch.randn(n, 1, inputs)
    base[n // 2 :] = base[n // 2 :, :, :1]
    change *= share**0.5 * base.norm(dim=2, keepdim=True) / change.norm(dim=2, keepdim=True)
    second = torch.arange(positions).view(1, -1, 1) % 2 == 1
    a = torch.where(second, base + change, base - change)
    b = torch.randn(n, 1, 16) * torch.where(second, 1.0, -1.0)
    if few:
        b = b.masked_fill(torch.arange(positions).view(1, -1, 1) > 1, 0)
    return a, b


@pytest.mark.parametrize("few", [False, True])
@pytest.mark.parametrize("share", [3e-1, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6])
@pytest.mark.parametrize(("positions", "inputs"), [(8, 64), (100, 512), (500, 27)])
def test_cancellation_never_makes_a_norm_too_small(few, share, positions, inputs):
    a, b = two_tones(share, positions=positions, inputs=inputs, few=few)
    truth = exact(a, b)
    found = contribution(a, b, "gram").norms_squared(keep=False).double().sqrt()
    assert float((found / truth).min()) >= 1 - ALLOWED
    terms = (a.double().norm(dim=2) * b.double().norm(dim=2)).sum(1)
    most = (truth * (1 + ALLOWED) + 3e-7 * terms).maximum(terms / SINGLE * (1 + 1e-12))
    assert bool((found <= most).all())


def test_ordinary_data_get_ordinary_norms():
    for positions in (2, 30, 300):
        a, b = torch.randn(20, positions, 50), torch.randn(20, positions, 30)
        found = contribution(a, b, "gram").norms_squared(keep=False).double().sqrt()
        torch.testing.assert_close(found, exact(a, b), rtol=ALLOWED, atol=0)


@pytest.mark.parametrize("value", [0.1, 1 / 3, 0.7])
@pytest.mark.parametrize("length", [1, 511, 513, 10**6])
def test_long_rows_of_equal_numbers(length, value):
    rows = torch.full((2, length), value)
    torch.testing.assert_close(squared_norms(rows).sqrt(), rows.double().norm(dim=1), rtol=1e-6, atol=0)


SCALES = [1e-30, 1e-26, 1e-23, 1e-22, 1e-21, 1e-20, 1e-19, 1e-15, 1e-8, 1.0, 1e8, 1e15, 1e18, 1.5e19, 1e22, 1e30]


def sound(found: torch.Tensor, truth: torch.Tensor) -> bool:
    """A norm too small by more than rounding would let its sample count for more than the bound."""
    return bool(((found.double() >= truth * (1 - 1e-5) - 1e-12) | ~found.isfinite()).all())


@pytest.mark.parametrize("positions", [1, 3])
@pytest.mark.parametrize("strategy", ["gram", "explicit"])
@pytest.mark.parametrize("compiled", [True, False])
def test_scales_of_inputs_and_derivatives_do_not_matter(positions, strategy, compiled):
    for first in SCALES:
        for second in SCALES:
            a, b = first * torch.randn(6, positions, 40), second * torch.randn(6, positions, 10)
            # Another position of ordinary size must not hide the extreme one.
            a[3:, 0], b[3:, 0] = a[3:, 0].sign() * 1e-3, b[3:, 0].sign() * 1e-2
            part = contribution(a, b, strategy, compiled=compiled)
            assert sound(part.norms_squared(keep=True).double().sqrt(), exact(a, b)), (first, second)


@not_finite
@pytest.mark.parametrize(
    ("model", "shape"),
    [
        (nn.Conv1d(2, 3, 2), (2, 5)),
        (nn.ConvTranspose1d(2, 3, 2), (2, 5)),
        (nn.Sequential(nn.Flatten(), nn.Linear(10, 3)), (2, 5)),
        (nn.LayerNorm(5), (2, 5)),
        (nn.LSTM(5, 3, batch_first=True), (4, 5)),
        (nn.GRU(5, 3, batch_first=True), (4, 5)),
        (nn.Bilinear(5, 5, 2), (5,)),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
@pytest.mark.parametrize("strategy", ["auto", "gram"])
def test_no_layer_reports_too_small_a_norm_at_any_scale(model, shape, strategy):
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, x):
            out = self.inner(x, x) if isinstance(self.inner, nn.Bilinear) else self.inner(x)
            return out[0] if isinstance(out, tuple) else out

    options = GradientOptions(strategy={} if strategy == "auto" else {"inner": "gram"})
    engine = PerSampleGradients(Scaled(), options=options)
    parameters = list(model.parameters())
    for first in SCALES[::3]:
        for second in SCALES[::3]:
            x = first * torch.randn(3, *shape)

            def loss(output, _, second=second):
                return (output * second).flatten(1).sum(1)

            chunk = next(iter(engine.chunks(x, torch.zeros(3), loss)))
            norms = chunk.norms
            for i in range(3):
                total = engine.zeros()
                chunk.add_weighted_sum(torch.eye(3)[i], into=total)
                used = torch.cat([t.double().flatten() for t in total.values()]).norm()
                assert sound(norms[i], used), (first, second)
    assert all(p.grad is None for p in parameters)


@not_finite
def test_bags_with_large_factors_and_small_derivatives():
    class Bag(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bag = nn.EmbeddingBag(5, 4, mode="sum")

        def forward(self, x, factors):
            return self.bag(x, per_sample_weights=factors)

    engine = PerSampleGradients(Bag(), options=GradientOptions(verify=False))
    for first in SCALES:
        for second in SCALES:
            factors = first * torch.ones(2, 3)
            x = torch.tensor([[0, 1, 2], [3, 3, 3]])
            norms = engine.norms((x, factors), torch.zeros(2), lambda o, y, s=second: (o * s).sum(1))
            truth = first * second * torch.tensor([12.0, 36.0]).double().sqrt()
            assert sound(norms, truth), (first, second)


def test_norms_that_no_weight_can_make_small_count_as_infinite():
    model = nn.Linear(2, 1, bias=False)
    engine = PerSampleGradients(model)
    with pytest.warns(UserWarning, match="not finite"):
        norms = engine.norms(torch.tensor([[1e32, 0.0], [1.0, 0.0]]), torch.zeros(2), lambda o, y: o[:, 0])
    assert norms.tolist() == [float("inf"), 1.0]
