"""The cost model: fixed, documented, and without influence on results.

Costs are multiply-adds for each sample. The weights of the other terms were fitted once to measured times on a CPU
with 256-bit vectors; being off by a factor of two costs some speed and nothing else. A timing autotuner would choose
differently from run to run.
"""

from __future__ import annotations

import math
from functools import cache

from sluice.gradients.layers.correlation import Geometry
from sluice.mechanism.rounding_error import CHUNK_ROWS

#: One element read, changed and written costs about as much as this many multiply-adds of a large matrix product.
_TRAFFIC = 12.0
#: The same for one element that is only read, or only written, in one long run.
STREAM = 4.0

#: The largest block of memory that glibc keeps for later.
_ALLOCATED = 32 * 2**20

#: How much slower multiply-adds are in double precision, the conversion included.
DOUBLE = 3.0


def _small_products(size: int) -> float:
    """How much slower multiply-adds are in many products of small matrices, of this size, than in one large product."""
    return 1.15 * (1 + 16 / size)


def pixel_gram(geometry: Geometry) -> float:
    """Norms from the Gram matrix of pixels (`window_gram`), in double precision."""
    pixels, positions = geometry.pixels, geometry.positions
    products = pixels**2 * geometry.image_channels * _small_products(pixels)
    products += positions**2 * geometry.map_channels * _small_products(positions)
    shifts = (geometry.kernel[0] * pixels + sum(geometry.kernel[1:]) * positions) * positions
    return DOUBLE * products + 2 * _TRAFFIC * (shifts / 4 + 2 * positions**2)


def window_gram(geometry: Geometry) -> float:
    """Norms from the Gram matrix of windows, in double precision."""
    window, positions = geometry.image_channels * geometry.kernel_size, geometry.positions
    products = positions**2 * (window + geometry.map_channels) * _small_products(positions)
    return DOUBLE * products + 2 * _TRAFFIC * (positions * window + 2 * positions**2)


def weight_gradient(geometry: Geometry) -> float:
    """The ordinary weight gradient, which a weighted sum needs after norms by Gram matrices."""
    return float(geometry.positions * geometry.weight_size)


def explicit(geometry: Geometry, *, then_sum: bool, compiled: bool) -> float:
    """Per-sample gradients, and, if a weighted sum follows, reading them a second time."""
    if compiled:
        # The compiled kernel copies no windows, takes norms on the way, and writes gradients only if they are kept.
        return weight_gradient(geometry) * _tiled(geometry) + STREAM * (2 if then_sum else 0) * geometry.weight_size
    copied = geometry.positions * geometry.image_channels * geometry.kernel[-1]
    passes = 3 if then_sum else 2
    products = weight_gradient(geometry) * _small_products(geometry.map_channels)
    return products + _TRAFFIC * copied + STREAM * passes * geometry.weight_size


def _tiled(geometry: Geometry) -> float:
    """How much slower the compiled kernel's multiply-adds are: its tiles have 6 rows and 16 columns, full or not."""
    rows, columns = geometry.weight_size // geometry.map_channels, geometry.map_channels
    return 1.2 * (-(-rows // 6) * 6 / rows) * (-(-columns // 16) * 16 / columns)


def kernel_for(geometry: Geometry, *, then_sum: bool, compiled: bool = False) -> str:
    """The kernel that costs least for what is asked: "pixel_gram", "window_gram" or "explicit"."""
    costs = {"explicit": explicit(geometry, then_sum=then_sum, compiled=compiled)}
    if geometry.groups == 1:
        extra = weight_gradient(geometry) if then_sum else 0.0
        costs["pixel_gram"] = pixel_gram(geometry) + extra
        costs["window_gram"] = window_gram(geometry) + extra
    return min(costs, key=lambda name: costs[name])


def chunk_size(bytes_per_sample: int, *, sequential: bool, largest_bytes: int = 0, most: int = CHUNK_ROWS) -> int:
    """How many samples go through the model at once: a power of two from 16 to 256; up to ``most``, where that is more.

    What the layers keep of one chunk should stay near the processor's caches (16 MB); fewer than 64 samples leave
    matrix products too small, and more than 256 gain little, but for layers so quick that what every chunk costs
    beside the arithmetic counts: those that allow larger chunks. Where one tensor alone (``largest_bytes`` for each
    sample) is so large, as the scores of all words at all positions are, that allocators give its memory back at once,
    every use of it would touch fresh pages. Recurrent layers take many small steps one after the
    other (``sequential``), for which only many samples make up.
    """
    if sequential:
        return CHUNK_ROWS
    fitting = max(1, 16 * 2**20 // max(1, bytes_per_sample))
    if fitting > CHUNK_ROWS and most > CHUNK_ROWS:
        return min(most, fitting * 5 // 4)
    rows = min(CHUNK_ROWS, max(64, 1 << (fitting.bit_length() - 1)))
    while rows > 16 and rows * largest_bytes > _ALLOCATED:
        rows //= 2
    return rows


def even_rows(samples: int, *, most: int) -> int:
    """The size of the parts, at most ``most``, into which so many samples can be cut evenly."""
    return -(-samples // -(-samples // most))


def overhead_rows(bytes_per_sample: int, *, steps: int) -> float:
    """What each chunk costs beside its arithmetic, in samples; fitted to times of chunks of 1 to 256 rows of five nets.

    Layers take about 2.5 ms for each megabyte that a sample has in them; a chunk takes one millisecond, 0.4 for each call that is
    recorded (``steps``), and about a row because few rows keep kernels less busy.
    """
    return 1 + (400_000 + 150_000 * steps) / max(bytes_per_sample, 10_000)


@cache
def fixed_rows(expected_batch_size: float, *, most: int, overhead: float = 32.0) -> int:
    """The one shape of all chunks, at most ``most`` samples, that makes batches of this expected size cost least.

    Rows that only fill up the last chunk are lost, so chunks should be small; each chunk has its ``overhead`` (in
    samples), so they should be large.
    """
    if math.isinf(expected_batch_size) or most <= 8:
        return most
    deviation = math.sqrt(expected_batch_size)

    def exceeds(size: float) -> float:
        """How often a batch is larger than this."""
        return 0.5 * math.erfc((size - expected_batch_size) / (math.sqrt(2) * deviation))

    def cost(rows: int) -> float:
        certain = max(1, math.floor((expected_batch_size - 6 * deviation) / rows))
        last = math.ceil((expected_batch_size + 6 * deviation) / rows)
        chunks = certain + sum(exceeds(k * rows) for k in range(certain, last))
        return chunks * (rows + overhead)

    candidates: list[int] = [*range(8, most, 8), most]
    return min(candidates, key=cost)
