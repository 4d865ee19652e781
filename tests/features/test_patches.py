from __future__ import annotations

from functools import cache

import pytest
import torch
from torch.nn import functional

from sluice._base.errors import InputError
from sluice.features.constants import constants
from sluice.features.native import patches as native
from sluice.features.patch_blocks import blocks_of
from sluice.features.patches import Patches
from sluice.features.synthetic.dead_leaves import dead_leaves

TINY = Patches(dictionary=16, images=48, components=32, dimensions=24)
SHAPES = [(3, 32, 32), (1, 28, 28), (3, 16, 21), (1, 64, 49)]


@pytest.fixture(params=["in C", "by products"])
def way(request, monkeypatch):
    """With the kernels, where they can be built, and without them."""
    if request.param == "by products":
        monkeypatch.setattr("sluice.features.patch_extractor.library", lambda: None)
    elif native.library() is None:
        pytest.skip("no C compiler was found")
    return request.param


@cache
def fitted(shape):
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return TINY.fit(shape, advance=lambda _: None)
    finally:
        torch.set_num_threads(before)


@cache
def some_images(shape):
    channels, height, width = shape
    return dead_leaves(30, height=height, width=width, channels=channels, seed=7).float() / 255


def oracle(images, made):
    """Rows in float64, block by block, with unfold, dictionaries written out with their mirror images, and no shortcut."""
    reduced = []
    for block in blocks_of(images.shape[1], dictionary=TINY.dictionary):
        prepared = block.prepare(images.double())
        whitening, atoms = (made[f"{block.name}.{name}"].double() for name in ("whitening", "atoms"))
        signs = torch.ones(atoms.shape[1], dtype=torch.float64)
        signs[int(made[f"{block.name}.even"]) :] = -1
        both = [_responses(block, prepared, whitening, each) for each in (atoms, atoms * signs)]
        grids = [each.view(len(images), block.grid, block.grid, 2, -1) for each in both]
        cells = (grids[0] + grids[1].flip(2)).sqrt().reshape(len(images), block.cells, -1)
        scaled = cells * made[f"{block.name}.scale"].double()
        reduced.append((scaled @ made[f"{block.name}.components"].double()).flatten(1))
    return torch.cat(reduced, 1) @ made["joint"].double() - made["offset"].double()


def _responses(block, prepared, whitening, atoms):
    reach = (block.patch - 1) * block.spacing + 1
    stride = [1 if (side - reach) % block.stride else block.stride for side in prepared.shape[2:]]
    unfolded = functional.unfold(prepared, block.patch, dilation=block.spacing, stride=tuple(stride)).transpose(1, 2)
    if block.contrast:
        centred = unfolded - unfolded.mean(2, keepdim=True)
        unfolded = centred / (centred.square().mean(2, keepdim=True) + 10 / 255**2).sqrt()
    else:
        unfolded = (unfolded - 0.45) / 0.25
    white = unfolded @ whitening
    white = white / (white.square().sum(2, keepdim=True) + block.norm_floor * whitening.shape[1]).sqrt()
    signal = white @ atoms.T
    sides = [(side - reach) // step + 1 for side, step in zip(prepared.shape[2:], stride, strict=True)]
    both = torch.stack([(signal - block.threshold).relu(), (-signal - block.threshold).relu()], 2)
    maps = both.view(len(prepared), *sides, 2, -1)
    found = []
    for row in range(block.grid):
        for column in range(block.grid):
            at = [
                [i for i in range(side) if cell / block.grid <= (i + 0.5) / side <= (cell + 1) / block.grid]
                for cell, side in zip((row, column), sides, strict=True)
            ]
            found.append(maps[:, at[0]][:, :, at[1]].mean((1, 2)))
    return torch.stack(found, 1)


@pytest.mark.parametrize("shape", SHAPES)
def test_rows_are_those_of_the_definition(shape, way):
    images, made = some_images(shape)[:5], fitted(shape)
    rows = TINY.extractor(shape, made)(images)
    torch.testing.assert_close(rows.double(), oracle(images, made), rtol=0, atol=3e-4)
    finished = TINY.finish(rows, made)
    torch.testing.assert_close(finished, TINY.finish(oracle(images, made).float(), made), rtol=0, atol=1e-5)


def test_the_kernel_agrees_with_matrix_products(monkeypatch):
    if native.library() is None:
        pytest.skip("no C compiler was found")
    images, made = some_images((3, 32, 32)), fitted((3, 32, 32))
    in_c = TINY.finish(TINY.extractor((3, 32, 32), made)(images), made)
    monkeypatch.setattr("sluice.features.patch_extractor.library", lambda: None)
    by_products = TINY.finish(TINY.extractor((3, 32, 32), made)(images), made)
    torch.testing.assert_close(in_c, by_products, rtol=0, atol=1e-5)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_row_is_a_function_of_its_image_bit_for_bit(shape, way):
    images, made = some_images(shape)[: 30 if way == "in C" else 6], fitted(shape)
    extract = TINY.extractor(shape, made)
    expected = extract(images)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    assert torch.equal(extract(images[order]), expected[order])
    for first, last in ((0, 1), (3, 6), (2, 27), (25, 30)):
        assert torch.equal(extract(images[first:last]), expected[first:last])
    assert torch.equal(TINY.finish(expected, made)[3:4], TINY.finish(expected[3:4], made))


def test_threads_and_large_batches_change_no_bit():
    if native.library() is None:
        pytest.skip("no C compiler was found")
    shape = (1, 28, 28)
    extract, images = TINY.extractor(shape, fitted(shape)), some_images(shape)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        expected = extract(images)
        torch.set_num_threads(3)
        assert torch.equal(extract(images.repeat(20, 1, 1, 1)), expected.repeat(20, 1))
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("shape", SHAPES)
def test_mirror_images_have_the_same_row(shape, way):
    images, made = some_images(shape)[:8], fitted(shape)
    extract = TINY.extractor(shape, made)
    rows, mirrored = (TINY.finish(extract(each), made) for each in (images, images.flip(3)))
    torch.testing.assert_close(mirrored, rows, rtol=0, atol=1e-5)
    other = TINY.finish(extract(images.flip(2)), made)
    assert (other - rows).abs().max() > 1e-2


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_bad_image_spoils_no_other(bad, way):
    shape = (3, 32, 32)
    extract, images = TINY.extractor(shape, fitted(shape)), some_images(shape)[:6].clone()
    expected = extract(images)
    images[4, 0, 5, 5] = bad
    found = extract(images)
    kept = [index for index in range(len(images)) if index != 4]
    assert found[4].isnan().all()
    assert torch.equal(found[kept], expected[kept])


def test_a_constant_image_and_no_image(way):
    shape = (3, 32, 32)
    made = fitted(shape)
    extract = TINY.extractor(shape, made)
    grey = TINY.finish(extract(torch.full((1, *shape), 0.5)), made)
    assert grey.isfinite().all()
    assert extract(torch.zeros(0, *shape)).shape == (0, len(made["variances"]))


def test_constants_are_the_same_bytes_each_time_and_need_no_data(monkeypatch):
    monkeypatch.setattr("sluice.data.loading.load", None)
    shape = (1, 28, 28)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        again = TINY.fit(shape, advance=lambda _: None)
    finally:
        torch.set_num_threads(before)
    assert again.keys() == fitted(shape).keys()
    assert all(torch.equal(again[name], value) for name, value in fitted(shape).items())


def test_steps_are_counted(tmp_path, monkeypatch):
    monkeypatch.setenv("SLUICE_CACHE", str(tmp_path))
    counted = []
    TINY.fit((1, 16, 16), advance=counted.append)
    assert sum(counted) == TINY.steps((1, 16, 16))
    made = constants(TINY, (1, 16, 16), show_progress=False)
    kept = constants(TINY, (1, 16, 16), show_progress=False)
    assert all(torch.equal(made[name], kept[name]) for name in made)


def test_components_have_variance_1_over_synthetic_images_and_are_ordered():
    shape = (3, 32, 32)
    made = fitted(shape)
    synthetic = dead_leaves(TINY.images, height=32, width=32, channels=3, seed=0).float() / 255
    rows = TINY.extractor(shape, made)(synthetic)
    torch.testing.assert_close(rows.mean(0), torch.zeros(rows.shape[1]), rtol=0, atol=1e-3)
    torch.testing.assert_close(rows.square().mean(0), torch.ones(rows.shape[1]), rtol=1e-2, atol=0)
    assert (made["variances"].diff() <= 0).all()


def test_finish_keeps_components_and_whitens_them_partly():
    made = fitted((1, 28, 28))
    rows = torch.randn(7, len(made["variances"]), generator=torch.Generator().manual_seed(0))
    variances = made["variances"].double()
    for feature in (TINY, Patches(dictionary=16, images=48, components=32, dimensions=5, ridge=0.1)):
        kept = rows[:, : feature.dimensions].double() * variances[: feature.dimensions].sqrt()
        kept *= (variances / variances.sum() + feature.ridge)[: feature.dimensions] ** -0.5
        expected = kept / kept.norm(dim=1, keepdim=True)
        torch.testing.assert_close(feature.finish(rows, made).double(), expected, rtol=1e-5, atol=1e-7)


def test_options_of_finishing_share_constants():
    assert TINY.identity() == Patches(dictionary=16, images=48, components=32, dimensions=7, ridge=0.5).identity()
    assert TINY.identity() != Patches(dictionary=24, images=48, components=32, dimensions=24).identity()
    assert Patches(dimensions=1536).written() == "patches:dimensions=1536"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dictionary": 20}, "dictionary=20"),
        ({"dictionary": 8}, "dictionary=8"),
        ({"dimensions": 100, "components": 50}, "dimensions=100"),
        ({"ridge": 0}, "ridge=0"),
        ({"images": 0}, "images=0"),
    ],
)
def test_options_that_are_refused(options, message):
    with pytest.raises(InputError, match=message):
        Patches(**options)


@pytest.mark.parametrize("shape", [(2, 32, 32), (1, 15, 28), (3, 32, 65)])
def test_shapes_that_are_refused(shape):
    with pytest.raises(InputError, match="features='patches' is not allowed for images of shape"):
        TINY.require_shape(shape)


def test_images_that_are_refused():
    extract = TINY.extractor((1, 28, 28), fitted((1, 28, 28)))
    with pytest.raises(InputError, match=r"torch\.uint8"):
        extract(torch.zeros(1, 1, 28, 28, dtype=torch.uint8))
    with pytest.raises(InputError, match=r"shape \(n, 1, 28, 28\)"):
        extract(torch.zeros(1, 28, 28))


def test_a_dictionary_larger_than_the_patches_is_refused():
    with pytest.raises(InputError, match="images=4 is not allowed for a dictionary of 512 pairs"):
        Patches(dictionary=1024, images=4).fit((1, 16, 16), advance=lambda _: None)
