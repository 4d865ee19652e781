"""The bound on rounding is recomputed for every shape that chunks can have, from how sums are really made."""

from __future__ import annotations

import math

import pytest

from sluice.gradients.contributions import block_rows, blocks
from sluice.gradients.costs import fixed_rows
from sluice.mechanism.rounding_error import BLOCK_ROWS, CHUNK_ROWS, SUM_ERROR, UNIT, largest_batch, sum_error


def tree_error(terms: list[int]) -> float:
    """Adding up sums of so many records one after the other, in units of UNIT: each addition rounds what it makes."""
    total, error = terms[0], 0
    for term in terms[1:]:
        total += term
        error += total
    return error


def additions_of_a_block(rows: int, batch: int) -> list[int]:
    """The sums that are added up in float32 before a sum continues in float64, as `RawSum` does."""
    chunks, filled = [], 0
    while filled < batch and (not chunks or sum(chunks) + rows <= BLOCK_ROWS):
        chunks.append(min(rows, batch - filled))
        filled += rows
    return [part.stop - part.start for chunk in chunks for part in blocks(chunk)]


@pytest.mark.parametrize("most", [CHUNK_ROWS, BLOCK_ROWS, 820, 960])
def test_every_shape_is_paid_for(most):
    for expected in [*range(1, 3000), 10_000, 60_000]:
        rows = fixed_rows(expected, most=most)
        size = block_rows(rows)
        assert size <= CHUNK_ROWS
        parts = additions_of_a_block(rows, math.ceil(largest_batch(expected)))
        # Two parts differ, in two sums, and so do the additions of two blocks, which may be those of two workers. What is
        # left over covers the sum over workers, in float64 (docs/distributed.md).
        in_parts = 2 * 2 * tree_error([1] * size)
        left_over = 2.0**-12
        assert (in_parts + 2 * 2 * tree_error(parts)) * UNIT + left_over <= 2 * SUM_ERROR, (expected, rows)


def test_larger_sums_are_charged_with_the_square_of_their_size():
    assert sum_error(chunk_rows=256) == SUM_ERROR
    assert sum_error(chunk_rows=8) == SUM_ERROR
    assert sum_error(chunk_rows=512) == 4 * SUM_ERROR


@pytest.mark.parametrize("samples", [0, 1, 255, 256, 257, 1000, 1088, 1152])
def test_blocks_cover_all_samples_evenly(samples):
    parts = blocks(samples)
    assert [i for part in parts for i in range(samples)[part]] == list(range(samples))
    sizes = [len(range(samples)[part]) for part in parts]
    assert max(sizes) <= CHUNK_ROWS
    assert max(sizes) - min(sizes) <= len(sizes)
