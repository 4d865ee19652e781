from __future__ import annotations

from collections.abc import Iterator

import pytest

from small_runs import Run


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    while Run.open_runs:
        Run.open_runs.pop().close()
