"""Opacus's wrappers for several processes."""

from sluice.compat.opacus.refusals import Refused


class DifferentiallyPrivateDistributedDataParallel(Refused):
    instead = "training over several processes is not. Train in one process, with the model as it is."


__all__ = ["DifferentiallyPrivateDistributedDataParallel"]
