"""A finished run put to use, from its public folder alone."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from sluice import load_model
from sluice._base.errors import DataError, InputError
from sluice.cli import main
from sluice.data import DataSplits, load
from sluice.experiments.preparing import prepare
from sluice.experiments.run import Training
from sluice.experiments.settings import settings_from

SHORT = {"releases": 3, "noise_multiplier": 2.0, "seed": 1}
GREY = "whitened-scattering:references=40"


def trained(path: Path, **chosen) -> tuple[Path, float]:
    settings = settings_from({**SHORT, **chosen})
    result = Training(settings=settings, splits=prepare(settings, show_progress=False)).start(path)
    shutil.rmtree(path / "private")
    assert result.test_accuracy is not None
    return path, result.test_accuracy


@pytest.fixture
def images(tmp_path, monkeypatch) -> Path:
    """Small own images of three classes: bars in three places."""
    monkeypatch.setenv("SLUICE_CACHE", str(tmp_path / "cache"))
    labels = np.arange(240) % 3
    x = np.random.default_rng(0).integers(0, 40, (240, 16, 16)).astype(np.uint8)
    for image, label in zip(x, labels, strict=True):
        image[:, 2 + 5 * label : 4 + 5 * label] = 250
    np.savez(tmp_path / "own.npz", x_train=x[:200], y_train=labels[:200], x_test=x[200:], y_test=labels[200:])
    return tmp_path / "own.npz"


@pytest.mark.parametrize("features", ["plain", "scattering"])
def test_a_model_classifies_as_it_did_in_its_run(features, tmp_path):
    path, accuracy = trained(tmp_path / "run", features=features)
    model = load_model(path)
    digits = load("digits")
    assert isinstance(digits, DataSplits)
    found = model.predict(digits.test.inputs)
    assert float((found == digits.test.labels).double().mean()) == pytest.approx(accuracy)
    assert model.classes == tuple("0123456789")
    torch.testing.assert_close(model.probabilities(digits.test.inputs[:4]).sum(1), torch.ones(4))


@pytest.mark.parametrize("mean_noise", [None, 5.0])
def test_rows_need_neither_the_cache_nor_the_data(images, tmp_path, monkeypatch, mean_noise):
    chosen = {} if mean_noise is None else {"mean_noise": mean_noise}
    path, accuracy = trained(tmp_path / "run", dataset=str(images), method="dpsgd", features=GREY, **chosen)
    arrays = np.load(images)
    x, y = arrays["x_test"], arrays["y_test"]
    images.unlink()
    monkeypatch.setenv("SLUICE_CACHE", str(tmp_path / "other"))
    model = load_model(path)
    assert (model.predict(x).numpy() == y).mean() == pytest.approx(accuracy)
    assert not (tmp_path / "other").exists()
    with pytest.raises(InputError, match="must be"):
        model.predict(x[:, :12])


def test_texts_are_read_as_in_training(tmp_path):
    ranks = np.random.default_rng(0).integers(0, 50, (120, 9))
    labels = (ranks == 7).any(axis=1).astype(int)
    np.savez(tmp_path / "texts.npz", x=ranks, y=labels)
    path, _ = trained(
        tmp_path / "run",
        dataset=str(tmp_path / "texts.npz"),
        method="dpsgd",
        features="weighted-words:vocabulary=60,negation=0",
        optimizer="sgd",
        batch_size=32,
        scaling="clip",
    )
    found = load_model(path).predict(ranks)
    assert set(found.tolist()) <= {0, 1}
    with pytest.raises(DataError, match="not texts"):
        load_model(path).predict(ranks - 5)


def test_the_command_writes_predictions(tmp_path, capsys):
    path, accuracy = trained(tmp_path / "run")
    digits = load("digits")
    np.savez(tmp_path / "images.npz", x=digits.test.inputs.numpy(), y=digits.test.labels.numpy())
    arguments = ["predict", str(path), str(tmp_path / "images.npz")]
    with pytest.raises(SystemExit) as end:
        main([*arguments, "--output", str(tmp_path / "found.csv")])
    assert not end.value.code
    assert f"Right: {accuracy:.2%} of 360" in capsys.readouterr().out
    lines = (tmp_path / "found.csv").read_text().splitlines()
    assert (lines[0], len(lines)) == ("record,class,probability", 361)
    with pytest.raises(SystemExit):
        main([*arguments, "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["accuracy"] == pytest.approx(accuracy)
    assert found["classes"][0] == lines[1].split(",")[1]


def test_what_is_not_whole_is_refused(tmp_path):
    path, _ = trained(tmp_path / "run")
    weights = path / "public" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(bytes(content))
    with pytest.raises(DataError, match="not those of its ledger"):
        load_model(path)


@pytest.mark.parametrize("name", ["features.safetensors", "mean.safetensors"])
def test_features_and_mean_of_another_run_are_refused(images, tmp_path, name):
    path, _ = trained(tmp_path / "run", dataset=str(images), method="dpsgd", features=GREY, mean_noise=5.0)
    file = path / "public" / name
    content = bytearray(file.read_bytes())
    content[-1] ^= 1  # still a file of tensors
    file.write_bytes(bytes(content))
    with pytest.raises(DataError, match=f"{name} is not the file that the ledger has a hash of"):
        load_model(path)
    file.unlink()
    with pytest.raises(DataError, match=name):
        load_model(path)
