from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest


class Server:
    """The process that forks workers: see server.py."""

    def __init__(self) -> None:
        single = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("server.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | single,
        )
        self._answer()

    def run(
        self, job: str, *, workers: int, kill: dict[str, Any] | None = None, **arguments: Any
    ) -> list[dict[str, Any]]:
        """What each worker answers to a job of jobs.py: its ``result`` or ``error``, exit ``code`` and ``seconds``."""
        order = {"job": job, "workers": workers, "arguments": arguments} | ({} if kill is None else {"kill": kill})
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def results(self, job: str, *, workers: int, **arguments: Any) -> list[Any]:
        """The same of a job that ends well on all workers."""
        answers = self.run(job, workers=workers, **arguments)
        assert all("result" in answer for answer in answers), [answer.get("error") for answer in answers]
        return [answer["result"] for answer in answers]

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.close()


def difference(found: Sequence[float], expected: Sequence[float]) -> float:
    """The distance of two vectors, relative."""
    return math.dist(found, expected) / math.hypot(*expected)


@pytest.fixture(scope="session", name="difference")
def _difference() -> Any:
    return difference
