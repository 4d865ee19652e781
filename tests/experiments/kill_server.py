"""Trains in forked children and kills them: run by test_kills.py as a process of its own.

It imports everything once and stays single-threaded, so that a child begins at once and forking is safe. Orders and
answers are lines of JSON on standard input and output.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import sluice.runs.certificate
import sluice.runs.derived
from sluice.data import DataSplits, load
from sluice.experiments import judge
from sluice.experiments import run as training
from sluice.experiments.run import Progress, Training, recorded_run
from sluice.experiments.settings import settings_from
from sluice.training import keeping
from sluice.training.selective_release import AcceptedBatch, SelectiveReleaseExecutor
from sluice.training.weights import WeightUpdater


def log_updates(log: str) -> None:
    """Note each update when its noise has been drawn, before it is kept or applied: its digest and its first value."""
    original = SelectiveReleaseExecutor.publish

    def publish(self: SelectiveReleaseExecutor, content: AcceptedBatch) -> dict[str, Any]:
        published = original(self, content)
        gradient = [value.flatten() for value in published["gradient"].values()]
        digest = hashlib.sha256(b"".join(value.numpy().tobytes() for value in gradient)).hexdigest()
        with open(log, "a") as stream:
            stream.write(f"{digest} {gradient[0][0].item()!r}\n")
        return published

    SelectiveReleaseExecutor.publish = publish


SECTOR = 512
"""Of a disk, which writes no less where a file is written to past the system's memory."""


class Countdown:
    """Kills the process at the chosen call of those that are watched; counts them all."""

    def __init__(self, chosen: int | None) -> None:
        self.count = 0
        self.names: list[str] = []
        self._chosen = chosen
        self._lock = threading.Lock()

    def watch(self, owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def watched(*args: Any, **options: Any) -> Any:
            self.reached(f"before {name}")
            result = original(*args, **options)
            self.reached(f"after {name}")
            return result

        setattr(owner, name, watched)

    def watch_writes(self) -> None:
        """Only half of a write may reach the file before the end."""
        for name in ("write", "pwrite"):
            self._watch_writes(name)

    def _watch_writes(self, name: str) -> None:
        original = getattr(os, name)

        def watched(descriptor: int, content: Any, *place: int) -> int:
            self.reached(f"before {name}")
            half = len(content) // 2
            if place:
                half -= half % SECTOR
            if self._chosen == self.count + 1:
                original(descriptor, memoryview(content)[:half], *place)
            self.reached(f"half of {name}")
            return original(descriptor, content, *place)

        setattr(os, name, watched)

    def reached(self, name: str) -> None:
        with self._lock:  # the disk is waited for in another thread
            self.count += 1
            self.names.append(name)
            if self.count == self._chosen:
                os.kill(os.getpid(), signal.SIGKILL)


def watch_everything(countdown: Countdown) -> None:
    """Every place where what is on disk, or in the weights, changes; and the long calculations between them."""
    for owner, name in (
        (os, "mkdir"),
        (os, "fsync"),
        (os, "fdatasync"),
        (os, "ftruncate"),
        (os, "link"),
        (os, "replace"),
        (os, "unlink"),
        (Path, "write_bytes"),
        (WeightUpdater, "apply"),
        (training, "planned_mechanism"),
        (judge, "share_right"),
        (sluice.runs.certificate, "spending"),
    ):
        countdown.watch(owner, name)
    countdown.watch_writes()


def train(order: dict[str, Any], splits: DataSplits, report: Callable[[Progress], None]) -> None:
    path = Path(order["run"])
    options: dict[str, Any] = {"splits": splits, "report": report, **order.get("options", {})}
    if (path / "public" / "config.json").exists():
        recorded = recorded_run(path)
        if recorded.result is None:
            Training(settings=recorded.settings, mechanism=recorded.mechanism, **options).resume(path)
    else:
        Training(settings=settings_from(order["settings"]), **options).start(path)


def child(order: dict[str, Any], splits: DataSplits, answer: int) -> None:
    countdown = Countdown(order.get("kill_at_call"))
    keeping._MOST_ENTRIES = 2  # a checkpoint in the middle of the run, and entries that are written over
    log_updates(order["log"])
    if order.get("watch"):
        watch_everything(countdown)
    train(order, splits, lambda progress: None)
    names = list(countdown.names)
    with os.fdopen(answer, "w") as stream:
        json.dump(names, stream)


def carry_out(order: dict[str, Any], splits: DataSplits) -> dict[str, Any]:
    reader, writer = os.pipe()
    began = time.monotonic()
    process = os.fork()
    if process == 0:
        os.close(reader)
        code = 1
        try:
            child(order, splits, writer)
            code = 0
        except Exception:
            sys.excepthook(*sys.exc_info())
        finally:
            sys.stderr.flush()
            os._exit(code)
    os.close(writer)
    if "kill_after" in order:
        deadline = began + order["kill_after"]
        while (left := deadline - time.monotonic()) > 0 and os.waitid(
            os.P_PID, process, os.WEXITED | os.WNOHANG | os.WNOWAIT
        ) is None:
            time.sleep(min(left, 0.002))
        os.kill(process, signal.SIGKILL)
    with os.fdopen(reader) as stream:
        names = stream.read()
    _, status = os.waitpid(process, 0)
    return {
        "code": os.waitstatus_to_exitcode(status),
        "threads": len(os.listdir("/proc/self/task")),
        "seconds": time.monotonic() - began,
        "calls": json.loads(names) if names else [],
    }


def main() -> None:
    torch.set_num_threads(1)
    splits = load("digits")
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        # Calibrates and makes an optimizer, for which torch imports a lot: most of the time of every child otherwise.
        Training(settings=settings_from(order["settings"]), splits=splits)
        print(json.dumps(carry_out(order, splits)), flush=True)


if __name__ == "__main__":
    main()
