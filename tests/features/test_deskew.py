from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice._base.errors import InputError
from sluice.features.deskew import STEEPEST, clean, deskew, rotate


def bar(slope: float, *, size: int = 28, shift: tuple[int, int] = (0, 0)) -> torch.Tensor:
    """A soft line through the middle, ``slope`` pixels to the side for each pixel down."""
    middle = (size - 1) / 2
    down = torch.arange(size)[:, None] - middle - shift[0]
    across = torch.arange(size)[None, :] - middle - shift[1]
    line = torch.exp(-((across - slope * down) ** 2) / 4) * (down.abs() < size / 3.5)
    return line[None, None].float()


def random_images(count: int, *, seed: int = 0, size: int = 28) -> torch.Tensor:
    return torch.rand(count, 1, size, size, generator=torch.Generator().manual_seed(seed)) ** 4


class TestDeskew:
    @pytest.mark.parametrize("slope", [-0.6, -0.25, 0.0, 0.4, 0.7])
    def test_a_slanted_bar_stands_upright(self, slope):
        torch.testing.assert_close(deskew(bar(slope)), bar(0.0), rtol=0, atol=0.12)
        if abs(slope) > 0.2:
            assert (bar(slope) - bar(0.0)).abs().max() > 0.5

    def test_the_centre_of_mass_moves_to_the_middle(self):
        torch.testing.assert_close(deskew(bar(0.3, shift=(-3, 4))), deskew(bar(0.3)), rtol=0, atol=1e-4)

    def test_a_second_time_changes_hardly_anything(self):
        once = deskew(bar(0.5))
        torch.testing.assert_close(deskew(once), once, rtol=0, atol=0.05)

    def test_the_shear_is_limited(self):
        steep = bar(2.0, size=40)
        assert (deskew(steep) - bar(2.0 - STEEPEST, size=40)).abs().mean() < (
            deskew(steep) - bar(0.0, size=40)
        ).abs().mean()

    @pytest.mark.parametrize("value", [0.0, 1e-9])
    def test_an_image_without_mass_stays_as_it_is(self, value):
        image = torch.full((1, 1, 28, 28), value)
        assert torch.equal(deskew(image), image)

    def test_a_constant_image_stays_as_it_is(self):
        image = torch.full((1, 1, 28, 28), 0.5)
        torch.testing.assert_close(deskew(image), image)

    def test_a_single_row_is_not_sheared(self):
        image = torch.zeros(1, 1, 28, 28)
        image[0, 0, 10, 5:20] = 1.0
        found = deskew(image)[0, 0]
        torch.testing.assert_close(found.sum(), torch.tensor(15.0))
        assert (found.sum(dim=1) > 1e-4).sum() == 2

    @pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e30])
    def test_bad_values_stay_in_their_image(self, bad):
        images = random_images(3)
        expected = deskew(images)
        images[1, 0, 3, 3] = bad
        found = deskew(images)
        assert torch.equal(found[[0, 2]], expected[[0, 2]])
        assert found.isfinite().all()
        assert found.min() >= 0
        assert found.max() <= 1

    @given(count=st.integers(1, 70), place=st.integers(0, 69), channels=st.sampled_from([1, 3]))
    @settings(max_examples=15, deadline=None)
    def test_an_image_does_not_depend_on_the_others(self, count, place, channels):
        image = random_images(channels, seed=9).view(1, channels, 28, 28)
        others = random_images(count * channels, seed=count).view(count, channels, 28, 28)
        place = min(place, count)
        batch = torch.cat([others[:place], image, others[place:]])
        assert torch.equal(deskew(batch)[place], deskew(image)[0])
        assert torch.equal(rotate(batch, 7.0)[place], rotate(image, 7.0)[0])

    def test_no_images(self):
        assert deskew(torch.zeros(0, 1, 28, 28)).shape == (0, 1, 28, 28)

    @pytest.mark.parametrize("images", [torch.zeros(28, 28), torch.zeros(1, 1, 28, 28, dtype=torch.uint8)])
    def test_other_tensors_are_refused(self, images):
        with pytest.raises(InputError, match="are not allowed: they must be floating-point"):
            deskew(images)


class TestRotate:
    def test_a_quarter_turn_is_exact(self):
        images = random_images(2)
        torch.testing.assert_close(rotate(images, 90.0), images.rot90(1, dims=(2, 3)), rtol=0, atol=1e-5)

    def test_no_turn(self):
        images = random_images(2)
        assert torch.equal(rotate(images, 0.0), images)

    def test_there_and_back(self):
        image = bar(0.2)
        torch.testing.assert_close(rotate(rotate(image, 9.0), -9.0), image, rtol=0, atol=0.3)


def test_clean_leaves_good_images_alone():
    images = random_images(2)
    assert torch.equal(clean(images), images)
    bad = torch.tensor([math.nan, math.inf, -math.inf, 2.0, -1.0]).view(1, 1, 1, 5)
    assert clean(bad).flatten().tolist() == [0.0, 1.0, 0.0, 1.0, 0.0]
