"""Rows in half precision give linear models the outputs, gradients and weights that the same rows in float32 give."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sluice.data import TensorExamples, to_float
from sluice.data.transforms import unscaled
from sluice.gradients import GradientOptions, PerSampleGradients
from sluice.models import LinearClassifier, SoftmaxRegression, StoredLinear
from sluice.training.engine import PrivacyEngine


def loss(output: Tensor, y: Tensor) -> Tensor:
    return ((output - 0.3) ** 2).sum(1) + output[:, 0] * y


@pytest.mark.parametrize("n", [0, 1, 7, 300])
@pytest.mark.parametrize(("inputs", "outputs"), [(150, 3), (9, 3), (150, 20)])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("kind", [torch.float16, torch.float32])
def test_gradients_agree_with_the_oracle(
    n: int, inputs: int, outputs: int, bias: bool, compiled: bool, kind: torch.dtype
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), StoredLinear(inputs, outputs, bias=bias))
    x, y, weights = torch.randn(n, inputs, 1).to(kind), torch.randn(n), torch.rand(n)
    assert torch.equal(model(x), model(x.float()))
    engine = PerSampleGradients(model, options=GradientOptions(compiled=compiled))
    norms, sums = engine.weighted_sum(x, y, loss, lambda norms: weights)
    exact = copy.deepcopy(model).double()
    squares, wanted = [], {name: torch.zeros_like(p) for name, p in exact.named_parameters()}
    for i in range(n):
        value = loss(exact(x[i : i + 1].double()), y[i : i + 1].double()).sum()
        gradients = torch.autograd.grad(value, list(exact.parameters()))
        squares.append(sum(float(g.square().sum()) for g in gradients))
        for (name, _), gradient in zip(exact.named_parameters(), gradients, strict=True):
            wanted[name] += weights[i].double() * gradient
    torch.testing.assert_close(norms.double(), torch.tensor(squares, dtype=torch.float64).sqrt(), rtol=1e-5, atol=1e-7)
    for name, value in wanted.items():
        assert sums[name].dtype is torch.float32
        torch.testing.assert_close(sums[name].double(), value.detach(), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("broken", [torch.inf, torch.nan])
def test_a_broken_record_leaves_the_others_alone(compiled: bool, broken: float) -> None:
    x, y, weights = torch.randn(20, 150).half(), torch.randn(20), torch.rand(20)
    engine = PerSampleGradients(StoredLinear(150, 3), options=GradientOptions(compiled=compiled))
    weights[3] = 0
    wanted = engine.weighted_sum(x, y, loss, lambda norms: weights)[1]
    x[3, 5] = broken
    weights[3] = 1
    with pytest.warns(UserWarning, match="not finite"):
        found = engine.weighted_sum(x, y, loss, lambda norms: weights)[1]
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value)


def trained(examples: TensorExamples, model: nn.Module) -> dict[str, Tensor]:
    engine = PrivacyEngine(seed=3)
    engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9),
        data_loader=examples,
        noise_multiplier=1.0,
        max_grad_norm=0.1,
        releases=8,
        sample_rate=0.5,
    )
    for _ in engine.releases(F.cross_entropy):
        pass
    return model.state_dict()


@pytest.mark.parametrize("bias", [True, False])
def test_training_on_stored_rows_gives_the_same_weights(bias: bool) -> None:
    rows = TensorExamples(torch.randn(200, 160).half(), torch.arange(200) % 3, unscaled)

    def model() -> nn.Module:
        return LinearClassifier(input_shape=(160,), classes=3) if bias else SoftmaxRegression(width=160, classes=3)

    wanted, found = trained(rows, model()), trained(rows.stored(), model())
    assert list(wanted) == list(found) == ["classifier.weight", "classifier.bias"][: 1 + bias]
    assert wanted["classifier.weight"].abs().max() > 0
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-6)


def test_stored_records_are_the_same_records() -> None:
    rows = TensorExamples(torch.randn(9, 2, 3).half(), torch.arange(9), unscaled)
    stored = rows.stored()
    x, y = stored.batch([4, 0, 4])
    assert (x.dtype, x.shape, y.tolist()) == (torch.float16, (3, 2, 3), [4, 0, 4])
    assert torch.equal(x.float(), rows.batch([4, 0, 4])[0])
    assert stored.batch([])[0].shape == (0, 2, 3)
    assert stored.digests() == rows.digests()
    assert stored.subset([3, 2]).batch([1])[0].dtype is torch.float16
    assert torch.equal(stored.to("cpu").batch([1])[0], x.new_tensor(rows.inputs[1:2].tolist()))


def test_only_what_is_stored_in_half_precision_stays_so() -> None:
    for inputs, transform in ((torch.ones(3, 2), unscaled), (torch.ones(3, 2).half(), to_float)):
        rows = TensorExamples(inputs, torch.arange(3), transform)
        assert rows.stored() is rows
        assert rows.stored().batch([0])[0].dtype is torch.float32
