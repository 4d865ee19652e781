"""Views of scenes of dead leaves."""

from __future__ import annotations

import torch

from sluice.features.synthetic.leaf_scenes import LeafScenes


def scenes(**changed: int) -> LeafScenes:
    return LeafScenes(**{"classes": 6, "channels": 3, "height": 20, "width": 16, "seed": 1, **changed})


def test_views_of_a_scene_differ_and_are_repeated_by_the_seeds():
    labels = torch.tensor([0, 0, 5])
    first, again = (scenes().draw(labels, torch.Generator().manual_seed(2)) for _ in range(2))
    assert first.shape == (3, 3, 20, 16)
    assert 0 <= first.min() <= first.max() <= 1
    assert torch.equal(first, again)
    assert not torch.allclose(first[0], first[1], atol=0.05)
    assert not torch.equal(first, scenes(seed=2).draw(labels, torch.Generator().manual_seed(2)))


def test_views_of_one_scene_are_more_alike_than_those_of_two():
    generator = torch.Generator().manual_seed(3)
    source = scenes(classes=8, channels=1)
    labels = torch.arange(8).repeat_interleave(40)
    means = source.draw(labels, generator).flatten(1).mean(1).view(8, 40)
    assert means.mean(1).std() > means.std(1).mean() / 2


def test_grey_scenes_have_one_channel():
    assert scenes(channels=1).draw(torch.tensor([1]), torch.Generator()).shape == (1, 1, 20, 16)
