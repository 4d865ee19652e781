from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from sluice import preparation
from sluice.data import load
from sluice.errors import InputError
from sluice.features import GroupNormalisation, Scattering
from sluice.preparation import prepare
from sluice.settings import settings_from


def grey_images(path: Path, *, dtype: type) -> Path:
    generator = np.random.RandomState(0)
    images = generator.randint(0, 256, (40, 1, 16, 16))
    np.savez(path, x=(images / 255 if dtype is np.float32 else images).astype(dtype), y=np.arange(40) % 4)
    return path


def test_plain_features_are_the_data_as_it_is():
    splits, digits = prepare(settings_from({"dataset": "digits"})), load("digits")
    assert torch.equal(splits.train.batch(range(5))[0], digits.train.batch(range(5))[0])


def test_scattering_is_normalised_once_and_right_to_rounding():
    settings = settings_from({"dataset": "digits", "model": "scattering-cnn"})
    splits, digits = prepare(settings, show_progress=False), load("digits")
    for part in ("train", "test"):
        found, labels = getattr(splits, part).batch([3, 0, 3])
        images, expected_labels = getattr(digits, part).batch([3, 0, 3])
        expected = GroupNormalisation()(Scattering(height=8, width=8)(images))
        assert found.dtype == torch.float32
        assert found.shape == (3, 81, 2, 2)
        assert torch.equal(labels, expected_labels)
        assert torch.allclose(found, expected, atol=4e-3)
        assert len(getattr(splits, part)) == len(getattr(digits, part))


def test_large_sets_are_normalised_by_batch_instead(monkeypatch):
    settings = settings_from({"dataset": "digits", "model": "scattering-cnn"})
    at_once = prepare(settings, show_progress=False)
    monkeypatch.setattr(preparation, "NORMALISED_AT_ONCE", 1)
    by_batch = prepare(settings, show_progress=False)
    assert isinstance(by_batch.train.transform, GroupNormalisation)
    assert torch.allclose(at_once.train.batch(range(9))[0], by_batch.train.batch(range(9))[0], atol=1e-3)


@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
def test_own_images_are_transformed_too(tmp_path, dtype):
    path = grey_images(tmp_path / "own.npz", dtype=dtype)
    splits = prepare(settings_from({"dataset": str(path), "model": "scattering-cnn"}), show_progress=False)
    plain = load(path)
    expected = GroupNormalisation()(Scattering(height=16, width=16)(plain.train.batch(range(4))[0]))
    found = splits.train.batch(range(4))[0]
    assert found.shape == (4, 81, 4, 4)
    assert torch.allclose(found, expected, atol=4e-3)


def test_each_record_depends_on_itself_alone(tmp_path):
    settings = settings_from({"dataset": str(tmp_path / "own.npz"), "model": "scattering-cnn"})
    first = prepare(settings_from({"dataset": str(grey_images(tmp_path / "own.npz", dtype=np.uint8)),
                                   "model": "scattering-cnn"}), show_progress=False)  # fmt: skip
    with np.load(tmp_path / "own.npz") as arrays:
        x, y = arrays["x"], arrays["y"]
    x[7] = 255 - x[7]
    np.savez(tmp_path / "own.npz", x=x, y=y)
    second = prepare(settings, show_progress=False)
    both = [torch.cat([splits.train.inputs, splits.test.inputs]) for splits in (first, second)]
    assert int((both[0] != both[1]).flatten(1).any(1).sum()) == 1


def test_combinations_that_make_no_sense_are_refused(tmp_path):
    np.savez(tmp_path / "table.npz", x=np.zeros((9, 4), dtype=np.float32), y=np.arange(9) % 3)
    for settings in (
        settings_from({"dataset": "imdb", "features": "scattering", "model": "linear"}),
        settings_from({"dataset": "digits", "features": "bag-of-words"}),
        settings_from({"dataset": str(tmp_path / "table.npz"), "features": "scattering"}),
    ):
        with pytest.raises(InputError, match=f"features='{settings.features}' is not allowed for dataset="):
            prepare(settings)


@pytest.mark.bigdata
def test_imdb_as_bags_of_words(monkeypatch):
    import os

    if not os.environ.get("SLUICE_DATA"):
        pytest.skip("SLUICE_DATA is not set: no imdb here")
    splits = prepare(settings_from({"dataset": "imdb"}))
    inputs, _ = splits.train.batch(range(3))
    assert inputs.shape == (3, 10_000)
    assert torch.allclose(inputs.norm(dim=1), torch.ones(3))
