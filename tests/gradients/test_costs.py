from __future__ import annotations

import math

import pytest
from scipy.stats import poisson

from sluice.gradients import costs
from sluice.gradients.layers.correlation import Geometry


def square(channels: int, size: int, out: int, *, groups: int = 1) -> Geometry:
    return Geometry(
        kernel=(3, 3),
        stride=(1, 1),
        dilation=(1, 1),
        padding=(1, 1),
        groups=groups,
        image=(size, size),
        maps=(size, size),
        image_channels=channels,
        map_channels=out,
    )


def test_small_maps_with_many_channels_use_pixel_gram_matrices():
    assert costs.kernel_for(square(243, 8, 64), then_sum=True) == "pixel_gram"
    assert costs.kernel_for(square(243, 8, 64), then_sum=False) == "pixel_gram"


def test_large_maps_form_gradients():
    assert costs.kernel_for(square(32, 32, 32), then_sum=True) == "explicit"
    assert costs.kernel_for(square(32, 32, 32), then_sum=False) == "explicit"


def test_grouped_convolutions_form_gradients():
    assert costs.kernel_for(square(240, 8, 64, groups=8), then_sum=True) == "explicit"


@pytest.mark.parametrize(("each", "expected"), [(1, 256), (29_000, 256), (91_000, 128), (760_000, 64), (10**9, 64)])
def test_chunks_have_64_to_256_samples(each, expected):
    assert costs.chunk_size(each, sequential=False) == expected


def test_recurrent_models_get_large_chunks():
    assert costs.chunk_size(760_000, sequential=True) == 256


@pytest.mark.parametrize(
    ("each", "expected"), [(1, 1152), (15_900, 1152), (20_400, 1027), (50_000, 418), (91_000, 128), (10**9, 64)]
)
def test_quick_layers_get_larger_chunks(each, expected):
    assert costs.chunk_size(each, sequential=False, most=1152) == expected
    assert costs.chunk_size(each, sequential=True, most=1152) == 256


@pytest.mark.parametrize(("samples", "rows"), [(1, 1), (256, 256), (257, 129), (1024, 256), (1025, 205)])
def test_chunks_are_cut_evenly(samples, rows):
    assert costs.even_rows(samples, most=256) == rows


@pytest.mark.parametrize(("largest", "expected"), [(1, 64), (500_000, 64), (1_024_000, 32), (10**9, 16)])
def test_chunks_have_no_tensor_that_allocators_give_back(largest, expected):
    assert costs.chunk_size(3_000_000, sequential=False, largest_bytes=largest) == expected


def test_chunks_of_many_calls_have_more_rows():
    """Four convolutions over a signal with their normalisations, and as much memory in a single layer."""
    rows = [costs.fixed_rows(64, most=64, overhead=costs.overhead_rows(681_000, steps=steps)) for steps in (1, 9)]
    assert rows == [16, 24]


@pytest.mark.parametrize(("expected", "overhead"), [(3, 1.0), (64, 1.5), (64, 40.0), (256, 1.5), (1000.5, 8.0)])
def test_fixed_chunks_cost_least(expected, overhead):
    """Against Poisson batches, enumerated."""

    def cost(rows: int) -> float:
        sizes = range(int(expected + 12 * expected**0.5) + 20)
        return sum(poisson.pmf(n, expected) * max(1, -(-n // rows)) * (rows + overhead) for n in sizes)

    chosen = costs.fixed_rows(expected, most=256, overhead=overhead)
    assert cost(chosen) <= 1.03 * min(cost(rows) for rows in range(8, 257, 8))


def test_fixed_chunks_know_their_bounds():
    assert costs.fixed_rows(math.inf, most=64) == 64
    assert costs.fixed_rows(1e7, most=100) == 100
    assert costs.fixed_rows(500, most=5) == 5
