"""Models that are spread over the workers by ``fully_shard`` (FSDP2): each holds, and updates, its own part of each parameter.

A worker's records go through whole blocks, which FSDP gathers and lets go of one after the other, so norms of its records
need nobody else. A weighted sum is made parameter by parameter and handed out at once: each worker adds up what all have for
its own part, adds noise to that, and gives it to its own part of the optimizer. No gradient is whole anywhere but for one
parameter at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from sluice._base.errors import InputError
from sluice.gradients import Chunk
from sluice.gradients.sharding import is_sharded, let_go
from sluice.randomness.noise import NoiseSource, SecureNoise, noisy_sum
from sluice.training.context import Loss, RawSum, TrainingContext
from sluice.training.distributed.shards import Shard


class ScatteredSum(RawSum):
    """A weighted sum of gradients of which each worker has its own rows, in float64. Sensitive until noise is added.

    All workers add as many chunks; one that has no records adds an `idle_chunk`.
    """

    def __init__(self, context: ShardedContext) -> None:
        super().__init__(context.gradients, context.workers)
        self._shards = context.shards
        self._exchange = context.workers.part_of_total
        self.own = {name: shard.zeros() for name, shard in self._shards.items()}

    def add(self, chunk: Chunk, weights: Tensor | Mapping[str, Tensor]) -> None:
        into = _HandedOut(self._hand_out)
        chunk.add_weighted_sum(weights, into=into)
        into.end()

    def own_tensors(self) -> dict[str, Tensor]:
        raise InputError(
            "the sum of gradients of a sharded model is nowhere whole: a method that needs it so cannot be used. Give "
            "it a module whose parameters are whole on every worker."
        )

    def _hand_out(self, name: str, whole: Tensor) -> None:
        shard = self._shards[name]
        self.own[name] += shard.own_of(self._exchange(shard.for_each(whole)))


class _HandedOut(MutableMapping[str, Tensor]):
    """Takes the sum of one parameter after the other, and hands each out when the next one comes."""

    def __init__(self, hand_out: Callable[[str, Tensor], None]) -> None:
        self._hand_out = hand_out
        self._present: dict[str, Tensor] = {}

    def __setitem__(self, name: str, whole: Tensor) -> None:
        self.end()
        self._present[name] = whole

    def end(self) -> None:
        for name, whole in self._present.items():
            self._hand_out(name, whole)
        self._present.clear()

    def __getitem__(self, name: str) -> Tensor:
        return self._present[name]

    def __delitem__(self, name: str) -> None:
        del self._present[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._present)

    def __len__(self) -> int:
        return len(self._present)


@dataclass(frozen=True, kw_only=True)
class ShardedContext(TrainingContext):
    """A `TrainingContext` whose model is sharded.

    Every forward pass gathers parameters from all workers, so all make as many of them, of one shape.
    """

    shards: Mapping[str, Shard] = field(init=False)

    def __post_init__(self) -> None:
        if self.loop_batch:
            raise InputError(
                "a loop of your own is not allowed for a sharded model: all workers must go through the model as often, "
                "whatever records they have. Train with engine.releases(loss)."
            )
        named = self.module.named_parameters()
        rank, size = self.workers.rank, self.workers.size
        shards = {name: Shard(like=p, rank=rank, size=size) for name, p in named if p.requires_grad}  # type: ignore[arg-type]
        object.__setattr__(self, "shards", shards)

    def raw_sum(self) -> ScatteredSum:
        return ScatteredSum(self)

    def rounds(self, indices: Tensor, loss: Loss) -> Iterator[Chunk | None]:
        with self.workers.named_if_lost():
            self._begin_together(loss)
            for chunk in super().rounds(indices, loss):
                yield self._idle(loss) if chunk is None else chunk
            let_go(self.module)

    def noisy(self, raw_sum: RawSum, *, noise_multiplier: float, sensitivity: float) -> dict[str, Tensor]:
        """As `TrainingContext.noisy`: each worker adds the noise of the rows that it has.

        Guarantee:
            Rows have the grid and the standard deviation of the whole vector, and noise from a fresh key of each worker's
            own operating system: together they are the release that `noisy_sum` makes of the whole sum. From a seeded
            source each worker draws the noise of all rows, so that it is the same for any number of workers, and takes as
            much memory for it as all parameters.
        """
        assert isinstance(raw_sum, ScatteredSum)
        let_go(self.module)
        raw_own, shards = raw_sum.own, self.shards
        if self.noise.secure:
            source: NoiseSource = SecureNoise()
            raw = list(raw_own.values())
        else:
            source = self.noise
            raw = [_placed(shards[name], own) for name, own in raw_own.items()]
        noisy_sum(
            raw,
            noise_multiplier=noise_multiplier,
            sensitivity=sensitivity,
            noise=source,
            sum_error=self.sum_error * sensitivity,
            part_of=sum(shard.like.numel() for shard in shards.values()),
        )
        if not self.noise.secure:
            raw = [whole[shard.rows] for whole, shard in zip(raw, shards.values(), strict=True)]
        return {name: shard.tensor(noisy) for (name, shard), noisy in zip(shards.items(), raw, strict=True)}

    def require_in_step(self, spent: int) -> None:
        calls = getattr(self.noise, "calls", None)
        self.workers.require_same({"the number of releases": spent, "the number of draws": calls})

    def _any_record(self) -> tuple[Any, Any]:
        return next(self.pairs(torch.zeros(1, dtype=torch.int64)))

    def _idle(self, loss: Loss) -> Chunk:
        return self.gradients.idle_chunk(*self._any_record(), loss)

    def _begin_together(self, loss: Loss) -> None:
        """Check model and loss on all workers at once: a worker without records would not come to it by itself."""
        if str(id(loss)) not in self.agreed:
            for _ in self.gradients.chunks(*self._any_record(), loss, samples=1):
                pass
            self.gradients.refuse_other_batches()
            self.agreed.add(str(id(loss)))


def _placed(shard: Shard, own: Tensor) -> Tensor:
    """A whole tensor that is zero but for this worker's rows."""
    whole = own.new_zeros(shard.like.shape)
    whole[shard.rows] = own
    return whole


def context_type(module: nn.Module) -> type[TrainingContext]:
    """The kind of context that a module needs."""
    return ShardedContext if any(map(is_sharded, module.parameters())) else TrainingContext


__all__ = ["ScatteredSum", "ShardedContext", "context_type"]
