"""How ``fully_shard`` (FSDP2) spreads a parameter over the workers: by its rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from sluice._base.errors import InputError
from sluice.gradients.sharding import is_sharded, let_go

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


@dataclass(frozen=True, kw_only=True)
class Shard:
    """Which rows of a parameter are this worker's: as many for each, but that the last workers may have fewer."""

    like: DTensor
    rank: int
    size: int

    @property
    def most_rows(self) -> int:
        """Of any worker."""
        return -(-self.like.shape[0] // self.size)

    @property
    def rows(self) -> slice:
        count, most = self.like.shape[0], self.most_rows
        return slice(min(count, self.rank * most), min(count, (self.rank + 1) * most))

    def zeros(self) -> Tensor:
        """An empty sum, of the worker's own rows."""
        return torch.zeros(self.like.to_local().shape, dtype=torch.float64)

    def for_each(self, whole: Tensor) -> Tensor:
        """The parts of a whole tensor one after the other, filled up to the same length."""
        filled = whole.new_zeros(self.size * self.most_rows, *whole.shape[1:])
        filled[: len(whole)] = whole
        return filled

    def own_of(self, part: Tensor) -> Tensor:
        """This worker's part without what it was filled up with."""
        return part.view(self.most_rows, *self.like.shape[1:])[: self.rows.stop - self.rows.start]

    def tensor(self, own: Tensor) -> Tensor:
        """The rows of all workers as one tensor that is spread like the parameter."""
        from torch.distributed.tensor import DTensor

        like = self.like
        local = own.to(dtype=like.dtype, device=like.device)
        made: Tensor = DTensor.from_local(
            local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
        )
        return made


def require_supported(module: nn.Module, *, workers: int) -> bool:
    """Whether the module is sharded; one that is sharded in another way than ``fully_shard`` does by default is refused."""
    let_go(module)
    named = dict(module.named_parameters())
    if not any(map(is_sharded, named.values())):
        return False
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor import Shard as ByAxis

    if workers == 1:
        raise InputError(
            "the module is sharded, and there is one worker alone: give the module as it was before fully_shard."
        )
    for name, p in named.items():
        if not (isinstance(p, DTensor) and p.placements == (ByAxis(0),) and p.device_mesh.size() == workers):
            raise InputError(
                f"parameter '{name}' is not spread by its first axis over all {workers} workers, which is not supported. Use "
                "fully_shard(module) of torch.distributed.fsdp on the whole model, with one mesh of all workers."
            )
    return True


__all__ = ["Shard", "require_supported"]
