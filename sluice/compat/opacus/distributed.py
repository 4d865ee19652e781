"""Opacus's wrappers for several processes."""

from sluice.compat.opacus.refusals import Refused


class DifferentiallyPrivateDistributedDataParallel(Refused):
    instead = (
        "there is no wrapper: give make_private the model as it is. Where torch.distributed is initialised, its processes share the "
        "work by themselves (docs/distributed.md)."
    )


__all__ = ["DifferentiallyPrivateDistributedDataParallel"]
