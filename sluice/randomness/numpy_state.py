"""The state of numpy's global generator, put in and taken out without its 624 words passing through Python one by one.

``np.random.get_state`` and ``set_state`` take longer than all else that a small release does with randomness. The words have
an address that numpy documents (``BitGenerator.ctypes``); what lies there is compared with what ``get_state`` says, once.
"""

# The global generator is what data sets use.
# ruff: noqa: NPY002

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import numpy as np
from numpy.random.mtrand import get_bit_generator

#: Words of 32 bits, behind which the position among them stands.
_WORDS = 624

_Memory = ctypes.c_uint32 * (_WORDS + 1)

#: As ``np.random.get_state()`` gives it: name, words, position, whether a normal is in store, and which.
State = tuple[Any, ...]


def exchanged(state: State) -> State:
    """Put the generator into a state, and give the one that it was in."""
    generator = get_bit_generator()
    if not (type(generator) is np.random.MT19937 and _layout_is_known()):
        before: Any = np.random.get_state()
        np.random.set_state(state)
        return tuple(before)
    memory = _memory_of(generator)
    words, normal = memory.copy(), _taken_normal(memory)
    _, new_words, position, has_normal, _ = state
    memory[:_WORDS], memory[_WORDS] = new_words, position
    if has_normal:
        np.random.set_state(state)
    return "MT19937", words[:_WORDS], int(words[_WORDS]), int(normal is not None), normal or 0.0


def _memory_of(generator: Any) -> np.ndarray:
    return np.frombuffer(memoryview(_Memory.from_address(generator.ctypes.state_address)), dtype=np.uint32)


def _taken_normal(memory: np.ndarray) -> float | None:
    """The normal that numpy has in store, if there is one. Afterwards there is none, and words may be others than before.

    Normals are made in pairs: one that does not move the generator is the second of a pair.
    """
    before = memory.copy()
    drawn = float(np.random.standard_normal())
    if np.array_equal(memory, before):
        return drawn
    np.random.standard_normal()
    return None


@cache
def _layout_is_known() -> bool:
    """Whether words and position lie where they are looked for; numpy promises their address alone."""
    generator = np.random.MT19937(0)
    state: Any = generator.state
    state["state"]["pos"] = 77
    generator.state = state
    memory = _memory_of(generator)
    return np.array_equal(memory[:_WORDS], state["state"]["key"]) and memory[_WORDS] == 77
