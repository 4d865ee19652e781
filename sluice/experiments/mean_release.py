"""The one release before training that some runs make: the mean of the rows of features."""

from __future__ import annotations

import hashlib

from safetensors.torch import load, save
from torch import Tensor

from sluice._base.errors import DataError
from sluice._base.files import read_bytes, sha256_hex, write_atomically
from sluice.features import private_row_mean
from sluice.randomness.noise import NoiseSource, SecureNoise, SeededNoise
from sluice.runs.folder import RunFolder
from sluice.runs.ledger import Ledger, read_ledger
from sluice.runs.public_files import publish

MEAN = "mean.safetensors"


def released_mean(
    raw_rows: Tensor, *, noise_multiplier: float, seed: int | None, folder: RunFolder, ledger: Ledger
) -> Tensor:
    """The released mean of the rows of a run: drawn once, and read from the run's folder ever after.

    Guarantee:
        One Gaussian release with this noise multiplier, however often the run is interrupted and resumed; the ledger's
        first line has charged it. What was drawn is kept in ``private/`` before anything depends on it, so until then no
        one has seen it and it may be drawn again. Where the ledger names a mean that is gone the run is refused: another
        draw would be a second release.
    """
    kept = folder.private / MEAN
    logged = read_ledger(ledger.path).published.get(MEAN)
    if not kept.exists():
        if logged is not None and seed is None:
            raise DataError(
                f"{kept} is missing though it was released: restore it, or start a new run (its cost adds to this one's)."
            )
        mean = private_row_mean(
            raw_rows, noise_multiplier=noise_multiplier, public_size=len(raw_rows), noise=_noise(seed)
        )
        write_atomically(kept, save({"mean": mean}), public=False)
    content = read_bytes(kept)
    if logged is not None and logged != sha256_hex(content):
        raise DataError(f"{kept} is not the mean that was released: restore it from {folder.public / MEAN}.")
    publish(folder, MEAN, content, ledger)
    return load(content)["mean"]


def _noise(seed: int | None) -> NoiseSource:
    """Noise of its own: a seeded run must not use the noise of its training twice."""
    if seed is None:
        return SecureNoise()
    return SeededNoise(int.from_bytes(hashlib.sha256(f"sluice mean {seed}".encode()).digest()[:7], "big"))


__all__ = ["MEAN", "released_mean"]
