from __future__ import annotations

import math

import pytest
import torch

from sluice._base.errors import InputError
from sluice.features.synthetic.pen_strokes import pen_strokes
from sluice.features.whitened import WhitenedScattering

SHAPE = (1, 16, 16)


def tiny(prior: str = "pen-strokes", *, deskew: bool = False) -> WhitenedScattering:
    return WhitenedScattering(prior=prior, deskew=deskew, references=40)


@pytest.fixture(scope="module")
def images() -> torch.Tensor:
    return pen_strokes(100, height=16, width=16, seed=8)


def ignore(done: int) -> None:
    pass


@pytest.mark.parametrize("feature", [tiny(), tiny("silhouettes", deskew=True)], ids=["plain", "deskewed"])
class TestRows:
    def test_a_machine_makes_the_same_bytes_each_time(self, feature, images):
        first, again = (feature.fit(SHAPE, advance=ignore) for _ in range(2))
        assert first.keys() == again.keys() == {"mean", "channels", "places"}
        assert all(torch.equal(first[name], again[name]) for name in first)

    def test_rows_have_norm_1(self, feature, images):
        rows = feature.extractor(SHAPE, feature.fit(SHAPE, advance=ignore))(images)
        assert rows.shape == (100, 81 * 16)
        assert rows.dtype == torch.float32
        torch.testing.assert_close(rows.norm(dim=1), torch.ones(100))

    def test_a_row_does_not_depend_on_the_others(self, feature, images):
        extract = feature.extractor(SHAPE, feature.fit(SHAPE, advance=ignore))
        rows = extract(images)
        for part in (slice(0, 1), slice(95, 100), slice(3, 50)):
            assert torch.equal(extract(images[part]), rows[part])
        assert torch.equal(extract(images.flip(0)), rows.flip(0))

    def test_bad_values_stay_in_their_image(self, feature, images):
        extract = feature.extractor(SHAPE, feature.fit(SHAPE, advance=ignore))
        expected = extract(images[:3])
        bad = images[:3].clone()
        bad[1, 0, 4, 4] = math.nan
        found = extract(bad)
        assert torch.equal(found[[0, 2]], expected[[0, 2]])
        assert found.isfinite().all()


def test_steps_are_announced():
    done = []
    feature = tiny()
    feature.fit(SHAPE, advance=done.append)
    assert sum(done) == feature.steps(SHAPE) == 40


def test_synthetic_rows_are_centred_and_vary_more_evenly(images):
    feature = WhitenedScattering(prior="pen-strokes", references=300)
    constants = feature.fit(SHAPE, advance=ignore)
    plain = {**constants, "channels": torch.eye(81), "places": torch.eye(16)}

    def concentration(rows: torch.Tensor) -> float:
        spectrum = torch.linalg.eigvalsh(torch.cov(rows.T.double()))
        return float(spectrum[-10:].sum() / spectrum.sum())

    rows = pen_strokes(300, height=16, width=16, seed=77)
    whitened, unwhitened = (feature.extractor(SHAPE, each)(rows) for each in (constants, plain))
    assert whitened.mean(dim=0).norm() < 0.2
    assert concentration(whitened) < 0.7 * concentration(unwhitened)


@pytest.mark.parametrize("shape", [(2, 28, 28), (1, 15, 28), (1, 28, 65)])
def test_other_shapes_are_refused(shape):
    with pytest.raises(InputError, match="16x16 to 64x64"):
        tiny().require_shape(shape)


def test_colour_needs_a_prior_in_colour():
    with pytest.raises(InputError, match="use prior=dead-leaves"):
        tiny().require_shape((3, 32, 32))
    tiny("dead-leaves").require_shape((3, 32, 32))


def test_bad_options_are_refused():
    with pytest.raises(InputError, match="prior='photographs' is not allowed"):
        tiny("photographs")
    with pytest.raises(InputError, match="references=0 is not allowed"):
        WhitenedScattering(references=0)


def test_written_as_a_user_would():
    assert tiny(deskew=True).written() == "whitened-scattering:prior=pen-strokes,deskew,references=40"
