from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from child_server import ChildServer


class Server(ChildServer):
    """The process that forks workers: see server.py."""

    def __init__(self) -> None:
        super().__init__(Path(__file__).with_name("server.py"))

    def run(
        self, job: str, *, workers: int, kill: dict[str, Any] | None = None, **arguments: Any
    ) -> list[dict[str, Any]]:
        """What each worker answers to a job of jobs.py: its ``result`` or ``error``, exit ``code`` and ``seconds``."""
        order = {"job": job, "workers": workers, "arguments": arguments} | ({} if kill is None else {"kill": kill})
        answers: list[dict[str, Any]] = self.ask(order)
        return answers

    def results(self, job: str, *, workers: int, **arguments: Any) -> list[Any]:
        """The same of a job that ends well on all workers."""
        answers = self.run(job, workers=workers, **arguments)
        assert all("result" in answer for answer in answers), [answer.get("error") for answer in answers]
        return [answer["result"] for answer in answers]


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
