"""What an executor works with: records by index, their gradients and losses, the weights, and randomness."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from sluice._base.errors import InputError
from sluice.gradients import Chunk, PerSampleGradients
from sluice.gradients.costs import fixed_rows
from sluice.gradients.trees import apply, batch_size, mapped, padded, tensors_in
from sluice.mechanism.rounding_error import BLOCK_ROWS, sum_error
from sluice.randomness.noise import NoiseSource
from sluice.training.batches import TARGETS, Batches, split_pair
from sluice.training.distributed.workers import Workers
from sluice.training.weights import WeightUpdater

Loss = Callable[[Any, Any], Tensor]

# So many records fill the processor and stay in its cache; the more rows a pass has, the more of them may only fill it up.
_FORWARD_ROWS = 512


@dataclass(frozen=True, kw_only=True)
class TrainingContext:
    """The model, the optimizer and the data of one run.

    Attributes:
        before_release: called with the number of a release before it is applied: the ledger's place.
        before_update: called with what was published, before it changes weights or state: the journal's place.
        after_release: called when a release is applied.
        piece_size: this many records at most are read at once, but by `chunks`, which reads chunks.
        observe_attempt: called with every attempt of a gate that `releases` makes, once it is decided: a study's place. It
            must leave the run as it is.
        targets: see `split_pair`.
        loop_batch: the expected batch size where the user's own loop may call model and loss; 0 where only `chunks` does.
        workers: those who share the records of each batch.
        agreed: what they have found to be the same for all.
    """

    gradients: PerSampleGradients
    batches: Batches
    updater: WeightUpdater
    noise: NoiseSource
    piece_size: int
    before_release: Callable[[int], None]
    before_update: Callable[[Mapping[str, Any]], None] = lambda published: None
    after_release: Callable[[], None] = lambda: None
    observe_attempt: Callable[[Any], None] | None = None
    targets: tuple[str, ...] = TARGETS
    loop_batch: float = 0.0
    workers: Workers = field(default_factory=Workers)
    agreed: set[str] = field(default_factory=set)

    @property
    def dataset_size(self) -> int:
        return self.batches.size

    @property
    def module(self) -> nn.Module:
        return self.gradients.module

    def raw_sum(self) -> RawSum:
        """An empty sum of gradients."""
        return RawSum(self.gradients, self.workers)

    def noisy(self, raw_sum: RawSum, *, noise_multiplier: float, sensitivity: float) -> dict[str, Tensor]:
        """A sum as one Gaussian release, by parameter: `noisy_sum`, with what rounding may have done to it covered.

        Guarantee:
            In the types of `as_public`, whatever the batch.
        """
        return self.as_public(
            self.workers.noisy_totals(
                raw_sum.own_tensors(),
                noise_multiplier=noise_multiplier,
                sensitivity=sensitivity,
                noise=self.noise,
                sum_error=self.sum_error * sensitivity,
            )
        )

    def as_public(self, noisy: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Released tensors, each in the one type that sums of its parameter begin in.

        Large batches are added up in float64. Whatever is computed from a result of that type has other digits than from one in
        float32, and so would tell, without any noise, how large the batch was.
        """
        return self.gradients.as_accumulators(noisy)

    @property
    def sum_error(self) -> float:
        """How far rounding may take a `RawSum` from the exact one, over the bound on a record's contribution."""
        rows = self.gradients.chunk_rows
        if self.loop_batch:
            # Those of one worker too: noise does not depend on how many there are.
            rows = max(rows, self.loop_rows, self._loop_rows(workers=1))
        return sum_error(chunk_rows=self.gradients.rows_per_sum(rows), ordinary_loop_batch=self.loop_batch)

    @property
    def loop_rows(self) -> int:
        """How many rows each forward pass of the user's own loop has."""
        return self._loop_rows(workers=self.workers.size)

    def _loop_rows(self, *, workers: int) -> int:
        return fixed_rows(self.loop_batch / workers, most=self.piece_size)

    def chunks(self, indices: Tensor, loss: Loss) -> Iterator[Chunk]:
        """Per-sample gradients of this worker's part of the named records, in random order, chunk by chunk.

        Guarantee:
            Chunks have one fixed shape and records stand in them at random: one record more or less changes two of them
            (`sluice.mechanism.rounding_error`).
        """
        order = self.workers.own(self.noise.random_order(indices))
        if not self.gradients.is_prepared:
            # How many rows chunks have depends on the shape of a record; any record, so that an empty batch shows nowhere.
            self.gradients.prepare(next(self.pairs(torch.zeros(1, dtype=torch.int64)))[0])
        self._agree_on_chunks()
        for piece, samples in self.batches.full_pieces(order, self.gradients.chunk_rows):
            x, y = split_pair(piece, targets=self.targets)
            yield from self.gradients.chunks(x, y, loss, samples=samples)
            del piece, x, y  # else the next piece could not use their memory, which is still in the processor's cache

    def _agree_on_chunks(self) -> None:
        """Once for each run: how many rounds a batch has follows from the rows of a chunk."""
        if "chunk_rows" not in self.agreed:
            self.workers.require_same({"the number of rows of a chunk": self.gradients.chunk_rows})
            self.agreed.add("chunk_rows")

    def rounds(self, indices: Tensor, loss: Loss) -> Iterator[Chunk | None]:
        """`chunks`, as many for each worker: None where this one has no more."""
        chunks = self.chunks(indices, loss)
        if self.workers.size == 1:
            yield from chunks
        elif len(indices):
            yield next(chunks, None)
            for _ in range(1, self.workers.rounds(len(indices), rows=self.gradients.chunk_rows)):
                yield next(chunks, None)
            if next(chunks, None) is not None:
                raise InputError(
                    "records of different shapes cannot be shared by several workers: chunks of them have different sizes. "
                    "Give all records one shape, or train in one process."
                )

    def pairs(self, indices: Tensor, *, size: int | None = None) -> Iterator[tuple[Any, Any]]:
        """The named records as (inputs, target), in pieces."""
        for piece in self.batches.pieces(indices, size or self.piece_size):
            yield split_pair(piece, targets=self.targets)

    def raw_losses(self, indices: Tensor, loss: Loss, *, expected_size: float = math.inf) -> Tensor:
        """The loss of each of this worker's part of the named records at the present weights, in float64, dropout off.

        Args:
            expected_size: of samples like this one, for which the shape of forward passes is chosen: public.

        Guarantee:
            Sensitive: un-noised values of the training data. Entry i depends on record i and the weights alone, bit for
            bit: all forward passes have one shape. Add up what follows from them with ``workers.total``.
        """
        return self.raw_losses_at([lambda: None], indices, loss, expected_size=expected_size)[0]

    def raw_losses_at(
        self,
        weights: Sequence[Callable[[], None]],
        indices: Tensor,
        loss: Loss,
        *,
        expected_size: float = math.inf,
    ) -> Tensor:
        """`raw_losses` at several weights, a row for each; every record is read once.

        Args:
            weights: each sets the weights of its row, as often as it is called.
        """
        rows = fixed_rows(expected_size / self.workers.size, most=min(self.piece_size, _FORWARD_ROWS))
        parts = [torch.zeros(len(weights), 0, dtype=torch.float64)]
        with torch.no_grad(), evaluating(self.module):
            for x, y in self.pairs(self.workers.own(indices), size=rows):
                count = batch_size(y)
                x, y = padded((x, y), rows)
                parts.append(self._raw_losses_of_piece(weights, self.gradients.arranged(x), y, loss)[:, :count])
        return torch.cat(parts, dim=1)

    def _raw_losses_of_piece(self, weights: Sequence[Callable[[], None]], x: Any, y: Any, loss: Loss) -> Tensor:
        found = []
        for set_weights in weights:
            set_weights()
            found.append(_each_loss(apply(self.module, x), y, loss))
        return torch.stack(found).double().cpu()

    def require_in_step(self, spent: int) -> None:
        """Refuse to log a release before all workers are there, with the same weights and the same draws behind them."""
        if self.workers.size > 1:
            calls = getattr(self.noise, "calls", None)
            self.workers.require_same(
                {
                    "the number of releases": spent,
                    "the number of draws": calls,
                    "the weights": self.updater.digest(),
                }
            )

    def as_update(self, gradient: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """A released gradient in the type and on the device of the weights."""
        return self.updater.converted(gradient)

    def apply(self, released: Mapping[str, Tensor]) -> None:
        """Update the weights with a released gradient."""
        self.updater.apply(released)


def _each_loss(output: Any, y: Any, loss: Loss) -> Tensor:
    """The loss of each record, from an output and targets of which every tensor has the records first."""

    def one(tensors: list[Tensor]) -> Tensor:
        single = (tensor.unsqueeze(0) for tensor in tensors)
        alone_output, alone_y = mapped((output, y), lambda _: next(single))
        return loss(alone_output, alone_y).sum()

    found: Tensor = torch.func.vmap(one)(list(tensors_in((output, y))))
    return found


class RawSum:
    """A weighted sum of gradients over the records of one batch: in float32 within blocks, in float64 across them.

    Sensitive until noise is added.
    """

    def __init__(self, gradients: PerSampleGradients, workers: Workers | None = None) -> None:
        self._workers = workers or Workers()
        self._completed = gradients.completed
        self._block: dict[str, Tensor] = {}
        self._rows = 0
        self._total: dict[str, Tensor] | None = None

    def add(self, chunk: Chunk, weights: Tensor | Mapping[str, Tensor]) -> None:
        """Add the gradients of a chunk, each times its weight, which may differ from layer to layer."""
        if self._rows and self._rows + len(chunk) > BLOCK_ROWS:
            self._fold()
        chunk.add_weighted_sum(weights, into=self._block)
        self._rows += len(chunk)

    def tensors(self) -> dict[str, Tensor]:
        """The sum over the records of all workers, by parameter. Nothing may be added afterwards."""
        return self._workers.totals(self.own_tensors())

    def own_tensors(self) -> dict[str, Tensor]:
        """The sum over this worker's records, by parameter. Nothing may be added afterwards."""
        if self._total is not None:
            self._fold()
        return self._completed(self._block) if self._total is None else self._total

    def _fold(self) -> None:
        block, self._block, self._rows = self._completed(self._block), {}, 0
        if self._total is None:
            self._total = {name: part.double() for name, part in block.items()}
        else:
            for name, part in block.items():
                self._total[name] += part


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Evaluation mode inside the block; every submodule gets its own mode back."""
    training = {part: part.training for part in module.modules()}
    module.eval()
    try:
        yield
    finally:
        for part, was in training.items():
            part.training = was


__all__ = ["Loss", "RawSum", "TrainingContext", "evaluating"]
