"""What is published of the path to data of the user's own."""

from __future__ import annotations

import pytest

from sluice.experiments.dataset_path import PATH, is_config_of, keep_path, published_config, with_path
from sluice.experiments.settings import default_settings
from sluice.runs.folder import RunFolder


@pytest.mark.parametrize(
    ("given", "published"),
    [
        ("digits", "digits"),
        ("own.csv", "own.csv"),
        ("/home/smith/own.csv", "own.csv"),
        ("~/images/", "images"),
        ("../own", "own"),
        ("/data/digits", "./digits"),
        ("./digits", "./digits"),
        (".", "."),
    ],
)
def test_the_last_name_of_a_path_is_published_and_all_of_it_kept(tmp_path, given, published):
    settings = default_settings(given, method="dpsgd")
    assert published_config(settings)["dataset"] == published
    with RunFolder.create(tmp_path / "run", config=published_config(settings)) as folder:
        keep_path(folder, settings)
        assert (folder.private / PATH).exists() == (published != given)
        assert with_path(folder, default_settings(published, method="dpsgd")) == settings
        assert is_config_of(settings, folder.config)
    assert is_config_of(settings, settings.to_dict())  # as earlier versions published it
    assert not is_config_of(default_settings("other.csv", method="dpsgd"), folder.config)
