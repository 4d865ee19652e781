"""The loader of the ordinary loop: Poisson batches, in pieces, until the last release is made."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from sluice.gradients.loop import LoopCapture
from sluice.randomness.model_state import ModelRandomness
from sluice.training.batches import Batches, rows_in
from sluice.training.selective_release import SelectiveReleaseExecutor


class PrivateLoader:
    """The batches of the ordinary loop, in pieces of at most ``max_physical_batch_size``.

    It ends by itself when the last release is made (with ``epochs=``: when those of one epoch are).
    """

    def __init__(
        self,
        *,
        batches: Batches,
        releaser: SelectiveReleaseExecutor,
        capture: LoopCapture,
        piece_size: int,
        releases_per_pass: int,
    ) -> None:
        self.dataset = batches.dataset
        self._batches = batches
        self._releaser = releaser
        self._capture = capture
        self._piece_size = piece_size
        self._releases_per_pass = releases_per_pass
        self.last_piece = False
        self.randomness: ModelRandomness | None = None

    def __iter__(self) -> Iterator[Any]:
        end = self._releaser.released + self._releases_per_pass
        self._capture.attach()
        while not self._releaser.done and self._releaser.released < end:
            indices = self._releaser.noise.random_order(self._releaser.begin())
            if len(indices) == 0:
                self._releaser.finish()  # an empty sample is legal: noise alone, and charged like any other
                continue
            # From reading a piece to its step everything random (augmentation, dropout) comes from the run's own source.
            self.randomness = ModelRandomness(self._releaser.noise)
            self.randomness.enter()
            try:
                yield from self._pieces(indices, self.randomness)
            finally:
                self.randomness.leave()

    def _pieces(self, indices: Tensor, randomness: ModelRandomness) -> Iterator[Any]:
        remaining = len(indices)
        for piece in self._batches.pieces(indices, self._piece_size):
            rows = rows_in(piece)
            remaining -= rows
            self.last_piece = remaining == 0
            self._capture.expect(rows)
            yield piece
            self._capture.require_collected()
            if not self._releaser.still_possible:
                break
            randomness.enter()
