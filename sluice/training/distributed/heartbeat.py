"""Who of the workers is still alive: each keeps counting in the store that they share, from a thread of its own."""

from __future__ import annotations

import atexit
import os
import socket
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

# Beats that a worker may miss before it is suspected, where a connection was closed.
_MISSED = 5
_SUSPECTED = 1.0


class Heart:
    """This worker's heartbeat, and an ear for those of the others.

    Args:
        store: of the process group. Another connection to it is made where that is possible.
        session: a prefix that no other group has used in this store.
        timeout: seconds of silence after which a worker counts as lost.
    """

    def __init__(self, store: Any, *, session: str, rank: int, size: int, timeout: float) -> None:
        self._store = store.clone() if hasattr(store, "clone") else store
        self._session, self._rank, self._size = session, rank, size
        self.timeout = timeout
        self.interval = min(0.5, timeout / 20)
        self._heard = [(b"", time.monotonic())] * size
        self._stopped = threading.Event()
        self._beats = 0
        self._beat()
        self._store.set(
            self._key("who", rank), f"{socket.gethostname()}, process {os.getpid()}"
        )  # after the first beat
        self._thread = threading.Thread(target=self._keep_beating, name="sluice-heartbeat", daemon=True)
        self._thread.start()
        atexit.register(self.stop)

    def stop(self) -> None:
        """Beat no more.

        Python takes threads down wherever they are when it ends, and aborts the process if that is inside the store, which is
        not Python. So the last beat is waited for.
        """
        self._stopped.set()
        self._thread.join(self.timeout)

    def leave(self) -> None:
        """Stop after all others have, if this is worker 0: it may keep the store, and they still look into it."""
        if self._rank == 0:
            self._wait_for_words("ended")
        self.stop()
        self.say("ended", "")  # nothing is asked of the store after that

    def say(self, what: str, text: str) -> None:
        """Leave a word for the others: why this worker "left", that it "noticed" that another one did, or has "ended"."""
        try:
            self._store.set(self._key(what, self._rank), text)
        except RuntimeError:
            return  # whoever kept the store is gone, and the others will see that for themselves

    def missing(self, *, patience: float) -> list[int]:
        """Wait until all workers have been heard from once; those that were not in so many seconds."""
        deadline = time.monotonic() + patience
        while True:
            missing = [rank for rank in range(self._size) if not self._store.check([self._key("who", rank)])]
            if not missing or time.monotonic() > deadline:
                return missing
            time.sleep(0.01)

    def silent(self, *, longer_than: float) -> list[int]:
        """The workers that have not been heard from for so many seconds."""
        now = time.monotonic()
        for rank, beat in enumerate(self._read("beat")):
            if beat != self._heard[rank][0]:
                self._heard[rank] = (beat, now)
        return [rank for rank, (_, when) in enumerate(self._heard) if now - when > longer_than]

    def find_lost(self, reason: str) -> str:
        """After an operation has failed: which worker is the cause, in words."""
        self.say("noticed", reason)
        deadline = time.monotonic() + self.timeout
        suspected = max(_MISSED * self.interval, min(_SUSPECTED, self.timeout / 2))  # seconds
        try:
            while time.monotonic() < deadline:
                for rank, text in self._words("left").items():
                    return f"{self.name(rank)} has stopped: {text}"
                noticed = self._words("noticed")
                silent = [r for r in self.silent(longer_than=suspected) if r not in noticed]
                if silent:
                    return f"{self.name(silent[0])} is lost"
                time.sleep(self.interval / 2)
        except RuntimeError:
            return "worker 0, or whoever else keeps the store of the process group, is lost"
        return f"an operation over all workers failed ({reason.splitlines()[0]})"

    def _wait_for_words(self, what: str) -> None:
        """Wait for a word of all others, but no longer than for a heartbeat: one of them may be killed before it says it."""
        deadline = time.monotonic() + self.timeout
        with suppress(RuntimeError):
            while len(self._words(what)) < self._size - 1 and time.monotonic() < deadline:
                time.sleep(0.01)

    def name(self, rank: int) -> str:
        who = self._store.get(self._key("who", rank)).decode()
        return f"worker {rank} of {self._size} ({who})"

    def _words(self, what: str) -> Mapping[int, str]:
        found = {}
        for rank in range(self._size):
            key = self._key(what, rank)
            if rank != self._rank and self._store.check([key]):
                found[rank] = self._store.get(key).decode()
        return found

    def _read(self, what: str) -> list[bytes]:
        found: list[bytes] = self._store.multi_get([self._key(what, rank) for rank in range(self._size)])
        return found

    def _key(self, what: str, rank: int) -> str:
        return f"sluice/{self._session}/{what}/{rank}"

    def _beat(self) -> None:
        self._beats += 1
        self._store.set(self._key("beat", self._rank), str(self._beats))

    def _keep_beating(self) -> None:
        while not self._stopped.wait(self.interval):
            try:
                self._beat()
            except RuntimeError:
                return  # the store is gone: so will be whoever kept it


__all__ = ["Heart"]
