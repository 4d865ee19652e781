"""What the workers' threads do when Python ends: gloo's need it to drop tensors, and abort the process without it."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import atexit, os, sys
import torch
import torch.distributed as dist
from sluice.training.distributed.group import WorkerGroup

def threads():
    return len(os.listdir("/proc/self/task"))

dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=0, world_size=1)
before = threads()
atexit.register(lambda: print(during > before, threads() - before))  # the last to be called
workers = WorkerGroup(timeout=5.0)
workers.total(torch.ones(1))
during = threads()
if sys.argv[2] == "destroyed":
    dist.destroy_process_group()
"""


def threads_left(tmp_path, how):
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "store"), how]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.split()


def test_no_thread_of_the_group_is_left_when_python_ends(tmp_path):
    assert threads_left(tmp_path, "as it is") == ["True", "0"]


def test_a_program_may_take_all_groups_down_itself(tmp_path):
    had_threads, left = threads_left(tmp_path, "destroyed")
    assert had_threads == "True"
    assert int(left) <= 0
