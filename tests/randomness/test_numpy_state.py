# ruff: noqa: NPY002  (the global generator is what this is about)
from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from sluice.randomness import numpy_state


@pytest.fixture(autouse=True)
def _put_back() -> Iterator[None]:
    generator, state = np.random.get_bit_generator(), np.random.get_state()
    yield
    np.random.set_bit_generator(generator)
    np.random.set_state(state)


def state_after(seed: int, *, normals: int) -> Any:
    """Between two normals of a pair one is in store."""
    np.random.seed(seed)
    np.random.standard_normal(normals)
    return np.random.get_state()


def same(one: Any, other: Any) -> bool:
    return bool(np.array_equal(one[1], other[1])) and (one[0], *one[2:]) == (other[0], *other[2:])


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("before", [0, 1, 2, 777])
@pytest.mark.parametrize("after", [0, 3])
def test_exchanging_is_getting_and_setting(known: bool, before: int, after: int, monkeypatch: Any) -> None:
    monkeypatch.setattr(numpy_state, "_layout_is_known", lambda: known)
    new, old = state_after(1, normals=after), state_after(2, normals=before)
    assert same(numpy_state.exchanged(new), old)
    assert same(np.random.get_state(), new)
    assert same(numpy_state.exchanged(old), new)
    assert same(np.random.get_state(), old)


def test_words_are_a_copy() -> None:
    old = numpy_state.exchanged(state_after(1, normals=0))
    words = old[1].copy()
    np.random.random(5000)
    assert np.array_equal(old[1], words)


def test_the_layout_is_known_here() -> None:
    assert numpy_state._layout_is_known()
