"""Signals that come to whoever starts the workers of a run."""

from __future__ import annotations

import signal
import subprocess
import sys
from typing import Any

import pytest

from sluice.cli import launching

SLEEP = ["sleep", "60"]
IGNORES = [sys.executable, "-c", "import signal, sys; sys.exit(signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN)"]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[subprocess.Popen[Any]]:
    """What was started in place of workers; the first one comes with Ctrl-C."""
    workers: list[subprocess.Popen[Any]] = []
    start = launching._start

    def start_and_interrupt(command: Any, shared: Any, rank: int) -> subprocess.Popen[Any]:
        workers.append(start(SLEEP, shared, rank))
        if rank == 0:
            signal.raise_signal(signal.SIGINT)
        return workers[rank]

    monkeypatch.setattr(launching, "_start", start_and_interrupt)
    return workers


def test_an_interruption_while_workers_are_started_leaves_none_behind(started, capfd):
    assert launching.run_workers(3, [], timeout=20, threads=1) == 1
    assert [worker.returncode for worker in started] == [-signal.SIGINT] * 3
    assert "was ended by SIGINT" in capfd.readouterr().err


def test_workers_ignore_what_the_command_was_told_to_ignore(monkeypatch):
    start = launching._start
    monkeypatch.setattr(launching, "_start", lambda command, shared, rank: start(IGNORES, shared, rank))
    previous = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert launching.run_workers(2, [], timeout=20, threads=1) == 0
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, previous)
