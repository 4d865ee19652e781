from __future__ import annotations

import pytest
import torch

from sluice._base.errors import InputError
from sluice.features.synthetic.silhouettes import Silhouettes, silhouettes


@pytest.mark.parametrize("size", [(16, 16), (28, 28), (24, 40), (64, 64)])
def test_images_are_shapes_on_black_in_any_size(size):
    images = silhouettes(40, height=size[0], width=size[1], seed=3)
    assert images.shape == (40, 1, *size)
    assert images.dtype == torch.float32
    assert images.isfinite().all()
    assert images.min() == 0.0
    assert images.max() <= 1.0
    assert 0.05 < images.mean() < 0.6


def test_a_seed_gives_the_same_bytes():
    first, again, other = (silhouettes(30, height=28, width=28, seed=seed) for seed in (5, 5, 6))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_most_shapes_fill_the_image_in_one_direction():
    seen = silhouettes(100, height=28, width=28, seed=1)[:, 0] > 0.05
    tall = seen.any(dim=2).sum(dim=1)
    wide = seen.any(dim=1).sum(dim=1)
    assert (torch.maximum(tall, wide) >= 26).float().mean() > 0.8


def test_many_shapes_are_their_own_mirror_image():
    seen = silhouettes(200, height=28, width=28, seed=2)[:, 0] > 0.05
    share = ((seen == seen.flip(2)).flatten(1).float().mean(dim=1) > 0.97).float().mean()
    assert 0.4 < share < 0.95


def test_images_of_one_shape_differ_but_resemble_each_other():
    source = Silhouettes(classes=40, height=28, width=28, seed=1)
    generator = torch.Generator().manual_seed(2)
    first, second = (source.draw(torch.arange(40), generator).flatten(1) for _ in range(2))
    distances = torch.cdist(first, second)
    other = distances.masked_fill(torch.eye(40, dtype=torch.bool), torch.inf).flatten()
    assert not torch.equal(first, second)
    assert first.min() >= 0.0
    assert first.max() <= 1.0
    assert distances.diagonal().median() < other[other.isfinite()].median() * 0.85


def test_classes_must_be_a_positive_integer():
    with pytest.raises(InputError, match="classes=0 is not allowed"):
        Silhouettes(classes=0, height=28, width=28, seed=1)
