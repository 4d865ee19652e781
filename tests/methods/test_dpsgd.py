"""DPSGD, DPSGD-TS and DPSGD-HF do what they say, on small data sets and on the user's own as well."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from sluice._base.errors import InputError
from sluice.cli import main
from sluice.experiments.preparing import prepare
from sluice.experiments.run import Training
from sluice.experiments.settings import default_settings, settings_from
from sluice.models import LinearClassifier, Perceptron, TemperedSigmoid

QUICK = {"releases": 3, "noise_multiplier": 2.0, "accountant": "rdp", "seed": 3, "batch_size": 32}


@pytest.fixture
def own_images(tmp_path: Path) -> Path:
    generator = np.random.default_rng(0)
    np.savez(tmp_path / "own.npz", x=generator.integers(0, 256, (200, 12, 16), dtype=np.uint8), y=np.arange(200) % 4)
    return tmp_path / "own.npz"


def made(method: str, dataset: str, **overrides: Any) -> Training:
    settings = settings_from({"method": method, "dataset": dataset, **QUICK, **overrides})
    return Training(settings=settings, splits=prepare(settings, show_progress=False))


def parts(model: nn.Module, kind: type) -> list[nn.Module]:
    return [module for module in model.modules() if isinstance(module, kind)]


@pytest.mark.parametrize("own", [False, True], ids=["digits", "own"])
def test_the_three_differ_in_what_they_say(own, own_images, tmp_path):
    dataset = str(own_images) if own else "digits"
    relu, tempered, scattering = (made(method, dataset) for method in ("dpsgd", "dpsgd-ts", "dpsgd-hf"))
    assert isinstance(relu.model, Perceptron)
    assert len(parts(relu.model, nn.ReLU)) == 1
    assert isinstance(tempered.model, Perceptron)
    assert len(parts(tempered.model, TemperedSigmoid)) == 1
    assert not parts(tempered.model, nn.ReLU)
    assert isinstance(scattering.model, LinearClassifier)
    assert scattering.model.classifier.in_features == (81 * 3 * 4 if own else 81 * 2 * 2)
    assert relu.mechanism == tempered.mechanism == scattering.mechanism
    runs = {}
    for training in (relu, tempered, scattering):
        path = tmp_path / training.settings.method
        training.start(path)
        runs[training.settings.method] = load_file(path / "public" / "model.safetensors")
    weights = [runs[method]["classifier.weight"] for method in ("dpsgd", "dpsgd-ts", "dpsgd-hf")]
    assert weights[0].shape == weights[1].shape != weights[2].shape
    assert not torch.equal(weights[0], weights[1])


def test_the_constants_of_the_sigmoid_reach_the_net():
    (activation,) = parts(made("dpsgd-ts", "digits", activation="tempered-sigmoid:1.58,3,0.71").model, TemperedSigmoid)
    assert (activation.tempering.scale, activation.tempering.offset) == (1.58, 0.71)


@pytest.mark.parametrize(
    ("method", "shown"),
    [
        ("dpsgd", "digits, features plain, model mlp with relu"),
        ("dpsgd-ts", "digits, features plain, model mlp with tempered-sigmoid"),
        ("dpsgd-hf", "digits, features scattering, model linear"),
    ],
)
def test_the_screen_shows_what_is_trained(method, shown, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    arguments = ["--releases", "2", "--noise-multiplier", "2", "--accountant", "rdp", "--seed", "1"]
    with pytest.raises(SystemExit) as stop:
        main(["train", "--dataset", "digits", "--method", method, *arguments])
    assert not stop.value.code
    assert re.search(rf"data +{shown} *$", capsys.readouterr().out, re.MULTILINE)


def test_a_net_says_its_activation_even_where_none_was_given(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    arguments = ["--releases", "2", "--noise-multiplier", "2", "--accountant", "rdp", "--seed", "1", "--model", "mlp"]
    with pytest.raises(SystemExit):
        main(["train", "--dataset", "digits", *arguments])
    assert "model mlp with tanh" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"method": "dpsgd-ts", "model": "linear"}, "model='linear' is not allowed for method='dpsgd-ts'"),
        ({"method": "dpsgd-ts", "activation": "relu"}, "activation='relu' is not allowed for method='dpsgd-ts'"),
        ({"method": "dpsgd-hf", "features": "plain"}, "features='plain' is not allowed for method='dpsgd-hf'"),
        ({"method": "dpsgd-hf", "model": "pixel-cnn", "dataset": "mnist"}, "features='plain' is not allowed"),
    ],
)
def test_what_would_be_another_method_is_refused(overrides, message):
    with pytest.raises(InputError, match=message):
        settings_from(overrides)


def test_tanh_is_a_tempered_sigmoid():
    assert settings_from({"method": "dpsgd-ts", "activation": "tanh"}).activation == "tanh"


def test_features_without_images_have_no_scattering_coefficients(tmp_path):
    np.savez(tmp_path / "table.npz", x=np.random.default_rng(0).random((50, 6)), y=np.arange(50) % 3)
    with pytest.raises(InputError, match=r"features='scattering' is not allowed for dataset=.*: it is for images"):
        prepare(settings_from({"dataset": str(tmp_path / "table.npz"), "method": "dpsgd-hf"}))
    np.savez(tmp_path / "tiny.npz", x=np.zeros((50, 3, 3), dtype=np.uint8), y=np.arange(50))
    with pytest.raises(InputError, match="each must be at least 4 pixels"):
        prepare(settings_from({"dataset": str(tmp_path / "tiny.npz"), "method": "dpsgd-hf"}))
    for method in ("dpsgd", "dpsgd-ts"):
        assert isinstance(made(method, str(tmp_path / "table.npz"), batch_size=8).model, Perceptron)


def test_texts_have_the_row_of_the_table():
    settings = default_settings("imdb", method="dpsgd-hf")
    assert (settings.features, settings.model, settings.activation) == ("plain", "bilstm", "tanh")
