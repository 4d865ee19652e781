from __future__ import annotations

import gzip
import os
import pickle
import tarfile
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import scipy.special
import torch
from torch import Tensor


@pytest.fixture(scope="session")
def kymatio_scattering() -> Callable[[Tensor], Tensor]:
    """The transform of the package that ours has to agree with."""
    if not hasattr(scipy.special, "sph_harm"):
        scipy.special.sph_harm = lambda m, n, theta, phi: scipy.special.sph_harm_y(n, m, phi, theta)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scattering2d = pytest.importorskip("kymatio.torch").Scattering2D

    def transform(images: Tensor) -> Tensor:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return scattering2d(J=2, shape=tuple(images.shape[-2:]), L=8)(images.contiguous())

    return transform


def _data_file(*parts: str) -> Path:
    folder = os.environ.get("SLUICE_DATA")
    if not folder:
        pytest.skip("$SLUICE_DATA is not set")
    path = Path(folder, *parts)
    if not path.is_file():
        pytest.skip(f"{Path(*parts)} is not in $SLUICE_DATA")
    return path


@pytest.fixture(scope="session")
def mnist_images() -> Tensor:
    """64 test images, uint8."""
    with gzip.open(_data_file("mnist", "t10k-images-idx3-ubyte.gz")) as file:
        content = file.read(16 + 64 * 784)
    return torch.from_numpy(np.frombuffer(content, np.uint8, offset=16).reshape(64, 28, 28).copy())


@pytest.fixture(scope="session")
def cifar_images() -> Tensor:
    """The first images of the archive, uint8. The file belongs to the project's own data and may be unpickled."""
    with tarfile.open(_data_file("cifar-10", "cifar-10-python.tar.xz")) as archive, warnings.catch_warnings():
        # Old pickles of numpy arrays say something about the alignment of their types.
        warnings.simplefilter("ignore")
        batch = next(member for member in archive if "batch_" in member.name)
        content = archive.extractfile(batch)
        assert content is not None
        data = pickle.load(content, encoding="bytes")[b"data"]
    return torch.from_numpy(np.asarray(data[:32]).reshape(-1, 3, 32, 32).copy())


@pytest.fixture(scope="session")
def digit_images() -> Tensor:
    """Handwritten digits of 8x8 pixels, enlarged to 24x24 with a border of 2, as float32 in 0..1."""
    from sklearn.datasets import load_digits

    digits = torch.from_numpy(load_digits().images[:48]).to(torch.float32) / 16
    enlarged = digits.repeat_interleave(3, dim=1).repeat_interleave(3, dim=2)
    return torch.nn.functional.pad(enlarged, (2, 2, 2, 2))
