"""``sluice features``: what it lists, builds and draws."""

from __future__ import annotations

import json

import pytest

from sluice.cli import main

TINY = "whitened-scattering:references=40"


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SLUICE_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


def run(capsys, *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stop:
        main(["features", *arguments])
    out, err = capsys.readouterr()
    return int(stop.value.code or 0), out, err


def test_the_list_says_what_each_feature_is_made_from(capsys):
    code, out, _ = run(capsys, "list", "--json")
    assert code == 0
    listed = {each["name"]: each for each in json.loads(out)["features"]}
    assert listed["patches"]["prior"] == "dead leaves"
    assert "No record of any data set" in listed["stroke-net"]["origin"]
    assert "word index" in listed["weighted-words"]["origin"]


def test_building_twice_gives_the_same_bytes(capsys, tmp_path, monkeypatch):
    built = []
    for cache in ("first", "second"):
        monkeypatch.setenv("SLUICE_CACHE", str(tmp_path / cache))
        code, out, _ = run(capsys, "build", TINY, "--shape", "1x16x16", "--json")
        assert code == 0
        built.append(json.loads(out)["built"][0]["sha256"])
    assert built[0] == built[1]


def test_a_sheet_is_drawn(capsys, tmp_path):
    code, out, _ = run(capsys, "show", TINY, "--shape", "1x16x16", "--output", "sheet.png")
    assert code == 0
    assert "No record of any data set" in out
    assert (tmp_path / "sheet.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("build", "plain"), "nothing to build"),
        (("build", "stroke-net", "--shape", "28x28"), "CHANNELSxHEIGHTxWIDTH"),
        (("build", "stroke-net", "--shape", "3x28x28"), "grey images"),
        (("show", "patches:colour"), "has no option colour"),
        (("show", "leaves"), "must be one of"),
    ],
)
def test_what_is_wrong_is_said(capsys, arguments, message):
    code, _, err = run(capsys, *arguments)
    assert code == 2
    assert message in err
