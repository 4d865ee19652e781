from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice._base.errors import InputError
from sluice.features.synthetic.dead_leaves import dead_leaves


@settings(max_examples=6, deadline=None)
@given(height=st.integers(16, 64), width=st.integers(16, 64), channels=st.sampled_from([1, 3]))
def test_an_image_does_not_depend_on_how_many_there_are(height, width, channels):
    many = dead_leaves(4, height=height, width=width, channels=channels, seed=3)
    assert many.shape == (4, channels, height, width)
    assert many.dtype is torch.uint8
    assert torch.equal(dead_leaves(2, height=height, width=width, channels=channels, seed=3), many[:2])


def test_seeds_and_images_differ():
    first, second = (dead_leaves(3, height=32, width=32, channels=3, seed=seed) for seed in (0, 1))
    assert not torch.equal(first, second)
    assert len({image.numpy().tobytes() for image in (*first, *second)}) == 6


def test_they_resemble_photographs():
    """Channels are correlated, neighbours too, and the images fill the range of brightness."""
    images = dead_leaves(60, height=32, width=32, channels=3, seed=0).float() / 255
    red, green, _ = images.transpose(0, 1).flatten(1)
    assert torch.corrcoef(torch.stack([red, green]))[0, 1] > 0.7
    left, right = images[..., :-1].flatten(), images[..., 1:].flatten()
    assert torch.corrcoef(torch.stack([left, right]))[0, 1] > 0.7
    assert 0.3 < images.mean() < 0.7
    assert images.std() > 0.15
    assert (images.flatten(1).std(1) > 0.01).all()


@pytest.mark.parametrize("change", [{"height": 15}, {"width": 65}, {"channels": 2}, {"count": 0}])
def test_refusals(change):
    given = {"count": 1, "height": 16, "width": 16, "channels": 1} | change
    name, value = next(iter(change.items()))
    with pytest.raises(InputError, match=f"{name}={value}"):
        dead_leaves(given.pop("count"), seed=0, **given)
