from __future__ import annotations

import io
import sys

import pytest

from sluice._base import progress as module
from sluice._base.progress import progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_plain_lines_where_there_is_no_terminal(capsys, monkeypatch):
    monkeypatch.setattr(module, "SECONDS_BETWEEN_LINES", 0.0)
    with progress("scattering", total=30) as advance:
        for _ in range(3):
            advance(10)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.splitlines() == [f"scattering: {done} of 30" for done in (10, 20, 30)]


def test_short_work_says_nothing(capsys):
    with progress("scattering", total=30) as advance:
        advance(30)
    assert capsys.readouterr().err == ""


def test_a_bar_on_a_terminal(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with progress("scattering", total=30) as advance:
        advance(30)
    assert "scattering" in terminal.getvalue()
    assert "30/30" in terminal.getvalue()


@pytest.mark.parametrize("stream", [io.StringIO, Terminal])
def test_silence_on_request(monkeypatch, stream):
    target = stream()
    monkeypatch.setattr(sys, "stderr", target)
    monkeypatch.setattr(module, "SECONDS_BETWEEN_LINES", 0.0)
    with progress("scattering", total=1, shown=False) as advance:
        advance(1)
    assert target.getvalue() == ""
