"""Those who share the work of one run: what they do for each other, and what that is where there is only one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from torch import Tensor, nn

from sluice._base.errors import SluiceError
from sluice.randomness.noise import NoiseSource, noisy_sum
from sluice.runs.ledger_recorder import one_after_the_other

if TYPE_CHECKING:
    from sluice.training.state import TrainingState

T = TypeVar("T")


class WorkerLostError(SluiceError):
    """A worker of the run has died, stopped or fallen out of step. What was released so far is logged and charged."""


class Workers:
    """The one worker of an ordinary run; `sluice.training.distributed.group.WorkerGroup` is several.

    All workers run the same program and make the same calls here in the same order. Worker 0, the first one, alone writes
    files.

    Attributes:
        rank: which of them this is, from 0.
        size: how many there are.
    """

    rank: int = 0
    size: int = 1

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def own(self, records: Tensor) -> Tensor:
        """The part of a tensor with one row for each record of a batch, in an order that all know, that is this worker's.

        Guarantee:
            The record at place p is that of worker ``p mod size``, however many records there are. So one that is added at
            the end, or that takes another's place, moves no other record to another worker or to another row.
        """
        return records[self.rank :: self.size]

    def rounds(self, records: int, *, rows: int) -> int:
        """How many chunks of so many rows the worker with the most records of a batch has."""
        return -(-records // (rows * self.size))

    def total(self, raw: Tensor) -> Tensor:
        """The sum of a small tensor over all workers: sensitive if it is. In any order: give it what adds up exactly."""
        return raw

    def totals(self, raw: dict[str, Tensor]) -> dict[str, Tensor]:
        """The sum of tensors over all workers, by name, in float64 where there are several."""
        return raw

    def part_of_total(self, raw: Tensor) -> Tensor:
        """This worker's part of the sum of a tensor over all workers, as a vector in float64.

        Parts are equal shares of its entries, in their order. It is sensitive if they are.
        """
        return raw.detach().reshape(-1).double()

    def noisy_totals(
        self,
        raw: dict[str, Tensor],
        *,
        noise_multiplier: float,
        sensitivity: float,
        noise: NoiseSource,
        sum_error: float,
    ) -> dict[str, Tensor]:
        """The sum over all workers as one Gaussian release: see `noisy_sum`. The raw values are overwritten."""
        noisy_sum(
            list(raw.values()),
            noise_multiplier=noise_multiplier,
            sensitivity=sensitivity,
            noise=noise,
            sum_error=sum_error,
        )
        return raw

    def common_noise(self, noise: NoiseSource) -> NoiseSource:
        """A source of the same kind from which all workers draw the same."""
        return noise

    def start_alike(self, module: nn.Module) -> None:
        """Give the model of every worker the weights and buffers that it has on worker 0."""

    def from_first(self, job: Callable[[], T]) -> T:
        """What the job gives on worker 0, which alone does it. If it fails there it fails everywhere."""
        return job()

    def at_first(self, job: Callable[[], T]) -> T | None:
        """What the job gives on worker 0, which alone does it; None elsewhere. If it fails there it fails everywhere."""
        return job()

    def in_turn(self, job: Callable[[], T]) -> T:
        """The job on every worker, on the first before the others, who may find what it has left in a cache."""
        return job()

    def by_first(self, *steps: Callable[[int], None] | None) -> Callable[[int], None]:
        """The steps, one after the other, as all are to call them: worker 0 does, the others wait until it is done."""
        return one_after_the_other(*steps)

    def restored(self, state: TrainingState, job: Callable[[], T]) -> T:
        """`from_first` for a job that loads a state, which all have afterwards."""
        return job()

    def require_same(self, values: Mapping[str, Any]) -> None:
        """Refuse to continue unless all workers have the same, and are all still there."""

    @contextmanager
    def named_if_lost(self) -> Iterator[None]:
        """Inside the block, operations that others make over all workers, such as FSDP's, fail as those of this class do."""
        yield

    @contextmanager
    def announced(self) -> Iterator[None]:
        """Tell the others why this worker leaves, if the block ends by an exception."""
        yield

    def leave(self) -> None:
        """End a program's work with the others: wait until all have done theirs, for none has ended well if one fails.

        No operation may follow.
        """


__all__ = ["WorkerLostError", "Workers"]
