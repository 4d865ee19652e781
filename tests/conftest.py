from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

from sluice.data import DataSplits, load
from sluice.mechanism.registry import KINDS

# pytest-xdist already fills the cores; more threads inside a worker only fight each other.
torch.set_num_threads(1)

# Deadlines would fail on a busy machine for no reason; a fixed seed keeps the default run reproducible.
settings.register_profile("default", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("default")


# Shells start what scripts run in the background with Ctrl-C ignored, and all processes that tests start would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("bigdata") and not os.environ.get("SLUICE_DATA"):
        pytest.skip("SLUICE_DATA is not set: no real data sets here")


@pytest.fixture(scope="session", autouse=True)
def _private_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No test reads or writes the user's own cache. One cache serves the whole run, its parallel workers included."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLUICE_CACHE", str(shared / "sluice-cache"))
        yield


@pytest.fixture
def own_kinds() -> Iterator[None]:
    """Methods that a test registers are gone afterwards, for another test to define them again."""
    before = dict(KINDS)
    yield
    KINDS.clear()
    KINDS.update(before)


@pytest.fixture(scope="session")
def digits() -> DataSplits:
    return load("digits")
