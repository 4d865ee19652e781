"""Finding the workers of this process, and refusing what several of them cannot do."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from sluice._base import validate
from sluice._base.errors import InputError
from sluice.mechanism.base import Mechanism
from sluice.mechanism.registry import executor_of
from sluice.training.distributed.shards import require_supported
from sluice.training.distributed.workers import Workers

#: Seconds without a sign of life after which a worker counts as lost.
TIMEOUT = 60.0

_joined: tuple[Any, Workers] | None = None


def join(*, timeout: float = TIMEOUT) -> Workers:
    """The workers that this process is one of: those of the process group, if one is initialised, else itself alone.

    All of them must call it. An engine does so by itself; call it before if you want another ``timeout``.

    Args:
        timeout: seconds without a heartbeat after which a worker counts as lost.
    """
    global _joined
    validate.positive(timeout=timeout)
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return Workers()
    world = dist.group.WORLD
    if _joined is None or _joined[0] is not world:
        from sluice.training.distributed.group import WorkerGroup

        _joined = (world, WorkerGroup(timeout=timeout))
    return _joined[1]


def join_for(mechanism: Mechanism, module: nn.Module) -> Workers:
    """`join` for a run: refuses what workers cannot share, and gives all of them the weights that worker 0 has."""
    _require_unwrapped(module)
    workers = join()
    sharded = require_supported(module, workers=workers.size)
    if workers.size > 1:
        _require_shared(executor_of(mechanism), kind=mechanism.kind, workers=workers, sharded=sharded)
        workers.require_same(
            {
                "the mechanism": mechanism.to_dict(),
                "the list of parameters": [(name, p.shape, p.requires_grad) for name, p in module.named_parameters()],
            }
        )
        workers.start_alike(module)
    return workers


def _require_unwrapped(module: nn.Module) -> None:
    """Refuse a module that another engine spreads over workers."""
    wrapped = [name or "module" for name, part in module.named_modules() if isinstance(part, _WRAPPERS)]
    if wrapped:
        raise InputError(
            f"{wrapped[0]} is wrapped in DistributedDataParallel or DataParallel, which averages gradients before they are "
            "clipped: give the module itself. An initialised process group is all that Sluice needs."
        )


def _require_shared(executor: type[Any], *, kind: str, workers: Workers, sharded: bool) -> None:
    """Refuse a method that does not say that several workers can share its records."""
    if not executor.takes_workers:
        raise InputError(
            f"{kind} cannot be trained by {workers.size} workers: {executor.__name__} does not say that it can be "
            "(takes_workers=True, docs/distributed.md). Train it in one process."
        )
    if sharded and not executor.takes_shards:
        raise InputError(
            f"{kind} cannot be trained with a sharded model: {executor.__name__} does not say that it can be "
            "(takes_shards=True, docs/scale.md). Give a module whose parameters are whole on every worker."
        )


_WRAPPERS = (DistributedDataParallel, DataParallel)

__all__ = ["TIMEOUT", "join", "join_for"]
