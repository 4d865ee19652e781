from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from sluice._base.errors import InputError
from sluice.features import ChannelNormalisation, ChannelStatistics, GroupNormalisation, scale_orders


def random_features(samples: int, channels: int = 81) -> torch.Tensor:
    return torch.rand(samples, channels, 7, 7, generator=torch.Generator().manual_seed(channels))


class TestGroupNormalisation:
    @pytest.mark.parametrize("channels", [81, 243])
    def test_every_group_has_mean_0_and_variance_1(self, channels):
        groups = GroupNormalisation()(random_features(3, channels) * 5 + 2).view(3, 27, -1)
        torch.testing.assert_close(groups.mean(dim=2), torch.zeros(3, 27), rtol=0, atol=1e-5)
        torch.testing.assert_close(groups.var(dim=2, unbiased=False), torch.ones(3, 27), rtol=1e-3, atol=0)

    def test_equals_the_layer_without_parameters(self):
        features = random_features(3)
        torch.testing.assert_close(GroupNormalisation()(features), nn.GroupNorm(27, 81, affine=False)(features))

    def test_reads_float16(self):
        features = random_features(3).half()
        assert torch.equal(GroupNormalisation()(features), GroupNormalisation()(features.float()))

    def test_an_empty_batch(self):
        assert GroupNormalisation()(torch.zeros(0, 81, 7, 7)).shape == (0, 81, 7, 7)

    def test_a_constant_group_becomes_0(self):
        features = random_features(2)
        features[1, :3] = 4.0
        assert GroupNormalisation()(features)[1, :3].count_nonzero() == 0

    def test_a_bad_image_spoils_no_other(self):
        features = random_features(3)
        expected = GroupNormalisation()(features)
        features[1, 40, 0, 0] = math.nan
        found = GroupNormalisation()(features)
        assert torch.equal(found[[0, 2]], expected[[0, 2]])
        assert found[1].isnan().sum() == 3 * 49

    @pytest.mark.parametrize("shape", [(81, 1, 1), (81, 2, 2), (81, 7, 7), (243, 8, 8)])
    def test_place_and_neighbours_change_no_bit(self, shape):
        features = torch.rand(70, *shape, generator=torch.Generator().manual_seed(0)).half()
        together = GroupNormalisation()(features)
        for count in (1, 2, 3, 17, 64, 69):
            assert torch.equal(GroupNormalisation()(features[-count:]), together[-count:])

    def test_scaling_the_orders_moves_the_group_of_order_0_only(self):
        features = random_features(2) + 1e-2
        plain, scaled = GroupNormalisation()(features), GroupNormalisation(order_scale=0.25)(features)
        torch.testing.assert_close(plain[:, 3:], scaled[:, 3:], rtol=1e-2, atol=1e-2)
        assert (plain[:, :3] - scaled[:, :3]).abs().max() > 0.1

    @pytest.mark.parametrize(("groups", "channels"), [(10, 81), (81, 80)])
    def test_groups_must_divide_the_channels(self, groups, channels):
        with pytest.raises(InputError, match=f"{channels} channels"):
            GroupNormalisation(groups=groups)(random_features(1, channels))

    @pytest.mark.parametrize("constants", [{"groups": 0}, {"order_scale": 0.0}])
    def test_bad_constants(self, constants):
        with pytest.raises(InputError, match=next(iter(constants))):
            GroupNormalisation(**constants)


def test_scale_orders_leaves_order_0():
    features = torch.ones(2, 243, 1, 1)
    factors = scale_orders(features, 0.25)[0, :, 0, 0]
    assert factors[[0, 81, 162]].tolist() == [1.0, 1.0, 1.0]
    assert (factors == 0.25).sum() == 240
    assert features.min() == 1.0


@pytest.mark.parametrize("shape", [(81, 7, 7), (2, 80, 7, 7)])
def test_scale_orders_refuses_other_features(shape):
    with pytest.raises(InputError, match="not allowed"):
        scale_orders(torch.zeros(shape), 0.25)


class TestChannelNormalisation:
    def test_uses_the_statistics(self):
        features = random_features(400, 5)
        moments = {"mean": features.mean(dim=(0, 2, 3)), "mean_square": features.square().mean(dim=(0, 2, 3))}
        found = ChannelNormalisation(statistics=ChannelStatistics(**moments))(features)
        torch.testing.assert_close(found.mean(dim=(0, 2, 3)), torch.zeros(5), rtol=0, atol=1e-4)
        torch.testing.assert_close(found.var(dim=(0, 2, 3)), torch.ones(5), rtol=1e-3, atol=0)

    def test_a_channel_without_variance_becomes_0(self):
        statistics = ChannelStatistics(mean=torch.tensor([0.5, 0.5, 2.0]), mean_square=torch.tensor([0.5, 0.25, 1.0]))
        assert statistics.variance.tolist() == [0.25, 0.0, 0.0]
        found = ChannelNormalisation(statistics=statistics)(random_features(2, 3))
        assert found[:, 1:].count_nonzero() == 0
        assert found[:, 0].count_nonzero() > 0

    def test_an_empty_batch(self):
        statistics = ChannelStatistics(mean=torch.zeros(3), mean_square=torch.ones(3))
        assert ChannelNormalisation(statistics=statistics)(torch.zeros(0, 3, 7, 7)).shape == (0, 3, 7, 7)

    def test_refuses_other_channels(self):
        statistics = ChannelStatistics(mean=torch.zeros(3), mean_square=torch.ones(3))
        with pytest.raises(InputError, match="of 3 channels"):
            ChannelNormalisation(statistics=statistics)(random_features(1))
