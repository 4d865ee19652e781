from __future__ import annotations

import copy
import math
import os
import shutil
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from sluice._base.errors import InputError
from sluice.data.transforms import standardised, to_float
from sluice.features import COEFFICIENTS, Scattering
from sluice.features.filters import wavelet_spectra
from sluice.features.native import kernels

SIZES = [(28, 28), (32, 32), (4, 4), (5, 9), (29, 30), (31, 16), (64, 48)]


@pytest.fixture(autouse=True, params=["in C", "by products"])
def way(request, monkeypatch):
    """Every test is made with the kernel, where it can be built, and without it."""
    if request.param == "by products":
        monkeypatch.setattr("sluice.features.scattering.library", lambda: None)
    elif kernels.library() is None:
        pytest.skip("no C compiler was found")
    return request.param


def test_the_kernel_is_built_wherever_there_is_a_compiler():
    compilers = (os.environ.get("CC") or "cc", "gcc", "clang")
    found = any(map(shutil.which, compilers)) and os.environ.get("SLUICE_NATIVE") != "0"
    assert (kernels.library() is not None) == found


def random_images(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=dtype)


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest error of a coefficient, in units of the largest value of its channel in any image."""
    scale = expected.abs().amax(dim=(0, 2, 3), keepdim=True)
    return float(((found - expected).abs() / scale).max())


class TestAgainstKymatio:
    @pytest.mark.parametrize(("height", "width"), SIZES)
    def test_random_images(self, kymatio_scattering, height, width):
        images = random_images(6, height, width)
        found = Scattering(height=height, width=width)(images)
        expected = kymatio_scattering(images)
        assert found.shape == expected.shape == (6, COEFFICIENTS, height // 4, width // 4)
        assert relative_error(found, expected) < 1e-5

    @pytest.mark.parametrize("offset", [-0.5, -100.0])
    def test_images_of_either_sign_and_any_level(self, kymatio_scattering, offset):
        images = random_images(3, 28, 28) + offset
        # Against a large level, the wavelet coefficients of both are differences of large numbers.
        tolerance = 1e-5 * max(1.0, abs(offset))
        assert relative_error(Scattering(height=28, width=28)(images), kymatio_scattering(images)) < tolerance

    def test_digits(self, kymatio_scattering, digit_images):
        found = Scattering(height=28, width=28)(digit_images)
        assert relative_error(found, kymatio_scattering(digit_images)) < 1e-5

    @pytest.mark.bigdata
    def test_mnist(self, kymatio_scattering, mnist_images):
        images = to_float(mnist_images)
        assert relative_error(Scattering(height=28, width=28)(images), kymatio_scattering(images)) < 1e-5

    @pytest.mark.bigdata
    @pytest.mark.parametrize("scaling", [to_float, standardised], ids=["0..1", "standardised"])
    def test_cifar(self, kymatio_scattering, cifar_images, scaling):
        images = scaling(cifar_images)
        found = Scattering(height=32, width=32)(images)
        assert found.shape == (32, 243, 8, 8)
        assert relative_error(found, kymatio_scattering(images).flatten(1, 2)) < 1e-5

    def test_each_value_by_itself_on_random_images(self, kymatio_scattering):
        images = random_images(8, 28, 28)
        found = Scattering(height=28, width=28)(images)
        torch.testing.assert_close(found, kymatio_scattering(images), rtol=1e-5, atol=1e-8)


def test_agrees_with_convolutions_written_out():
    """An oracle that shares nothing with the fast path but the wavelets: plain FFTs in double precision."""
    images = random_images(2, 14, 18, dtype=torch.float64)
    padded = np.pad(images.numpy(), ((0, 0), (3, 3), (3, 3)), mode="reflect")
    shape = (20, 24)
    assert padded.shape == (2, *shape)
    fine, coarse = (wavelet_spectra(*shape, scale=scale) for scale in (0, 1))

    def modulus(signals: np.ndarray, spectra: np.ndarray, step: int) -> np.ndarray:
        waves = np.fft.ifft2(np.fft.fft2(signals)[:, None] * spectra)
        return np.abs(waves)[:, :, ::step, ::step]

    found = Scattering(height=14, width=18, dtype=torch.float64)
    coefficients = found(images).numpy()
    first = modulus(padded, fine, 1)
    second = np.stack([modulus(first[:, angle], coarse, 2) for angle in range(8)], axis=1).reshape(2, 64, 10, 12)

    def average(signals: np.ndarray, rows: torch.Tensor, columns: torch.Tensor) -> np.ndarray:
        return np.einsum("ir,bcrs,js->bcij", rows.numpy(), signals, columns.numpy())

    low = found.average_fine
    np.testing.assert_allclose(coefficients[:, :1], average(padded[:, None], low.rows, low.columns), atol=1e-14)
    np.testing.assert_allclose(coefficients[:, 1:9], average(first, low.rows, low.columns), atol=1e-14)
    low = found.average_coarse
    np.testing.assert_allclose(
        coefficients[:, 9:17], average(modulus(padded, coarse, 2), low.rows, low.columns), atol=1e-14
    )
    np.testing.assert_allclose(coefficients[:, 17:], average(second, low.rows, low.columns), atol=1e-14)


@pytest.mark.parametrize(("height", "width"), SIZES)
def test_single_precision_follows_double(height, width):
    images = random_images(4, height, width, dtype=torch.float64)
    exact = Scattering(height=height, width=width, dtype=torch.float64)(images)
    single = Scattering(height=height, width=width)(images.float())
    assert single.dtype == torch.float32
    assert exact.dtype == torch.float64
    assert relative_error(single.double(), exact) < 5e-6


@pytest.mark.parametrize(("height", "width"), SIZES)
def test_the_kernel_agrees_with_products(way, height, width):
    if way == "by products":
        pytest.skip("nothing to compare")
    transform, images = Scattering(height=height, width=width), random_images(37, height, width)
    products = torch.empty(37, COEFFICIENTS, height // 4, width // 4)
    with torch.no_grad():
        transform._by_products(images, products)
    assert not torch.equal(transform(images), products)  # it is the kernel that was called
    assert relative_error(transform(images), products) < 3e-6


def test_the_kernel_refuses_what_it_cannot_read(way):
    if way == "by products":
        pytest.skip("nothing to refuse")
    call = Scattering(height=8, width=8)._in_c
    planes, out = torch.zeros(3, 8, 8), torch.zeros(3, COEFFICIENTS, 2, 2)
    call(planes, into=out)
    for wrong in (planes.double(), torch.zeros(3, 8, 9), torch.zeros(8, 8, 3).permute(2, 0, 1), torch.zeros(4, 8, 8)):
        with pytest.raises(AssertionError, match="compiled kernel"):
            call(wrong, into=out)
    for wrong in (out.double(), out[:, :80], torch.zeros(3, COEFFICIENTS, 2, 3)):
        with pytest.raises(AssertionError, match="compiled kernel"):
            call(planes, into=wrong)


class TestBatches:
    transform = Scattering(height=28, width=28)

    @pytest.mark.parametrize("count", [0, 1, 7])
    def test_shapes(self, count):
        assert self.transform(torch.zeros(count, 28, 28)).shape == (count, 81, 7, 7)
        assert self.transform(torch.zeros(count, 1, 28, 28)).shape == (count, 81, 7, 7)
        assert self.transform(torch.zeros(count, 3, 28, 28)).shape == (count, 243, 7, 7)
        assert self.transform(torch.zeros(2, 3, count, 28, 28)).shape == (2, 3, count, 81, 7, 7)
        assert self.transform(torch.zeros(28, 28)).shape == (81, 7, 7)

    def test_channels_are_transformed_one_after_the_other(self):
        images = random_images(2, 3, 28, 28)
        together = self.transform(images).view(2, 3, 81, 7, 7)
        for channel in range(3):
            assert torch.equal(together[:, channel], self.transform(images[:, channel]))

    def test_an_image_is_transformed_alike_in_any_batch(self):
        images = random_images(150, 28, 28)
        expected = self.transform(images)
        order = torch.randperm(150, generator=torch.Generator().manual_seed(0))
        assert torch.equal(self.transform(images[order]), expected[order])
        for count in (1, 7, 63, 65):
            assert torch.equal(self.transform(images[:count]), expected[:count])

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    @pytest.mark.parametrize(("height", "width"), [(4, 4), (5, 9), (8, 8), (29, 30), (32, 32)])
    def test_place_and_neighbours_change_no_bit(self, height, width, dtype):
        transform = Scattering(height=height, width=width, dtype=dtype)
        images = random_images(100, height, width, dtype=dtype)
        alone = transform(images[:1])
        for place, count in [(0, 2), (14, 15), (15, 16), (30, 31), (63, 64), (79, 80), (95, 96), (96, 97), (3, 100)]:
            others = images[torch.randperm(100, generator=torch.Generator().manual_seed(place))][:count].clone()
            others[place] = images[0]
            assert torch.equal(transform(others)[place], alone[0])

    @pytest.mark.parametrize("chunk_size", [1, 5, 64, 1000])
    def test_chunks_do_not_matter(self, chunk_size):
        images = random_images(70, 28, 28)
        chunked = Scattering(height=28, width=28, chunk_size=chunk_size)(images)
        torch.testing.assert_close(chunked, self.transform(images), rtol=1e-5, atol=1e-7)

    def test_threads_do_not_matter_and_their_number_is_put_back(self):
        images = random_images(130, 28, 28)
        expected = self.transform(images)
        before = torch.get_num_threads()
        torch.set_num_threads(3)
        try:
            assert torch.equal(self.transform(images), expected)
            with ThreadPoolExecutor(1) as pool:
                assert [torch.get_num_threads(), pool.submit(torch.get_num_threads).result()] == [3, 3]
        finally:
            torch.set_num_threads(before)

    def test_memory_layout_does_not_matter(self):
        images = random_images(28, 28, 9).permute(2, 1, 0)
        assert torch.equal(self.transform(images), self.transform(images.contiguous()))

    @pytest.mark.parametrize("bad", [math.nan, math.inf])
    def test_a_bad_image_spoils_no_other(self, bad):
        images = random_images(5, 28, 28)
        expected = self.transform(images)
        images[2, 3, 4] = bad
        found = self.transform(images)
        assert found[2].isnan().any()
        kept = [0, 1, 3, 4]
        assert torch.equal(found[kept], expected[kept])

    def test_a_constant_image_has_only_an_average(self):
        coefficients = self.transform(torch.full((1, 28, 28), 0.5))
        torch.testing.assert_close(coefficients[:, 0], torch.full((1, 7, 7), 0.5), rtol=1e-4, atol=0)
        assert coefficients[:, 1:].abs().max() < 1e-5

    def test_no_gradient_is_recorded(self):
        assert not self.transform(torch.zeros(2, 28, 28, requires_grad=True)).requires_grad

    def test_can_be_copied(self):
        images = random_images(2, 28, 28)
        assert torch.equal(copy.deepcopy(self.transform)(images), self.transform(images))


class TestRefusals:
    @pytest.mark.parametrize("sizes", [{"height": 3, "width": 28}, {"height": 28, "width": 0}])
    def test_small_images(self, sizes):
        with pytest.raises(InputError, match="width="):
            Scattering(**sizes)

    def test_chunk_size(self):
        with pytest.raises(InputError, match="chunk_size=0"):
            Scattering(height=28, width=28, chunk_size=0)

    def test_low_precision(self):
        with pytest.raises(InputError, match=r"dtype=torch\.float16"):
            Scattering(height=28, width=28, dtype=torch.float16)

    def test_bytes(self):
        with pytest.raises(InputError, match=r"images.dtype=torch\.uint8 .* / 255"):
            Scattering(height=28, width=28)(torch.zeros(1, 28, 28, dtype=torch.uint8))

    @pytest.mark.parametrize("shape", [(28,), (1, 28, 27), (28, 28, 1)])
    def test_another_size(self, shape):
        with pytest.raises(InputError, match=r"images.shape=.*\(28, 28\)"):
            Scattering(height=28, width=28)(torch.zeros(shape))
