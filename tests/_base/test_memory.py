from __future__ import annotations

import platform
import subprocess
import sys

import pytest

_FAULTS = """
import ctypes, resource, sys
import torch
from sluice._base.memory import keep_freed_memory
for threshold in (-1, -3):
    ctypes.CDLL(None).mallopt(threshold, 1 << 17)
if sys.argv[1] == "keep":
    assert keep_freed_memory()
def step():
    big = [torch.ones(1 << 21) for _ in range(6)]
for _ in range(3):
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(4):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(sys.platform != "linux" or "glibc" not in platform.libc_ver(), reason="needs glibc")
def test_memory_that_was_freed_is_not_fetched_again() -> None:
    def faults(how: str) -> int:
        run = subprocess.run([sys.executable, "-c", _FAULTS, how], check=True, capture_output=True, text=True)
        return int(run.stdout)

    assert faults("keep") < 1000 < faults("give back")
    # The user's own choice is respected.
    chosen = "import os; os.environ['MALLOC_TRIM_THRESHOLD_'] = '1'; from sluice._base.memory import keep_freed_memory"
    assert (
        subprocess.run([sys.executable, "-c", f"{chosen}; assert not keep_freed_memory()"], check=True).returncode == 0
    )
