from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from sluice._base.errors import UnsupportedModuleError
from sluice.gradients import GradientOptions, PerSampleGradients

SIZES = st.sampled_from([0, 1, 7, 64])


def shaken(module: nn.Module) -> nn.Module:
    """Scales that are all one would hide mistakes."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter))
    return module


@settings(max_examples=30)
@given(
    n=SIZES,
    positions=st.lists(st.integers(1, 4), max_size=2),
    normalised=st.lists(st.integers(4, 6), min_size=1, max_size=2),
    kind=st.sampled_from(["layer", "layer without bias", "rms"]),
)
def test_trailing_axes_agree_with_the_oracle(matches, reaching_loss, n, positions, normalised, kind):
    torch.manual_seed(0)
    norm = nn.RMSNorm(normalised, eps=1e-5) if kind == "rms" else nn.LayerNorm(normalised, bias=kind == "layer")
    model = nn.Sequential(nn.Linear(normalised[-1], normalised[-1]), shaken(norm))
    matches(model, torch.randn(n, *positions, *normalised), torch.randn(n), reaching_loss)


@settings(max_examples=30)
@given(
    n=SIZES,
    channels=st.sampled_from([2, 4, 6]),
    space=st.lists(st.integers(2, 4), max_size=3),
    groups=st.sampled_from([1, 2]),
)
def test_group_norm_agrees_with_the_oracle(matches, reaching_loss, n, channels, space, groups):
    torch.manual_seed(0)
    if channels // groups == 1 and not space:
        space = [2]
    matches(
        nn.Sequential(shaken(nn.GroupNorm(groups, channels))),
        torch.randn(n, channels, *space),
        torch.randn(n),
        reaching_loss,
    )


@pytest.mark.parametrize("n", [0, 1, 7, 64])
@pytest.mark.parametrize("dimensions", [1, 2, 3])
@pytest.mark.parametrize("statistics", ["own", "running"])
def test_instance_norm_agrees_with_the_oracle(matches, reaching_loss, n, dimensions, statistics):
    kind = [nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d][dimensions - 1]
    model = nn.Sequential(shaken(kind(3, affine=True, track_running_stats=statistics == "running")))
    if statistics == "running":
        model[0].running_mean.normal_()
        model.eval()
    matches(model, torch.randn(n, 3, *[3] * dimensions), torch.randn(n), reaching_loss)


def test_running_statistics_are_refused_in_training_mode(reaching_loss):
    model = nn.Sequential(nn.InstanceNorm1d(3, affine=True, track_running_stats=True))
    with pytest.raises(UnsupportedModuleError, match="track_running_stats"):
        PerSampleGradients(model).norms(torch.randn(7, 3, 4), torch.randn(7), reaching_loss)


def test_called_twice(matches, reaching_loss):
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = shaken(nn.LayerNorm(4))

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(torch.sin(self.norm(x)))

    matches(Twice(), torch.randn(7, 3, 4), torch.randn(7), reaching_loss)


def test_only_the_scale_is_trained(matches, reaching_loss):
    norm = shaken(nn.LayerNorm(4))
    norm.bias.requires_grad_(False)
    matches(nn.Sequential(norm), torch.randn(7, 3, 4), torch.randn(7), reaching_loss)


def test_samples_on_another_axis(matches, reaching_loss):
    class TimeMajor(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = shaken(nn.LayerNorm(4))

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(x.transpose(0, 1)).transpose(0, 1)

    matches(TimeMajor(), torch.randn(7, 3, 4), torch.randn(7), reaching_loss)


def test_one_sample_whose_strides_say_nothing(matches, reaching_loss):
    """Patches of an image, as a vision transformer has them, transposed: the first axis of a single one has any stride."""

    class Patches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.patches, self.norm = nn.Conv2d(3, 4, 2, stride=2), shaken(nn.LayerNorm(4))

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(self.patches(x).flatten(2).transpose(1, 2)).mean(1)

    matches(Patches(), torch.randn(1, 3, 6, 6), torch.randn(1), reaching_loss)


def test_normalising_over_samples_is_refused(reaching_loss):
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(7)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(x.repeat(7, 1)[:7].t()).t() if x.shape[0] == 7 else x.repeat(1, 7)[:, :7]

    engine = PerSampleGradients(Mixed(), options=GradientOptions(verify=False))
    with pytest.raises(UnsupportedModuleError, match="norm"):
        engine.norms(torch.randn(7, 3), torch.randn(7), reaching_loss)


def test_scale_that_is_zero(matches, reaching_loss):
    """The normalised input cannot be recovered from the output; it must not be tried."""
    norm = nn.GroupNorm(2, 4)
    with torch.no_grad():
        norm.weight.zero_()
    matches(nn.Sequential(nn.Linear(5, 5), norm), torch.randn(7, 4, 5), torch.randn(7), reaching_loss)


@pytest.mark.parametrize("groups", [1, 3, 9])
@pytest.mark.parametrize("rank", [1, 2])
def test_layers_below_a_group_norm_agree_with_the_oracle(matches, reaching_loss, rank, groups):
    """Images are stored channels last, signals channels first; either way the norm's input has a derivative."""
    convolution = {1: nn.Conv1d, 2: nn.Conv2d}[rank]
    net = nn.Sequential(
        convolution(3, 9, 3), nn.GroupNorm(groups, 9), nn.Tanh(), nn.Flatten(), nn.Linear(9 * 6**rank, 2)
    )
    with torch.no_grad():
        net[1].weight.copy_(torch.randn(9))
    matches(net, torch.randn(7, 3, *[8] * rank), torch.randn(7), reaching_loss)


@pytest.mark.parametrize(
    "end", [nn.Conv2d(8, 4, 3, padding=1), nn.AdaptiveAvgPool2d(1)], ids=["convolution", "pooling"]
)
def test_feature_maps_of_one_pixel_agree_with_the_oracle(matches, reaching_loss, end):
    """Strides along axes of length one say nothing, and differ between a layer's output and its derivative."""
    torch.manual_seed(0)
    first = nn.Conv2d(3, 8, 3, stride=2, padding=1)
    model = nn.Sequential(first, shaken(nn.GroupNorm(2, 8)), nn.ReLU(), end, nn.Flatten())
    matches(model, torch.randn(5, 3, 2, 2), torch.randn(5), reaching_loss)
