from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from sluice._base.errors import DataError
from sluice.data.parsers import flatten, idx


def encode(array: np.ndarray) -> bytes:
    return bytes([0, 0, 8, array.ndim]) + b"".join(n.to_bytes(4, "big") for n in array.shape) + array.tobytes()


@given(arrays.arrays(np.uint8, arrays.array_shapes(min_dims=1, max_dims=4, min_side=0, max_side=5)))
def test_idx_round_trip(array: np.ndarray) -> None:
    decoded = idx(encode(array))
    assert decoded.shape == array.shape
    np.testing.assert_array_equal(decoded, array)


@given(
    arrays.arrays(np.uint8, arrays.array_shapes(min_dims=1, max_dims=3, max_side=4)),
    st.integers(1, 60),
    st.binary(min_size=1, max_size=3),
)
def test_idx_refuses_what_is_not_whole(array: np.ndarray, cut: int, extra: bytes) -> None:
    content = encode(array)
    for wrong in (content[: max(0, len(content) - cut)], content + extra):
        with pytest.raises(DataError, match="idx file"):
            idx(wrong)


def test_idx_refuses_other_types() -> None:
    with pytest.raises(DataError, match="unsigned bytes"):
        idx(b"\x00\x00\x0d\x01\x00\x00\x00\x00")
    with pytest.raises(DataError, match="promises shape"):
        idx(b"\x00\x00\x08\x04" + b"\xff" * 16)


@given(st.lists(st.lists(st.integers(0, 2**31 - 1), max_size=5), max_size=6))
def test_flatten_keeps_every_list(lists: list[list[int]]) -> None:
    ids, offsets = flatten(lists)
    assert [ids[a:b].tolist() for a, b in pairwise(offsets)] == lists
