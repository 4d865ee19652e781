"""Rows of several blocks: their norms, their independence of each other, their cache, and what a model sees."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from sluice._base.errors import InputError
from sluice.features.base import Constants, Extractor, ImageFeature, ImageShape
from sluice.features.building import image_feature, text_feature
from sluice.features.catalog import Block, blocks_of
from sluice.features.constants import constants, constants_path
from sluice.features.examples import RowExamples
from sluice.features.rows import BIAS_INPUT, RowFeatures, presented
from sluice.features.whitening import unit_rows

SHAPE = (1, 4, 4)


@dataclass(frozen=True, kw_only=True)
class Projection(ImageFeature):
    """A random projection: small, and like the real ones in every way that matters here."""

    width: int = 6
    keep: int = 6
    turned: bool = False

    kind: ClassVar[str] = "projection"
    finishing: ClassVar[frozenset[str]] = frozenset({"keep"})

    def require_shape(self, shape: ImageShape) -> None:
        if shape[0] != 1:
            raise self.refuse_shape(shape, "it must have one channel")

    def steps(self, shape: ImageShape) -> int:
        return 2

    def fit(self, shape: ImageShape, *, advance: Callable[[int], None]) -> dict[str, Tensor]:
        advance(2)
        return {"matrix": torch.randn(self.width, 16, generator=torch.Generator().manual_seed(3)).t()}

    def extractor(self, shape: ImageShape, constants: Constants) -> Extractor:
        return lambda images: (images.flatten(1).unsqueeze(2) * constants["matrix"]).sum(1)

    def finish(self, rows: Tensor, constants: Constants) -> Tensor:
        return unit_rows(rows[:, : self.keep])


@pytest.fixture
def features(tmp_path, monkeypatch) -> RowFeatures:
    monkeypatch.setenv("SLUICE_CACHE", str(tmp_path))
    blocks = [(1.0, Projection()), (0.5, Projection(keep=3))]
    built = tuple((weight, each, constants(each, SHAPE, show_progress=False)) for weight, each in blocks)
    return RowFeatures(expression="projection+0.5*projection:keep=3", shape=SHAPE, blocks=built)


def _images(count: int) -> Tensor:
    return torch.randint(1, 256, (count, *SHAPE), generator=torch.Generator().manual_seed(0)).to(torch.uint8)


def test_blocks_stand_side_by_side_with_their_weights(features: RowFeatures):
    rows = features.of_images(_images(5), show_progress=False).float()
    assert rows.shape == (5, 9)
    norms = [rows[:, part].norm(dim=1) for part in (slice(0, 6), slice(6, 9))]
    torch.testing.assert_close(norms[0] / norms[1], torch.full((5,), 2.0), atol=3e-3, rtol=0)
    torch.testing.assert_close(rows.norm(dim=1), torch.ones(5), atol=1e-3, rtol=0)


def test_a_row_does_not_depend_on_the_others(features: RowFeatures):
    images = _images(1500)
    rows = features.of_images(images, show_progress=False)
    alone = features.of_images(images[1400:1401], show_progress=False)
    assert torch.equal(rows[1400:1401], alone)


def test_the_cache_changes_nothing_and_is_shared_by_what_differs_in_the_last_step(features: RowFeatures, tmp_path):
    images = _images(7)
    first = features.of_images(images, show_progress=False)
    assert len(list((tmp_path / "features").iterdir())) == 1  # the blocks differ in `keep` alone
    assert torch.equal(first, features.of_images(images, show_progress=False))
    assert torch.equal(first, features.of_images(images, show_progress=False, cache=False))
    images[0, 0, 0, 0] ^= 1
    assert not torch.equal(first[0], features.of_images(images, show_progress=False)[0])


def test_bytes_and_fractions_of_255_are_the_same_image(features: RowFeatures):
    images = _images(3)
    assert torch.equal(features.of_images(images), features.of_images(images.float() / 255))


def test_no_images_give_no_rows(features: RowFeatures):
    assert features.of_images(_images(0)).shape == (0, 9)


def test_images_of_another_shape_are_refused(features: RowFeatures):
    with pytest.raises(InputError, match="must be"):
        features.of_images(torch.zeros(2, 1, 5, 4, dtype=torch.uint8))


def test_constants_are_built_once_and_again_if_the_file_is_cut_off(tmp_path, monkeypatch):
    monkeypatch.setenv("SLUICE_CACHE", str(tmp_path))
    feature = Projection()
    first = constants(feature, SHAPE, show_progress=False)
    assert first["matrix"].is_contiguous()  # as it is when it is read from the file
    path = constants_path(feature, SHAPE)
    content = path.read_bytes()
    monkeypatch.setattr(Projection, "fit", lambda *_, **__: pytest.fail("built twice"))
    assert torch.equal(constants(feature, SHAPE)["matrix"], first["matrix"])
    monkeypatch.undo()
    monkeypatch.setenv("SLUICE_CACHE", str(tmp_path))
    path.write_bytes(content[:50])
    constants(feature, SHAPE, show_progress=False)
    assert path.read_bytes() == content
    assert constants_path(Projection(width=5), SHAPE) != path
    assert constants_path(Projection(keep=5), SHAPE) == path


def test_a_feature_writes_its_options_as_a_user_would():
    assert Projection().written() == "projection"
    assert Projection(turned=True, width=3).written() == "projection:width=3,turned"


def test_what_a_model_sees_is_centred_of_norm_1_and_ends_in_a_constant():
    rows = unit_rows(torch.randn(1100, 8, generator=torch.Generator().manual_seed(1))).half()
    centre = torch.full((8,), 0.1)
    seen = presented(rows, centre)
    assert seen.shape == (1100, 9)
    expected = rows.double() - centre
    expected /= expected.norm(dim=1, keepdim=True)
    torch.testing.assert_close(seen[:, :-1].double(), expected, atol=1e-3, rtol=0)
    assert (seen[:, -1] == torch.tensor(BIAS_INPUT).half()).all()
    assert torch.equal(presented(rows[1050:1051], centre), seen[1050:1051])
    assert torch.equal(presented(rows, None)[:, :-1], rows)


def test_labelled_rows_keep_their_features_and_digests_in_subsets(features: RowFeatures):
    rows = features.of_images(_images(6))
    examples = RowExamples(rows, torch.arange(6), features, digests=[bytes([i]) for i in range(6)])
    assert examples.input_shape == (10,)
    chosen = examples.subset([4, 1])
    assert chosen.features is features
    assert chosen.digests() == [b"\4", b"\1"]
    x, y = chosen.batch([0])
    assert y.tolist() == [4]
    assert torch.equal(x[0, :-1], rows[4].float())
    assert torch.equal(examples.presented(None).batch([2])[0], examples.batch([2])[0].half().float())


def test_what_makes_no_rows_is_refused():
    with pytest.raises(InputError, match="makes no rows"):
        image_feature(Block(name="plain"))
    with pytest.raises(InputError, match="nothing to build"):
        image_feature(Block(name="scattering"))


def test_options_are_typed_as_their_fields_are():
    (block,) = blocks_of("weighted-words:vocabulary=300,end=2,negation=0")
    feature = text_feature(block)
    assert (feature.vocabulary, feature.end, feature.negation) == (300, 2.0, 0.0)
    assert isinstance(feature.end, float)
    with pytest.raises(InputError, match="vocabulary='many' is not allowed"):
        text_feature(Block(name="weighted-words", options={"vocabulary": "many"}))
    for constant in ("version=2", "kind=x", "finishing=x"):
        name = constant.partition("=")[0]
        with pytest.raises(InputError, match=rf"has no option {name}: it has (?!.*(version|kind|finishing))"):
            image_feature(blocks_of(f"patches:{constant}")[0])
    with pytest.raises(InputError, match=r"has no option colour: it has .*vocabulary"):
        text_feature(Block(name="weighted-words", options={"colour": True}))
