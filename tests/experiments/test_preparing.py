from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from sluice._base.errors import DataError, InputError
from sluice.data import hold_out, load
from sluice.experiments import preparing as preparation
from sluice.experiments.preparing import prepare
from sluice.experiments.settings import settings_from
from sluice.features import GroupNormalisation, Scattering


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
    assert by_batch.train.transform is preparation.normalised
    for count in (1, 9, 1437):
        assert torch.equal(at_once.train.batch(range(count))[0], by_batch.train.batch(range(count))[0])


@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
def test_own_images_are_transformed_too(tmp_path, dtype):
    path = grey_images(tmp_path / "own.npz", dtype=dtype)
    splits = prepare(settings_from({"dataset": str(path), "model": "scattering-cnn"}), show_progress=False)
    plain = load(path)
    expected = GroupNormalisation()(Scattering(height=16, width=16)(plain.train.batch(range(4))[0]))
    found = splits.train.batch(range(4))[0]
    assert found.shape == (4, 81, 4, 4)
    assert torch.allclose(found, expected, atol=4e-3)


@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
@pytest.mark.parametrize("place", [0, 17, 40])
def test_one_more_record_changes_no_bit_of_the_others(tmp_path, monkeypatch, dtype, place):
    path = grey_images(tmp_path / "own.npz", dtype=dtype)
    settings = settings_from({"dataset": str(path), "features": "scattering"})
    before = prepare(settings, show_progress=False)
    with np.load(path) as arrays:
        x, y = arrays["x"], arrays["y"]
    extra = x[3][:, ::-1]
    np.savez(path, x=np.insert(x, place, extra, axis=0), y=np.insert(y, place, 2))
    # The larger set is also too large to be normalised at once.
    monkeypatch.setattr(preparation, "NORMALISED_AT_ONCE", before.train.inputs.nbytes)
    after = prepare(settings, show_progress=False)
    sizes = len(after.train) - len(before.train), len(after.test) - len(before.test)
    assert sizes in ((1, 0), (0, 1))
    for part in ("train", "test"):
        old, new = ([*zip(*getattr(splits, part).batch(range(len(getattr(splits, part)))), strict=True)]
                    for splits in (before, after))  # fmt: skip
        old, new = ([(x.numpy().tobytes(), int(y)) for x, y in records] for records in (old, new))
        added = [record for record in new if record not in old]
        assert [record for record in new if record in old] == old
        assert len(added) == len(new) - len(old)


def test_the_same_records_are_held_out_whatever_features_are_made_of_them():
    held = [
        hold_out(prepare(settings_from({"features": features, "model": "linear"}), show_progress=False).train, 0.1, 0)[
            1
        ]
        for features in ("plain", "scattering")
    ]
    assert held[0].labels.tolist() == held[1].labels.tolist()
    assert held[0].input_shape != held[1].input_shape


def test_the_number_of_classes_can_be_said(tmp_path):
    path = grey_images(tmp_path / "own.npz", dtype=np.uint8)
    assert len(prepare(settings_from({"dataset": str(path)})).classes) == 4
    assert len(prepare(settings_from({"dataset": str(path), "classes": 6})).classes) == 6
    with pytest.raises(InputError, match="are for your own data"):
        prepare(settings_from({"dataset": "digits", "classes": 12}))


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
def test_imdb_as_bags_of_words():
    lists, rows = (
        prepare(settings_from({"dataset": "imdb", **more})).train
        for more in ({"model": "bag-of-words"}, {"features": "bag-of-words", "model": "linear"})
    )
    assert lists.input_shape == rows.input_shape == (10_000,)
    inputs, _ = rows.batch(range(3))
    assert torch.allclose(inputs.norm(dim=1), torch.ones(3))
    for columns, row in zip(lists.batch(range(3))[0], inputs, strict=True):
        assert columns[columns >= 0].tolist() == row.nonzero().flatten().tolist()


def test_a_single_class_is_refused_with_what_to_do(tmp_path):
    np.savez(tmp_path / "own.npz", x=np.random.default_rng(0).integers(0, 9, (40, 3)), y=np.zeros(40, int))
    for features in ("plain", "weighted-words:vocabulary=60,negation=0"):
        chosen = {"dataset": str(tmp_path / "own.npz"), "features": features}
        with pytest.raises(DataError, match=r"has only labels 0, which is one class.*--classes 2"):
            prepare(settings_from(chosen), show_progress=False)
        assert len(prepare(settings_from({**chosen, "classes": 2}), show_progress=False).classes) == 2


def test_own_texts_have_the_names_of_their_classes(tmp_path):
    words = np.random.default_rng(0).integers(0, 9, (40, 3))
    np.savez(tmp_path / "own.npz", x=words, y=np.where(words[:, 0] > 4, "good", "bad"))
    settings = settings_from(
        {
            "dataset": str(tmp_path / "own.npz"),
            "features": "weighted-words:vocabulary=60,negation=0",
            "class_names": "bad,good",
        }
    )
    assert prepare(settings, show_progress=False).classes == ("bad", "good")
