"""Opacus's `DPDataLoader`: `make_private` gives what it stands for."""

from sluice.compat.opacus.refusals import Refused


class DPDataLoader(Refused):
    instead = (
        "batches must be drawn by the source of randomness of the run. Give an ordinary DataLoader to make_private, which "
        "returns a loader of Poisson samples."
    )
