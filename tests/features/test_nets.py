from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional

from sluice._base.errors import InputError
from sluice.features import nets, nets_training
from sluice.features.constants import constants
from sluice.features.nets import LeafNet, SilhouetteNet, StrokeNet
from sluice.features.nets_training import ConvolutionalNet, pretrained
from sluice.features.synthetic.pen_strokes import PenStrokes, pen_strokes

SHAPE = (1, 16, 16)
TINY = {"channels": 4, "classes": 5, "training_steps": 3}


@pytest.fixture(autouse=True)
def few_references(monkeypatch, tmp_path):
    monkeypatch.setattr(nets, "_REFERENCES", 50)
    monkeypatch.setattr(nets_training, "BATCH", 16)
    monkeypatch.setenv("SLUICE_CACHE", str(tmp_path))


@pytest.fixture(scope="module")
def images() -> torch.Tensor:
    return pen_strokes(200, height=16, width=16, seed=8)


def ignore(done: int) -> None:
    pass


@pytest.mark.parametrize(
    "feature",
    [
        StrokeNet(**TINY),
        StrokeNet(deskew=True, views=True, **TINY),
        SilhouetteNet(layer="map", **TINY),
        LeafNet(**TINY),
    ],
    ids=["plain", "views", "map", "leaves"],
)
class TestRows:
    def test_rows_have_norm_1(self, feature, images):
        rows = feature.extractor(SHAPE, constants(feature, SHAPE))(images)
        assert rows.shape == (200, 144 if feature.layer == "map" else 32)
        assert rows.dtype == torch.float32
        torch.testing.assert_close(rows.norm(dim=1), torch.ones(200))

    def test_a_row_does_not_depend_on_the_others(self, feature, images):
        extract = feature.extractor(SHAPE, constants(feature, SHAPE))
        rows = extract(images)
        for part in (slice(0, 1), slice(120, 135), slice(199, 200)):
            assert torch.equal(extract(images[part]), rows[part])
        assert torch.equal(extract(images.flip(0)), rows.flip(0))

    def test_bad_values_stay_in_their_image(self, feature, images):
        extract = feature.extractor(SHAPE, constants(feature, SHAPE))
        expected = extract(images[:3])
        bad = images[:3].clone()
        bad[1, 0, 4, 4] = math.nan
        found = extract(bad)
        assert torch.equal(found[[0, 2]], expected[[0, 2]])
        assert found.isfinite().all()


@pytest.mark.parametrize("kind", [StrokeNet, SilhouetteNet, LeafNet])
def test_a_machine_makes_the_same_bytes_each_time(kind):
    torch.manual_seed(4)
    first = kind(**TINY).fit(SHAPE, advance=ignore)
    torch.manual_seed(5)
    again = kind(**TINY).fit(SHAPE, advance=ignore)
    assert first.keys() == again.keys()
    assert all(torch.equal(first[name], again[name]) for name in first)


def test_another_seed_gives_another_net():
    first, other = (StrokeNet(seed=seed, **TINY).fit(SHAPE, advance=ignore) for seed in (0, 1))
    assert not torch.equal(first["first.weight"], other["first.weight"])


def test_training_leaves_the_random_numbers_of_others_alone():
    torch.manual_seed(4)
    expected = torch.rand(3)
    torch.manual_seed(4)
    StrokeNet(**TINY).fit(SHAPE, advance=ignore)
    assert torch.equal(torch.rand(3), expected)


def test_layers_and_views_share_one_net(monkeypatch):
    plain = StrokeNet(**TINY)
    expected = constants(plain, SHAPE)

    def fail(*args: object, **options: object) -> None:
        raise AssertionError("trained again")

    monkeypatch.setattr(nets, "pretrained", fail)
    for feature in (StrokeNet(layer="map", **TINY), StrokeNet(views=True, **TINY)):
        found = constants(feature, SHAPE)
        assert torch.equal(found["first.weight"], expected["first.weight"])
        assert found["mean"].shape != expected["mean"].shape or not torch.equal(found["mean"], expected["mean"])
    with pytest.raises(AssertionError, match="trained again"):
        constants(StrokeNet(deskew=True, **TINY), SHAPE)


def test_folded_weights_compute_what_the_net_does():
    net = ConvolutionalNet(channels=4, classes=5)
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        net(torch.rand(8, 1, 28, 28, generator=generator))
    net.eval()
    seen = {}
    net.embedding_norm.register_forward_hook(lambda module, given, result: seen.update(embedding=result))
    net.embedding.register_forward_pre_hook(lambda module, given: seen.update(map=given[0]))
    images = torch.rand(5, 1, 28, 28, generator=generator)
    with torch.no_grad():
        net(images)
        for layer in ("embedding", "map"):
            found = StrokeNet(layer=layer)._forward(net.folded(), images)
            torch.testing.assert_close(found, seen[layer], rtol=1e-4, atol=1e-5)


def test_the_net_learns_to_tell_strokes_apart():
    source = PenStrokes(classes=4, height=16, width=16, seed=0)
    steps = []
    weights = pretrained(source, channels=4, steps=60, seed=1, advance=steps.append)
    assert sum(steps) == 60
    generator = torch.Generator().manual_seed(3)
    labels = torch.arange(4).repeat(50)
    rows = functional.normalize(StrokeNet()._forward(weights, source.draw(labels, generator)))
    centres = functional.normalize(torch.stack([rows[:100][labels[:100] == each].mean(dim=0) for each in range(4)]))
    assert ((rows[100:] @ centres.T).argmax(dim=1) == labels[100:]).float().mean() > 0.7


@pytest.mark.parametrize("feature", [StrokeNet(**TINY), StrokeNet(views=True, **TINY)])
def test_steps_are_announced(feature):
    done = []
    feature.fit(SHAPE, advance=done.append)
    assert sum(done) == feature.steps(SHAPE)


@pytest.mark.parametrize("shape", [(3, 28, 28), (1, 15, 28), (1, 28, 65)])
def test_other_shapes_are_refused(shape):
    with pytest.raises(InputError, match="grey images of 16x16 to 64x64"):
        StrokeNet().require_shape(shape)


@pytest.mark.parametrize(
    "options", [{"layer": "scores"}, {"channels": 0}, {"classes": 1.5}, {"training_steps": -1}, {"seed": -1}]
)
def test_bad_options_are_refused(options):
    with pytest.raises(InputError, match="is not allowed"):
        StrokeNet(**options)


def test_written_as_a_user_would():
    assert StrokeNet(deskew=True, views=True).written() == "stroke-net:deskew,views"
    assert SilhouetteNet(layer="map").written() == "silhouette-net:layer=map"


def test_a_net_of_leaves_takes_colour_and_the_others_do_not():
    feature, shape = LeafNet(**TINY), (3, 20, 16)
    known = constants(feature, shape, show_progress=False)
    assert known["first.weight"].shape == (4, 3, 5, 5)
    rows = feature.extractor(shape, known)(torch.rand(3, *shape, generator=torch.Generator().manual_seed(0)))
    torch.testing.assert_close(rows.norm(dim=1), torch.ones(3))
    with pytest.raises(InputError, match="grey images"):
        constants(StrokeNet(**TINY), shape)
