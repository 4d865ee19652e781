"""Which records are kept aside, decided for each record by itself.

A split by drawn positions would depend on how many records there are: with one more, a fifth of all records would change
sides, and two data sets that differ in one record would make training sets that differ in hundreds. Here the side of a
record follows from a hash of what it holds, so neighbouring data sets make neighbouring (or equal) training sets.
"""

from __future__ import annotations

import hashlib

import numpy as np

from sluice._base.errors import InputError
from sluice._base.validate import open_fraction
from sluice.data.examples import Examples

_REMEDIES = {
    "test": (
        "make the parts yourself (in a file: x_train, y_train, x_test, y_test; in a folder: train and test). In Python, "
        "load(..., test_fraction=...) sets the share"
    ),
    "held-out": "hold out another share (--hold-out; in Python hold_out(..., fraction))",
}


def hold_out(train: Examples, fraction: float, seed: int) -> tuple[Examples, Examples]:
    """Split the training records: those that remain, and a held-out share to choose settings with.

    The test set plays no role. Each record is held out with probability ``fraction``, so the share is not exact.

    **Guarantee.** That of `split_off`.
    """
    return split_off(train, fraction, part="held-out", seed=seed)


def split_off(examples: Examples, fraction: float, *, part: str, seed: int) -> tuple[Examples, Examples]:
    """The records that stay, and those that fall into the named part, both in their old order.

    **Guarantee.** Every record lands on exactly one side. Which one is a function of that record (its inputs and its
    label) and of ``fraction``, ``part`` and ``seed`` alone, the same on every machine; equal records land on the same
    side. So adding or removing a record adds or removes it on its own side and changes nothing else.

    A side without records is refused. That error depends on the data, and on a single record where a side holds just
    one; with n different records it has the probability ``(1 - fraction)^n + fraction^n``.
    """
    open_fraction(fraction=fraction)
    if not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed < 2**32:
        raise InputError(f"seed={seed!r} is not allowed: it must be an integer from 0 to {2**32 - 1}.")
    key = f"sluice split, version 1: {part}, seed {seed}\n".encode()
    falls = np.array([_drawn(key, digest) < fraction * 2**64 for digest in examples.digests()], dtype=bool)
    if falls.all() or not falls.any():
        raise InputError(
            f"a share of {fraction} for {part} records is not allowed for so few: the side of each record is drawn by a hash of "
            f"what it holds, and {'all' if falls.any() else 'none'} of them came out as {part} records. Add records, or "
            f"{_REMEDIES.get(part, 'choose another share')}."
        )
    return examples.subset(np.flatnonzero(~falls)), examples.subset(np.flatnonzero(falls))


def _drawn(key: bytes, digest: bytes) -> int:
    """A number below 2^64 that looks random and belongs to this record and this split."""
    return int.from_bytes(hashlib.sha256(key + digest).digest()[:8], "big")
