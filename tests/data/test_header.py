"""The shape of a user's own records, from the header of their file."""

from __future__ import annotations

import numpy as np
import pytest

from sluice.data.header import array_header
from sluice.experiments.defaults import known_recipe
from sluice.experiments.settings import default_settings


@pytest.mark.parametrize(
    ("array", "shape"),
    [
        (np.zeros((5, 28, 28), np.uint8), (1, 28, 28)),
        (np.zeros((5, 28, 28), np.float32), None),
        (np.zeros((5, 3, 32, 30), np.float32), (3, 32, 30)),
        (np.zeros((5, 32, 30, 3), np.uint8), (3, 32, 30)),
        (np.zeros((5, 7, 32, 30), np.uint8), None),
        (np.zeros((5, 12), np.uint8), None),
    ],
)
def test_images_are_told_by_their_shape(tmp_path, array, shape):
    np.savez(tmp_path / "own.npz", x=array, y=np.zeros(5, int))
    found = array_header(tmp_path / "own.npz")
    assert found is not None
    assert (found.records, found.image_shape) == (5, shape)


def test_what_cannot_be_read_is_left_to_whoever_loads_it(tmp_path):
    broken = tmp_path / "own.npz"
    assert array_header(broken) is None
    broken.write_bytes(b"PK\3\4 and then nothing")
    assert array_header(broken) is None
    np.savez(broken, z=np.zeros(3))
    assert array_header(broken) is None


def test_features_of_own_images_follow_their_shape(tmp_path):
    path = tmp_path / "own.npz"
    for array, features in (
        (np.zeros((400, 28, 28), np.uint8), "whitened-scattering"),
        (np.zeros((400, 32, 32, 3), np.uint8), "patches"),
        (np.zeros((400, 8, 8), np.uint8), "plain"),
        (np.zeros((400, 12), np.float32), "plain"),
    ):
        np.savez(path, x_train=array, y_train=np.zeros(400, int))
        for method in ("dpsgd", "dpsr-cg"):
            assert default_settings(str(path), method=method).features == features


def test_steps_are_shorter_for_fewer_records(tmp_path):
    path = tmp_path / "own.npz"
    rates = []
    for records in (300, 3000):
        np.savez(path, x=np.zeros((records, 28, 28), np.uint8), y=np.zeros(records, int))
        recipe = known_recipe(str(path))
        assert recipe is not None
        rates.append(recipe.settings(1.0, gated=False)["lr"])
    assert rates[1] == pytest.approx(10 * rates[0], rel=0.01)
