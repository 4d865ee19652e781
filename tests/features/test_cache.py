from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from sluice._base.errors import DataError, InputError
from sluice.data.transforms import ToFloat, standardised, to_float
from sluice.features import Scattering, cache, scattering_features


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("SLUICE_CACHE", str(tmp_path))
    return tmp_path / "features"


@pytest.fixture
def images() -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (20, 12, 16), generator=generator, dtype=torch.uint8)


@pytest.fixture
def computations(monkeypatch) -> list[int]:
    """One entry for each time that the transform is computed."""
    seen: list[int] = []
    compute = cache._computed

    def counted(images, *rest):
        seen.append(len(images))
        return compute(images, *rest)

    monkeypatch.setattr(cache, "_computed", counted)
    return seen


def only_file(folder: Path) -> Path:
    (path,) = folder.iterdir()
    return path


def test_the_second_call_reads_the_first_ones_file(folder, images, computations):
    first = scattering_features(images)
    second = scattering_features(images)
    assert computations == [20]
    assert first.shape == (20, 81, 3, 4)
    assert first.dtype == second.dtype == torch.float16
    assert torch.equal(first, second)
    assert torch.equal(first, Scattering(height=12, width=16)(images / 255).half())


def test_without_a_cache_the_result_is_the_same(folder, images):
    assert torch.equal(scattering_features(images, cache=False), scattering_features(images))
    only_file(folder)


def test_one_channel_may_be_written_or_left_out(folder, images):
    assert torch.equal(scattering_features(images[:, None]), scattering_features(images))
    only_file(folder)


def test_everything_that_matters_makes_another_file(folder, images, computations, monkeypatch):
    scattering_features(images)
    changed = images.clone()
    changed[7, 3, 3] ^= 1
    scattering_features(changed)
    scattering_features(images, scaling=ToFloat(divisor=16.0))
    scattering_features(images.transpose(1, 2).contiguous())
    scattering_features(images.flip(0))
    scattering_features(images[:19])
    monkeypatch.setattr(cache, "TRANSFORM_VERSION", cache.TRANSFORM_VERSION + 1)
    scattering_features(images)
    assert len(computations) == len(list(folder.iterdir())) == 7


def test_colour_images_are_scaled_by_channel(folder):
    images = torch.randint(0, 256, (3, 3, 8, 8), dtype=torch.uint8)
    found = scattering_features(images, scaling=standardised)
    assert torch.equal(found, Scattering(height=8, width=8)(standardised(images)).half())


@pytest.mark.parametrize("damage", ["cut", "emptied", "longer", "flipped", "digest", "renamed"])
def test_a_damaged_file_is_made_again(folder, images, computations, damage):
    expected = scattering_features(images).clone()
    path = only_file(folder)
    content = bytearray(path.read_bytes())
    if damage == "renamed":
        scattering_features(images.flip(0))
        (other,) = (file for file in folder.iterdir() if file != path)
        content = bytearray(other.read_bytes())
        other.unlink()
        computations.pop()
    elif damage == "cut":
        content = content[:-100]
    elif damage == "emptied":
        content = bytearray()
    elif damage == "longer":
        content += b"x"
    else:
        content[-1 if damage == "digest" else 1000] ^= 1
    path.write_bytes(content)
    assert torch.equal(scattering_features(images), expected)
    assert computations == [20, 20]
    assert torch.equal(scattering_features(images), expected)
    assert computations == [20, 20]
    only_file(folder)


def test_changing_the_tensor_does_not_change_the_file(folder, images, computations):
    features = scattering_features(images)
    expected = features.clone()
    features.zero_()
    assert torch.equal(scattering_features(images), expected)
    assert computations == [20]


def test_an_interrupted_computation_leaves_nothing(folder, images, monkeypatch):
    def interrupted(*_):
        yield torch.zeros(1, 81, 3, 4, dtype=torch.float16)
        raise KeyboardInterrupt

    monkeypatch.setattr(cache, "_computed", interrupted)
    with pytest.raises(KeyboardInterrupt):
        scattering_features(images)
    assert list(folder.iterdir()) == []


def test_others_cannot_read_the_file(folder, images):
    folder.mkdir(mode=0o755)
    scattering_features(images)
    assert only_file(folder).stat().st_mode & 0o077 == 0
    assert folder.stat().st_mode & 0o077 == 0  # names are hashes of the images


def test_a_cache_that_cannot_be_written_is_explained(tmp_path, images, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SLUICE_CACHE", str(tmp_path / "file"))
    with pytest.raises(DataError, match="features"):
        scattering_features(images)
    assert scattering_features(images, cache=False).shape[0] == 20


def test_two_processes_may_do_it_at_once(folder, images, tmp_path):
    np.save(tmp_path / "images.npy", images.numpy())
    program = (
        "import sys, numpy, torch; torch.set_num_threads(1);"
        "from sluice.features import scattering_features;"
        "images = torch.from_numpy(numpy.load(sys.argv[1]));"
        "print(float(scattering_features(images).double().sum()))"
    )
    arguments = [sys.executable, "-c", program, str(tmp_path / "images.npy")]
    processes = [subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    printed = [process.communicate()[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    expected = float(scattering_features(images).double().sum())
    assert [float(line) for line in printed] == [expected, expected]
    only_file(folder)


def test_no_images_make_no_file(folder):
    assert scattering_features(torch.zeros(0, 28, 28, dtype=torch.uint8)).shape == (0, 81, 7, 7)
    assert scattering_features(torch.zeros(0, 3, 32, 32, dtype=torch.uint8)).shape == (0, 243, 8, 8)
    assert not folder.exists()


@pytest.mark.parametrize("bad", [torch.zeros(2, 8, 8), torch.zeros(8, 8, dtype=torch.uint8)])
def test_other_images_are_refused(bad):
    with pytest.raises(InputError, match="must be uint8"):
        scattering_features(bad)


def assert_rounded_once(images: torch.Tensor, scaling: ToFloat) -> None:
    exact = Scattering(height=images.shape[-2], width=images.shape[-1])(scaling(images))
    error = (scattering_features(images, scaling=scaling).float() - exact).abs()
    assert bool((error <= torch.clamp(exact.abs() * 2.0**-11, min=3e-8)).all())
    assert float(error.norm() / exact.norm()) < 3e-4


def test_accuracy_of_the_cache(folder, images):
    assert_rounded_once(images, to_float)


@pytest.mark.bigdata
def test_accuracy_of_the_cache_on_mnist(folder, mnist_images):
    assert_rounded_once(mnist_images, to_float)


@pytest.mark.bigdata
def test_accuracy_of_the_cache_on_cifar(folder, cifar_images):
    assert_rounded_once(cifar_images, standardised)
