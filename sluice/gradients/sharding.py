"""Models whose parameters `torch.distributed.fsdp.fully_shard` (FSDP2) spreads over workers.

Such a model gathers the parameters of a block before it is called and lets go of them afterwards. What the block computes
with are ordinary tensors, always the same objects; only their memory comes and goes. So per-sample gradients are recorded as of
any model, once those objects are known.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

_FSDP = "torch.distributed.fsdp."


def is_sharded(tensor: Tensor) -> bool:
    """Whether this is a worker's part of a larger tensor."""
    return type(tensor).__name__ == "DTensor" or hasattr(tensor, "_sharding_spec")


def own_part(tensor: Any) -> Tensor:
    """What this worker has of a tensor: all of it, if it is not sharded."""
    own: Tensor = tensor.to_local() if is_sharded(tensor) else tensor
    return own


def of_fsdp(thing: Any) -> bool:
    """Whether a module's class, or one of its hooks, was put there by ``fully_shard``."""
    return f"{getattr(thing, '__module__', '')}.".startswith(_FSDP)


def blocks(module: nn.Module) -> list[Any]:
    """The parts of a model that are gathered, each as a whole."""
    return [part for part in module.modules() if of_fsdp(type(part))]


def let_go(module: nn.Module) -> None:
    """Let this worker hold its own part of each parameter, and no more.

    Evaluation leaves the outermost block gathered; what the optimizer does to the parts would not be seen there.
    """
    for block in blocks(module):
        block.reshard()


@contextmanager
def gathered(module: nn.Module) -> Iterator[None]:
    """Inside the block, parameters are whole on every worker, as in a forward pass; all workers must enter it."""
    sharded = blocks(module)
    for block in sharded:
        block.unshard()
    try:
        yield
    finally:
        let_go(module)


__all__ = ["blocks", "gathered", "is_sharded", "let_go", "of_fsdp", "own_part"]
