"""The thread that keeps a worker's heart beating ends before Python does."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

from sluice.training.distributed.heartbeat import Heart


class SlowStore:
    """A store whose beats take their time, as on a busy machine."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}
        self.under_way = threading.Event()

    def set(self, key: str, value: str) -> None:
        if threading.current_thread() is not threading.main_thread():
            self.under_way.set()
            time.sleep(0.3)
        self.values[key] = value

    def check(self, keys: list[str]) -> bool:
        return all(key in self.values for key in keys)

    def get(self, key: str) -> bytes:
        return self.values[key].encode()


def heart(store: SlowStore, *, rank: int = 0, size: int = 1, timeout: float = 5.0) -> Heart:
    return Heart(store, session="0", rank=rank, size=size, timeout=timeout)


def test_a_beat_is_over_when_the_process_ends():
    """Were it not, Python would take the thread down inside the store, and C++ would abort the process."""
    program = f"""
import atexit, sys, threading
sys.path.insert(0, {str(__file__.rpartition("/")[0])!r})
atexit.register(lambda: print([thread.name for thread in threading.enumerate()]))  # the last to be called
from test_heartbeat import SlowStore, heart
store = SlowStore()
heart(store)
store.under_way.wait()
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ended.stdout.strip() == "['MainThread']", ended.stderr


def test_worker_0_beats_until_the_others_have_left():
    store = SlowStore()
    first, second = heart(store, size=2), heart(store, rank=1, size=2)
    leaving = threading.Thread(target=first.leave)
    leaving.start()
    leaving.join(0.2)
    assert leaving.is_alive()
    assert first._thread.is_alive()
    second.leave()
    leaving.join()
    assert not first._thread.is_alive()
    assert not second._thread.is_alive()


def test_worker_0_does_not_wait_for_ever_for_one_that_is_killed_while_it_leaves():
    first = heart(SlowStore(), size=2, timeout=0.5)
    began = time.monotonic()
    first.leave()
    assert 0.5 <= time.monotonic() - began < 5.0
