from __future__ import annotations

import json
import math
from dataclasses import fields

import pytest

from sluice._base.errors import InputError
from sluice.data import names as data_set_names
from sluice.experiments.settings import CHOICES, TrainSettings, default_settings, settings_from, settings_of


@pytest.mark.parametrize("dataset", [*data_set_names(), "my-own.npz"])
def test_every_data_set_has_defaults(dataset):
    assert default_settings(dataset).dataset == dataset


def test_overrides_win_over_the_file_and_the_file_over_the_defaults(tmp_path):
    file = tmp_path / "settings.toml"
    file.write_text('dataset = "mnist"\nlr = 0.7\nreleases = 9\n')
    settings = settings_from({"releases": 5}, file=file)
    assert (settings.dataset, settings.lr, settings.releases) == ("mnist", 0.7, 5)
    assert settings.features == default_settings("mnist").features


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.toml", "momentun = 0.9\n"),
        ("a.json", '{"momentun": 0.9}'),
        ("a.toml", "[optimizer]\nlr = 1\n"),
        ("a.json", '{"lr": 1, "lr": 2}'),
        ("a.json", "[1]"),
        ("a.json", '{"lr": NaN}'),
        ("a.json", "{"),
        ("a.toml", "lr = "),
        ("a.toml", "lr = '0.1'\n"),
        ("a.json", '{"seed": true}'),
        ("a.json", '{"dataset": 3}'),
        ("a.json", '{"lr": 1' + "0" * 400 + "}"),
        ("a.toml", "\udce4"),
    ],
)
def test_bad_files_are_refused(tmp_path, name, content):
    file = tmp_path / name
    file.write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(InputError) as error:
        settings_from({}, file=file)
    assert len(str(error.value).splitlines()) <= 2


def test_an_unknown_key_is_named(tmp_path):
    file = tmp_path / "a.toml"
    file.write_text("momentun = 0.9\n")
    with pytest.raises(InputError, match=r"unknown settings momentun: allowed are .*momentum"):
        settings_from({}, file=file)


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(InputError, match="does not exist"):
        settings_from({}, file=tmp_path / "none.toml")


@pytest.mark.parametrize(
    "bad",
    [
        {"epsilon": 0.0},
        {"epsilon": math.inf},
        {"delta": 1.0},
        {"releases": 0},
        {"classes": 0},
        {"batch_size": 2.5},
        {"lr": -1.0},
        {"lr": True},
        {"momentum": 1.0},
        {"weight_decay": -0.1},
        {"ema_decay": -0.1},
        {"hold_out": 1.0},
        {"beta": math.nan},
        {"clip_range": 0.0},
        {"gate_noise": 0.0},
        {"reference_noise": -1.0},
        {"reference_decay": 1.0},
        {"max_attempts": 0},
        {"coin_probability": 1.5, "gate": "coin"},
        {"evaluate_every": -1},
        {"seed": -1},
        {"noise_multiplier": 0.0},
        {"hidden_reference": 1},
        {"hidden_reference": True},
        {"dataset": None},
        {"method": "dpsgd", "gate": "coin"},
        *({name: "nonsense"} for name in ("method", *CHOICES)),
    ],
    ids=str,
)
def test_bad_values_are_refused_by_name(bad):
    with pytest.raises(InputError) as error:
        settings_from(bad)
    assert next(iter(bad)) in str(error.value)


@pytest.mark.parametrize(
    "useless",
    [
        {"method": "dpsgd", "beta": 2.0},
        {"gate": "none", "max_attempts": 9},
        {"gate": "coin", "gate_noise": 2.0},
        {"coin_probability": 0.5},
        {"optimizer": "adam", "momentum": 0.5},
        {"scaling": "clip", "scaling_bound": 2.0},
        {"noise_multiplier": 1.0, "epsilon": 2.0},
    ],
    ids=str,
)
def test_overrides_without_effect_are_refused(useless, tmp_path):
    with pytest.raises(InputError, match="has no effect"):
        settings_from(useless)
    # A file may hold settings for several experiments, of which the command line picks one.
    file = tmp_path / "a.json"
    file.write_text(json.dumps(useless))
    settings_from({}, file=file)


def test_settings_survive_their_plain_form():
    settings = settings_from({"dataset": "mnist", "reference_noise": math.inf, "epsilon": 1, "seed": 3})
    text = json.dumps(settings.to_dict(), allow_nan=False)
    assert settings_of(json.loads(text), where="config") == settings
    assert isinstance(settings.epsilon, float)


def test_a_recorded_configuration_must_be_complete():
    config = default_settings("digits").to_dict()
    del config["lr"]
    with pytest.raises(InputError, match="lacks lr"):
        settings_of(config, where="config.json")
    with pytest.raises(InputError, match="unknown settings extra"):
        settings_of({**default_settings("digits").to_dict(), "extra": 1}, where="config.json")


def test_configurations_of_earlier_versions_stay_what_they_were():
    settings = default_settings("digits")
    assert "classes" not in settings.to_dict()
    assert settings_of(settings.to_dict(), where="config.json") == settings
    counted = settings_from({"dataset": "own.npz", "classes": 6})
    assert counted.to_dict()["classes"] == 6
    assert settings_of(counted.to_dict(), where="config.json") == counted


def test_a_model_brings_its_features_and_features_their_model():
    assert settings_from({"dataset": "mnist", "model": "pixel-cnn"}).features == "plain"
    assert settings_from({"dataset": "mnist", "features": "plain"}).model == "pixel-cnn"
    assert settings_from({"dataset": "imdb", "model": "bilstm"}).features == "plain"
    assert settings_from({"dataset": "mnist", "model": "linear"}).features == "scattering"
    assert settings_from({"dataset": "mnist", "features": "whitened-scattering"}).model == "softmax"
    both = settings_from({"dataset": "mnist", "model": "linear", "features": "plain"})
    assert (both.model, both.features) == ("linear", "plain")


def test_a_recipe_is_for_its_own_kind_of_model():
    best = settings_from({"dataset": "fashion-mnist", "method": "dpsgd"})
    other_rows = settings_from({"dataset": "fashion-mnist", "method": "dpsgd", "features": "silhouette-net"})
    net = settings_from({"dataset": "fashion-mnist", "method": "dpsgd", "model": "pixel-cnn"})
    assert other_rows.lr == best.lr
    assert (net.lr, net.mean_noise) == (4.0, None)
    assert net == settings_from({"dataset": "fashion-mnist", "method": "dpsgd"}, recipe="paper")
    with pytest.raises(InputError, match="recipe='best' is not allowed"):
        settings_from({"dataset": "mnist", "method": "dpsur"}, recipe="best")
    with pytest.raises(InputError, match="must be one of"):
        settings_from({}, recipe="good")


def test_what_would_be_charged_or_shrunk_for_nothing_is_refused():
    with pytest.raises(InputError, match=r"mean_noise=20\.0 is not allowed"):
        settings_from({"mean_noise": 20.0})
    with pytest.raises(InputError, match=r"shrinkage=0\.5 is not allowed"):
        settings_from({"shrinkage": 0.5})


def test_whole_data_sets_are_batches_where_records_are_sampled_alike():
    assert settings_from({"batch_size": 0}).batch_size == 0
    with pytest.raises(InputError, match="batch_size=0 is not allowed for method='matrix'"):
        settings_from({"batch_size": 0, "method": "matrix"})
    with pytest.raises(InputError, match="batch_size=-1 is not allowed"):
        settings_from({"batch_size": -1})


def test_the_gate_follows_the_method():
    assert settings_from({}).chosen_gate == "clipping-bias"
    assert settings_from({"method": "dpsgd"}).chosen_gate == "none"
    assert settings_from({"gate": "coin"}).chosen_gate == "coin"


def test_every_setting_is_described():
    for field in fields(TrainSettings):
        text = field.metadata.get("help", TrainSettings.__doc__ if field.name == "options" else "")
        assert len(text.split()) > 1, field.name
