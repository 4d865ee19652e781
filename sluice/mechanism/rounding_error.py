"""How far rounding lets one record move what the others contribute: the bounds that are charged (docs/noise.md, section 6).

A record's gradient is computed in chunks of one fixed shape, so its bits do not depend on which other records there are,
only on kernels that treat all rows of a chunk alike (checked for each model). Records are put into chunks in a random
order. If one more record takes a slot and the record that was there moves to the end, all orders stay equally likely, and
only two chunks differ. What is left to bound is how these two, and the sums over all chunks, are rounded.
"""

from __future__ import annotations

import math

# Half the distance between neighbouring float32 numbers, relative.
UNIT = 2.0**-24

# Sums over up to this many records at once are covered by `SUM_ERROR`.
CHUNK_ROWS = 256

# Records whose gradients are added up in float32, at most, before the sum continues in float64.
BLOCK_ROWS = 1152

# Of a record's bound: the rounding error of a sum. Adding up n float32 terms of length 1 rounds n - 1 times, each time by at
# most UNIT times what has been added up so far: n^2 / 2 UNIT in any order, or 2^-9 for 256. Two parts of a sum differ;
# adding up the parts of a block comes to an eighth of that at most (tests/mechanism/test_rounding_error.py).
SUM_ERROR = 2.0**-8 * (1 + 2.0**-3)

# In the ordinary loop the gradient of a mean loss is divided by the number of records and multiplied with it again, which
# moves every number by up to two units whenever the number of records changes. Relative, with a factor of four to spare:
# what one record's norm or contribution can then differ by.
NORM_ERROR = 2.0**-20


def sum_error(*, chunk_rows: int, ordinary_loop_batch: float = 0.0) -> float:
    """A bound on the rounding error of a sum that one record can change, over the bound on a record's contribution.

    Args:
        chunk_rows: how many records' gradients are added up at once.
        ordinary_loop_batch: the expected batch size of an ordinary loop; 0 where the engine calls the loss.
    """
    in_chunks = SUM_ERROR if chunk_rows <= CHUNK_ROWS else SUM_ERROR * (chunk_rows / CHUNK_ROWS) ** 2
    return in_chunks + (NORM_ERROR / 2 * largest_batch(ordinary_loop_batch) if ordinary_loop_batch else 0.0)


def largest_batch(expected: float) -> float:
    """A size that a Poisson batch exceeds with a probability below 2^-50, by Chernoff's bound."""
    return expected + 10 * math.sqrt(expected) + 20
