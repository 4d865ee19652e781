"""Randomness inside models and data sets (dropout, augmentation): from the run's own source, never from a global seed.

Such modules draw from process-wide generators, one number after the other for the whole batch. Whoever knows the seed
of these knows every mask, and a record more in the batch shifts those of all others; then sums differ by far more than
one record's gradient. With masks that nobody knows and that are independent from record to record, the masks of the
others can be held fixed in the proof, and one record moves the sum by its own contribution alone.
"""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sluice._base.interrupts import uninterrupted
from sluice.randomness import numpy_state
from sluice.randomness.keystream import Keystream
from sluice.randomness.noise import NoiseSource

# The Mersenne Twister, which torch, numpy and Python all use on CPUs, has this many words of 32 bits.
_WORDS = 624
# Where torch's generator state keeps them, as 64-bit integers: behind seed, counters and position.
_TORCH_HEADER = 24


class ModelRandomness:
    """A state of the process-wide generators of torch, numpy and Python that comes whole from a source of noise.

    Between `enter` and `leave`, or inside ``with``, they are in this state; outside they are what they were. Entering
    again continues where the last block ended, so one object serves all pieces of a batch.

    Guarantee:
        Each object has 19,937 bits of state for each generator on the CPU (64 on a GPU), drawn by the source: secret
        if the source is secure, repeatable if it is seeded. Nothing that happens inside, Ctrl-C included, changes what is drawn
        outside.
    """

    def __init__(self, source: NoiseSource) -> None:
        self._own: dict[str, Any] = _drawn_state(source.side_keystream("model"))
        self._outer: dict[str, Any] | None = None

    def enter(self) -> None:
        with (
            uninterrupted()
        ):  # half an exchange would lose one of the two states, or give one generator's to the other side
            if self._outer is None:
                self._outer = _exchanged(self._own)

    def leave(self) -> None:
        with uninterrupted():
            if self._outer is not None:
                self._own = _exchanged(self._outer)
                self._outer = None

    def __enter__(self) -> None:
        try:
            self.enter()
        except BaseException:  # a signal that waited; the block that would leave is not entered
            self.leave()
            raise

    def __exit__(self, *_: object) -> None:
        self.leave()


def _drawn_state(stream: Keystream) -> dict[str, Any]:
    words = stream.read(3 * _WORDS, np.uint32).reshape(3, _WORDS)
    words[:, 0] |= np.uint32(1 << 31)  # the one state that is not allowed, all zeros, cannot come
    for_torch, for_numpy, for_python = words
    state: dict[str, Any] = {
        "torch": _torch_state(for_torch),
        "numpy": ("MT19937", for_numpy, _WORDS, 0, 0.0),
        "python": (3, (*for_python.tolist(), _WORDS), None),
    }
    if _cuda():
        state["cuda"] = _cuda_states(stream)
    return state


def _torch_state(words: np.ndarray) -> Tensor:
    state = _just_seeded().clone()
    state.numpy()[_TORCH_HEADER : _TORCH_HEADER + 8 * _WORDS].view(np.int64)[:] = words
    return state


@cache
def _just_seeded() -> Tensor:
    """The state of a generator that makes new words from those it has before it gives out the first number."""
    return torch.Generator().manual_seed(0).get_state()


def _cuda_states(stream: Keystream) -> list[Tensor]:
    seeds = (stream.read(torch.cuda.device_count(), np.uint64) >> np.uint64(1)).tolist()
    return [torch.Generator(f"cuda:{device}").manual_seed(seed).get_state() for device, seed in enumerate(seeds)]


def _exchanged(state: dict[str, Any]) -> dict[str, Any]:
    """Put the generators into a state, and give the one that they were in."""
    before: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "numpy": numpy_state.exchanged(state["numpy"]),
        "python": random.getstate(),
    }
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    if _cuda():
        before["cuda"] = torch.cuda.get_rng_state_all()
    if "cuda" in state:
        torch.cuda.set_rng_state_all(state["cuda"])
    return before


def _cuda() -> bool:
    # Whether it is available takes longer to find out, and one that is not never is initialized.
    return bool(torch.cuda.is_initialized())


__all__ = ["ModelRandomness"]
