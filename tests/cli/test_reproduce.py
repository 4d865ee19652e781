from __future__ import annotations

import json

import pytest

from sluice.cli import main


def run(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    return int(stop.value.code or 0), capsys.readouterr().out


def test_json_holds_every_cell(capsys):
    code, out = run(["reproduce", "q-sup", "--json"], capsys)
    result = json.loads(out)
    assert code == 0
    assert (result["explained"], result["explained_with_published_noise"], result["total"]) == (24, 21, 24)
    assert len(result["cells"]) == 24
    first = result["cells"][0]
    assert first["printed"] == "1.29"
    assert first["held_epsilon"] == 3
    assert first["claimed_table_reading"] == pytest.approx(1.2944, abs=5e-5)
    assert first["corrected"] == "1.12"
    assert "claimed" in result["status"]


def test_text_says_what_the_table_is_worth(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    code, out = run(["reproduce", "q-sup"], capsys)
    assert code == 0
    assert "24 of 24 cells explained" in out
    assert "Claimed" in out.splitlines()[0]
    assert "None of these factors is part of a guarantee." in out
    assert sum(line.startswith(("MNIST", "FMNIST", "CIFAR-10", "IMDB")) for line in out.splitlines()) == 24


def test_help_has_an_example(capsys):
    code, out = run(["reproduce", "q-sup", "--help"], capsys)
    assert code == 0
    assert "Example: sluice reproduce q-sup" in out
