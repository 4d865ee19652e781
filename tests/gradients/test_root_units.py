"""The ordinary loop on models that are themselves one unit, held to the oracle."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from sluice.gradients import GradientOptions, PerSampleGradients
from sluice.gradients.loop import LoopCapture


class Tokens(nn.Module):
    """A root with parameters of its own, as vision transformers have them."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 1, 4))
        self.positions = nn.Parameter(torch.randn(1, 6, 4))
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        return self.head((torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.positions).tanh().mean(1))


ROOTS = [
    pytest.param(lambda: nn.Linear(4, 3), (4,), None, id="linear"),
    pytest.param(lambda: nn.Conv2d(2, 3, 3), (2, 5, 5), None, id="convolution"),
    pytest.param(lambda: nn.LSTM(4, 3, batch_first=True), (5, 4), None, id="lstm"),
    pytest.param(Tokens, (5, 4), None, id="tokens"),
    pytest.param(Tokens, (5, 4), "vmap", id="vmap"),
    pytest.param(Tokens, (5, 4), "loop", id="loop"),
]


def first(output):
    return output[0] if isinstance(output, tuple) else output


@pytest.mark.parametrize(("make", "shape", "strategy"), ROOTS)
@pytest.mark.parametrize("count", [5, 8])
def test_a_model_that_is_one_unit_trains_in_the_ordinary_loop(oracle, make, shape, strategy, count):
    torch.manual_seed(0)
    model, x = make().train(), torch.randn(count, *shape)

    def loss(output, target):
        return first(output).sin().flatten(1).sum(1)

    options = GradientOptions(strategy={"": strategy} if strategy else {})
    capture = LoopCapture(PerSampleGradients(model, loss_reduction="sum", options=options), rows=8)
    capture.attach()
    try:
        for _ in range(2):
            capture.expect(count)
            loss(model(x), None).sum().backward()
            chunk = capture.collect()
    finally:
        capture.detach()
    expected = oracle(model, x, torch.zeros(count), loss)
    torch.testing.assert_close(chunk.norms.double(), expected.norms, rtol=1e-5, atol=1e-6)
    sums: dict = {}
    chunk.add_weighted_sum(torch.arange(count).float(), into=sums)
    for name, value in expected.weighted_sum(torch.arange(count)).items():
        torch.testing.assert_close(sums[name].double(), value, rtol=1e-4, atol=1e-4)


class Refusing(nn.Linear):
    refuses = False

    def forward(self, x):
        if self.refuses:
            raise ValueError("not today")
        return super().forward(x)


def test_a_forward_pass_that_raises_leaves_nothing_behind():
    model, x = Refusing(4, 3), torch.randn(5, 4)
    capture = LoopCapture(PerSampleGradients(model, loss_reduction="sum"), rows=8)
    capture.attach()
    try:
        capture.expect(5)
        model(x)
        capture.expect(5)
        model.refuses = True
        with pytest.raises(ValueError, match="not today"):
            model(x)
        assert all(parameter.requires_grad for parameter in model.parameters())
        assert "forward" not in vars(model)
        model.refuses = False
        capture.expect(5)
        model(x).sum().backward()
        assert bool(capture.collect().norms.gt(0).all())
    finally:
        capture.detach()
