"""The ordinary loop: Poisson batches, in pieces, until the last release is made; each step absorbs a piece."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from sluice._base import validate
from sluice.gradients import Chunk
from sluice.gradients.costs import fixed_rows
from sluice.gradients.loop import LoopCapture
from sluice.randomness.model_state import ModelRandomness
from sluice.training.batches import Batches, rows_in
from sluice.training.executor import PiecewiseExecutor
from sluice.training.weights import PrivateOptimizer

# So improbable that no run has an empty batch, and the most releases for which that is asked.
_NEGLIGIBLE, _MOST_RELEASES = 2.0**-50, 10**9


class PrivateLoader:
    """The batches of the ordinary loop, in pieces of at most ``max_physical_batch_size``.

    It ends by itself when the last release is made (with ``epochs=``: when those of one epoch are).

    Attributes:
        dataset: the records.
        sample_rate: the probability with which a record is in a batch.
        batch_size: how many records a batch has on average, rounded. No batch need have just as many.
    """

    def __init__(
        self,
        *,
        batches: Batches,
        executor: PiecewiseExecutor[Any],
        capture: LoopCapture,
        piece_size: int,
        releases_per_pass: int,
        sample_rate: float,
    ) -> None:
        self.dataset = batches.dataset
        self.sample_rate = sample_rate
        # The loop does not see empty batches. Where a pass may have some beside others, what goes by turns would tell.
        releases = min(releases_per_pass, _MOST_RELEASES)
        may_be_empty = releases * (1.0 - sample_rate) ** batches.size > _NEGLIGIBLE
        self._pins_settings = releases_per_pass > 1 and may_be_empty
        self.batch_size = max(1, round(executor.expected_batch_size))
        self._batches = batches
        self._executor = executor
        self._capture = capture
        self._piece_size = piece_size
        self._releases_per_pass = releases_per_pass
        self.last_piece = False
        #: What a step does with the chunk that it has collected.
        self.take: Callable[[Chunk | None], None] = lambda chunk: None
        self.randomness: ModelRandomness | None = None
        #: The executor's number of the batch that pieces come from. Where that moves on, because a state was loaded, what was
        #: measured of the batch is forgotten, and the rest of it must not be released.
        self.batch = 0

    def __len__(self) -> int:
        """How many releases a pass makes, at most: a public number.

        As many batches come out where each fits into one piece and none is empty or rejected; how many really do is
        sensitive.
        """
        return self._releases_per_pass

    def set_piece_size(self, rows: int) -> int:
        """Let at most so many records through the model at once, from the next batch on; the number before.

        More than ``max_physical_batch_size`` has no effect: what rounding is charged for was computed for that many.
        """
        validate.positive_integer(rows=rows)
        before, most = self._piece_size, self._executor.context.loop_rows
        self._piece_size = fixed_rows(self._executor.expected_batch_size, most=min(rows, most)) if rows < most else most
        return before

    @property
    def finished(self) -> bool:
        """Whether the last release has been made, by plan or by budget, so that no batch will come: public."""
        return self._executor.done

    def __iter__(self) -> Iterator[Any]:
        end = self._executor.released + self._releases_per_pass
        self._capture.attach()
        workers, updater = self._executor.context.workers, self._executor.context.updater
        if self._pins_settings:
            updater.pin_settings()
        while not self._executor.done and self._executor.released < end:
            self._capture.rows = self._piece_size
            everyones = self._executor.noise.random_order(self._executor.draw())
            indices, rounds = workers.own(everyones), workers.rounds(len(everyones), rows=self._piece_size)
            if rounds == 0:
                updater.check_settings()
                updater.check_untouched()
                self._executor.finish()  # an empty sample is legal: noise alone, and charged like any other
                continue
            # From reading a piece to its step everything random (augmentation, dropout) comes from the run's own source.
            self.randomness = ModelRandomness(self._executor.noise)
            self.randomness.enter()
            try:
                yield from self._pieces(indices, self.randomness, rounds=rounds)
            finally:
                self.randomness.leave()

    def _pieces(self, indices: Tensor, randomness: ModelRandomness, *, rounds: int) -> Iterator[Any]:
        batch = self.batch = self._executor.batch
        for piece in self._batches.pieces(indices, self._piece_size):
            if self._executor.batch != batch:
                return  # it was given up: see `batch`
            rounds -= 1
            self.last_piece = rounds == 0
            self._capture.expect(rows_in(piece))
            yield piece
            self._capture.require_collected()
            if not self._executor.still_possible:
                return
            randomness.enter()
        if rounds and self._executor.batch == batch:  # other workers have one record more than this one
            self.last_piece = True
            self.take(None)


def ordinary_loop(
    executor: PiecewiseExecutor[Any], *, releases_per_pass: int, sample_rate: float
) -> tuple[LoopCapture, PrivateOptimizer, PrivateLoader]:
    """What a user's own loop needs to drive an executor: what watches the model, the optimizer and the loader."""
    executor.serve_loop()
    context, updater = executor.context, executor.context.updater
    capture = LoopCapture(context.gradients, rows=context.loop_rows)
    loader = PrivateLoader(
        batches=context.batches,
        executor=executor,
        capture=capture,
        piece_size=context.loop_rows,
        releases_per_pass=releases_per_pass,
        sample_rate=sample_rate,
    )

    def take(chunk: Chunk | None) -> None:
        if loader.randomness is not None:
            loader.randomness.leave()
        updater.check_settings()
        if executor.batch != loader.batch:
            updater.nothing_released()
        elif executor.absorb(chunk) and loader.last_piece:
            updater.check_untouched()
            executor.finish()
        else:
            updater.nothing_released()

    loader.take = take
    return capture, PrivateOptimizer(updater, consume=lambda: take(capture.collect())), loader
