from __future__ import annotations

import pytest
import torch
from hypothesis import assume, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from torch import nn

from sluice.gradients import GradientOptions, PerSampleGradients
from sluice.gradients.contributions import SINGLE
from sluice.gradients.loop import LoopCapture

PLAIN = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
TRANSPOSED = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}


def per_axis(rank: int, low: int, high: int):
    return st.tuples(*[st.integers(low, high)] * rank)


#: Depthwise, with several maps for each channel, in groups that fill a vector, a tile, or neither.
GROUPS = [(2, 3), (3, 9), (7, 1), (8, 1), (9, 2), (19, 1), (2, 17)]


@st.composite
def convolutions(draw, rank: int, few_groups: bool = True):
    groups, most_maps = (draw(st.sampled_from([1, 1, 1, 2, 3])), 3) if few_groups else draw(st.sampled_from(GROUPS))
    kernel = draw(per_axis(rank, 1, 4 if rank < 3 else 2))
    sizes = draw(per_axis(rank, 3, 8 if rank < 3 else 4))
    padding = draw(st.one_of(per_axis(rank, 0, 2), st.just("same"))) if rank < 3 else draw(per_axis(rank, 0, 1))
    stride = (1,) * rank if padding == "same" else draw(per_axis(rank, 1, 3))
    dilation = draw(per_axis(rank, 1, 2))
    mode = draw(st.sampled_from(["zeros", "zeros", "circular", "replicate"]))
    amounts = (0,) * rank if padding == "same" else padding
    for size, k, d, p in zip(sizes, kernel, dilation, amounts, strict=True):
        assume(size + 2 * p >= (k - 1) * d + 1 and (k - 1) * d < size)
    module = PLAIN[rank](
        groups * draw(st.integers(1, 3)),
        groups * draw(st.integers(1, most_maps)),
        kernel,
        stride=stride,
        padding=padding,
        dilation=dilation,
        groups=groups,
        bias=draw(st.booleans()),
        padding_mode=mode,
    )
    return module, sizes


@st.composite
def transposed(draw, rank: int):
    groups = draw(st.sampled_from([1, 1, 2, 9]))
    kernel, stride = draw(per_axis(rank, 1, 3)), draw(per_axis(rank, 1, 3))
    dilation = draw(per_axis(rank, 1, 2))
    sizes = draw(per_axis(rank, 2, 5 if rank < 3 else 3))
    padding = draw(per_axis(rank, 0, 1))
    extra = tuple(draw(st.integers(0, max(0, max(s, d) - 1))) for s, d in zip(stride, dilation, strict=True))
    for size, k, s, d, p in zip(sizes, kernel, stride, dilation, padding, strict=True):
        assume((size - 1) * s - 2 * p + d * (k - 1) + 1 >= 1)
    module = TRANSPOSED[rank](
        groups * draw(st.integers(1, 3)),
        groups * draw(st.integers(1, 3)),
        kernel,
        stride=stride,
        padding=padding,
        output_padding=extra,
        dilation=dilation,
        groups=groups,
        bias=draw(st.booleans()),
    )
    return module, sizes


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
@pytest.mark.parametrize("strategy", ["auto", "gram", "explicit"])
@pytest.mark.parametrize("rank", [1, 2, 3])
@hypothesis_settings(max_examples=25)
@given(data=st.data(), n=st.sampled_from([0, 1, 7, 64]), last=st.booleans())
def test_convolutions_agree_with_the_oracle(matches, reaching_loss, strategy, rank, data, n, last):
    module, sizes = data.draw(convolutions(rank))
    x = torch.randn(n, module.in_channels, *sizes)
    if last and rank == 2:
        x = x.contiguous(memory_format=torch.channels_last)
    matches(nn.Sequential(module, nn.Tanh()), x, torch.randn(n), reaching_loss, strategy={"0": strategy})


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
@pytest.mark.parametrize("rank", [1, 2, 3])
@hypothesis_settings(max_examples=40)
@given(data=st.data(), n=st.sampled_from([0, 1, 7]), last=st.booleans())
def test_grouped_convolutions_agree_with_the_oracle(matches, reaching_loss, rank, data, n, last):
    module, sizes = data.draw(convolutions(rank, few_groups=False))
    x = torch.randn(n, module.in_channels, *sizes)
    if last and rank == 2:
        x = x.contiguous(memory_format=torch.channels_last)
    matches(nn.Sequential(module, nn.Tanh()), x, torch.randn(n), reaching_loss)


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_broken_sample_stays_alone_in_grouped_convolutions(compiled, bad):
    net = nn.Sequential(nn.Conv2d(9, 9, 3, padding=1, groups=9), nn.Conv2d(9, 18, 3, groups=3), nn.Flatten())
    x = torch.randn(6, 9, 5, 5)

    def sums(x):
        engine = PerSampleGradients(net, options=GradientOptions(compiled=compiled))
        return engine.weighted_sum(x, torch.zeros(len(x)), lambda out, y: out.square().sum(1), lambda n: 1 / (1 + n))

    norms, whole = sums(torch.cat([x[:2], torch.zeros_like(x[:1]), x[3:]]))
    x[2, 4, 1, 1] = bad
    with pytest.warns(UserWarning, match="not finite"):
        found, rest = sums(x)
    kept = [0, 1, 3, 4, 5]
    assert torch.equal(found[kept], norms[kept])
    assert not found[2].isfinite()
    _, alone = sums(torch.zeros_like(x[:1]))
    for name, value in rest.items():
        torch.testing.assert_close(value, whole[name] - alone[name], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("strategy", ["auto", "gram", "explicit"])
@pytest.mark.parametrize("rank", [1, 2, 3])
@hypothesis_settings(max_examples=15)
@given(data=st.data(), n=st.sampled_from([0, 1, 7, 64]))
def test_transposed_convolutions_agree_with_the_oracle(matches, reaching_loss, strategy, rank, data, n):
    module, sizes = data.draw(transposed(rank))
    x = torch.randn(n, module.in_channels, *sizes)
    matches(nn.Sequential(module, nn.Tanh()), x, torch.randn(n), reaching_loss, strategy={"0": strategy})


@pytest.mark.parametrize("strategy", ["auto", "gram", "explicit"])
@pytest.mark.parametrize("n", [7, 64])
def test_a_whole_net_agrees_with_the_oracle(matches, reaching_loss, strategy, n):
    net = nn.Sequential(
        nn.Conv2d(5, 8, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 8, (3, 2), stride=(1, 2)),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(32, 4),
    )
    x = torch.randn(n, 5, 8, 8)
    matches(net, x, torch.randn(n), reaching_loss, strategy={"0": strategy, "3": strategy})


@pytest.mark.parametrize("channels", [3, 64])
@pytest.mark.parametrize("spread", [1e-1, 1e-2, 1e-3])
def test_cancelling_terms_do_not_change_a_norm(oracle, channels, spread):
    """Nearly constant images, and derivatives that sum to nothing over positions: almost all of the terms cancels."""
    net = nn.Conv2d(channels, 4, 1, bias=False)
    x = torch.rand(1, channels, 1, 1) + 0.5 + spread * torch.randn(4, channels, 8, 8)
    slopes = torch.randn(64)
    slopes -= slopes.mean()

    def loss(output, y):
        return (output.flatten(2) * slopes.to(output.dtype)).flatten(1).sum(1)

    truth = oracle(net, x, torch.zeros(4), loss)
    engine = PerSampleGradients(net, options=GradientOptions(strategy={"": "gram"}))
    tolerance = 1e-5 + 2e-7 / spread  # what explicit gradients in float32 can keep
    # All but what cancels so far that it has to count as more than it is; all four outputs have the same derivatives.
    terms = (x.double().norm(dim=1).flatten(1) * 2 * slopes.double().abs()).sum(1)
    expected = truth.norms.maximum(terms / SINGLE)
    torch.testing.assert_close(engine.norms(x, torch.zeros(4), loss).double(), expected, rtol=tolerance, atol=0)


class Viewing(nn.Module):
    """Its forward fails on feature maps that are stored channels last."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 4, 3)
        self.linear = nn.Linear(64, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(self.convolution(x).view(x.shape[0], -1))


def test_models_that_view_feature_maps_run(matches, reaching_loss):
    matches(Viewing(), torch.randn(7, 3, 6, 6), torch.randn(7), reaching_loss)


def test_losses_get_outputs_in_the_layout_that_the_model_gives_them():
    def loss(output, y):
        return output.view(output.shape[0], -1).square().sum(1)

    x, net = torch.randn(5, 3, 6, 6), nn.Conv2d(3, 4, 3)
    assert PerSampleGradients(net).norms(x, torch.zeros(5), loss).shape == (5,)


@pytest.mark.parametrize("model", [Viewing(), nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(64, 2))])
def test_an_ordinary_loop_stores_images_as_is_fastest(model):
    seen = []
    capture = LoopCapture(PerSampleGradients(model, loss_reduction="sum"), rows=5)
    capture.attach()
    try:
        capture.expect(5)
        x = torch.randn(5, 3, 6, 6)
        handle = model.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
        output = model(x)
        handle.remove()
        output.square().sum().backward()
        norms = capture.collect().norms
    finally:
        capture.detach()
    assert x.is_contiguous()
    assert torch.equal(seen[-1], x)
    assert seen[-1].is_contiguous(memory_format=torch.channels_last) is not isinstance(model, Viewing)
    engine = PerSampleGradients(model)
    torch.testing.assert_close(norms, engine.norms(x, torch.zeros(5), lambda out, y: out.square().sum(1)))
