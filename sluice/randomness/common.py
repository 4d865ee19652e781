"""Randomness that several workers have in common: each draws the same, and nobody else can."""

from __future__ import annotations

import os
from typing import Any, NoReturn

from sluice._base.errors import InputError
from sluice.randomness.keystream import Keystream
from sluice.randomness.noise import SecureNoise, SeededNoise

# Dropout and augmentation: each worker has records of its own, whose masks must not be those of another's.
_OF_ITS_OWN = "model"


class CommonNoise(SecureNoise):
    """Noise that cannot be predicted, and that all workers with the same key draw alike, call by call.

    Args:
        key: 32 bytes that the operating system of one worker drew for this run of the program, sent to the others and kept
            in memory alone.

    Guarantee:
        Every call reads the keystream of its own number, so no byte is used twice; the key is drawn anew whenever a run is
        resumed. A copy, or a forked child, could use bytes again and is refused. What is each worker's own (the state of
        the model's generators) comes from fresh keys of its own operating system.
    """

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._process = os.getpid()
        self.calls = 0

    def keystream(self) -> Keystream:
        if os.getpid() != self._process:
            raise InputError("the common noise of a run's workers was asked for by another process than a worker.")
        self.calls += 1
        return Keystream(key=self._key, number=self.calls)

    def side_keystream(self, purpose: str) -> Keystream:
        return super().keystream() if purpose == _OF_ITS_OWN else self.keystream()

    def __reduce__(self) -> NoReturn:
        raise InputError("the common noise of a run's workers cannot be copied: noise would be used twice.")

    def __repr__(self) -> str:
        return "CommonNoise()"


class CommonSeededNoise(SeededNoise):
    """`SeededNoise` as several workers use it: the same for all, but for the state of the model's generators.

    Guarantee:
        None against anyone who can guess the seed. Worker 0 draws what a single one would; for any number of workers all
        draw the same samples, decisions and noise.
    """

    def __init__(self, seed: int, *, rank: int, state: dict[str, Any] | None = None) -> None:
        super().__init__(seed)
        self._rank = rank
        if state is not None:
            self.load_state_dict(state)

    @property
    def calls(self) -> int:
        return self._calls

    def side_keystream(self, purpose: str) -> Keystream:
        own = purpose == _OF_ITS_OWN and self._rank > 0
        return super().side_keystream(f"{purpose} of worker {self._rank}" if own else purpose)


__all__ = ["CommonNoise", "CommonSeededNoise"]
