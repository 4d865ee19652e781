from __future__ import annotations

import pytest
import torch

from sluice._base.errors import InputError
from sluice.features.deskew import deskew
from sluice.features.synthetic.pen_strokes import PenStrokes, pen_strokes


@pytest.mark.parametrize("size", [(16, 16), (28, 28), (24, 40), (64, 64)])
def test_images_are_lines_on_black_in_any_size(size):
    images = pen_strokes(20, height=size[0], width=size[1], seed=3)
    assert images.shape == (20, 1, *size)
    assert images.dtype == torch.float32
    assert images.min() == 0.0
    assert images.max() <= 1.0
    assert images.flatten(1).amax(dim=1).min() > 0.5, "every image shows something bright"
    assert 0.02 < images.mean() < 0.3, "and is black for the most part"


def test_a_seed_gives_the_same_bytes():
    first, again, other = (pen_strokes(30, height=28, width=28, seed=seed) for seed in (5, 5, 6))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_images_of_one_glyph_resemble_each_other_more_than_those_of_two():
    source = PenStrokes(classes=40, height=28, width=28, seed=1)
    generator = torch.Generator().manual_seed(2)
    first, second = (source.draw(torch.arange(40), generator).flatten(1) for _ in range(2))
    distances = torch.cdist(first, second)
    other = distances.masked_fill(torch.eye(40, dtype=torch.bool), torch.inf).flatten()
    assert not torch.equal(first, second)
    assert distances.diagonal().median() < other[other.isfinite()].median() * 0.85


def test_upright_strokes_need_little_deskewing():
    def moved(upright: bool) -> float:
        images = pen_strokes(100, height=28, width=28, seed=4, upright=upright)
        return float((deskew(images) - images).abs().sum(dim=(1, 2, 3)).median())

    assert moved(True) < 0.7 * moved(False)


def test_classes_must_be_a_positive_integer():
    with pytest.raises(InputError, match="classes=0 is not allowed"):
        PenStrokes(classes=0, height=28, width=28, seed=1)
