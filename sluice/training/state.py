"""The state of a run: what a checkpoint holds, what the journal adds to it, and how both become the state again."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from sluice.training.executor import Executor, ReplayableExecutor
from sluice.training.weights import WeightUpdater, digest


@dataclass(frozen=True, kw_only=True)
class TrainingState:
    """Everything that the next release depends on, wherever it is kept: weights, optimizer, schedule, noise, average.

    Guarantee:
        `replay` of an entry on the state before it gives the state after it, bit for bit if the user's optimizer repeats its
        steps so. Either way the result is post-processing of releases that are logged.
    """

    module: nn.Module
    updater: WeightUpdater
    executor: Executor[Any]
    average: AveragedModel | None

    @property
    def replayable(self) -> bool:
        return isinstance(self.executor, ReplayableExecutor)

    def state_dict(self) -> dict[str, Any]:
        self.updater.put_back()
        scheduler = self.updater.lr_scheduler
        return {
            "releases": self.executor.state_dict(),
            "module": self.module.state_dict(),
            "optimizer": self.updater.optimizer.state_dict(),
            "lr_scheduler": None if scheduler is None else scheduler.state_dict(),
            "average": None if self.average is None else self.average.state_dict(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go back to a state. More may have been lost since: `Executor.begin_after` must follow."""
        self.module.load_state_dict(state["module"])
        self.updater.optimizer.load_state_dict(state["optimizer"])
        if self.updater.lr_scheduler is not None:
            self.updater.lr_scheduler.load_state_dict(state["lr_scheduler"])
        if self.average is not None:
            self.average.load_state_dict(state["average"])
        self.executor.restore(state["releases"])
        self.updater.remember()

    def buffer_digests(self) -> dict[str, tuple[int, ...]]:
        """Of each buffer of the module. Weights change by releases alone, buffers may in every forward pass."""
        return {name: digest(buffer) for name, buffer in self.module.named_buffers()}

    def entry(self, published: Mapping[str, Any], *, buffers: Collection[str]) -> dict[str, Any]:
        """What leads from the present state to that after the release that is being made.

        Args:
            buffers: those that changed since the last state or entry was written.
        """
        return {
            "number": self.executor.spent,
            "published": dict(published),
            "settings": self.updater.settings(),
            "weights": self.updater.digest(),
            "buffers": {name: buffer for name, buffer in self.module.named_buffers() if name in buffers},
        }

    def replay(self, entry: Mapping[str, Any]) -> bool:
        """Make a release again; whether the weights before it were those that it was made on, bit for bit."""
        assert isinstance(self.executor, ReplayableExecutor)
        same = self.updater.digest() == entry["weights"]
        with torch.no_grad():
            for name, buffer in self.module.named_buffers():
                if name in entry["buffers"]:
                    buffer.copy_(entry["buffers"][name])
        self.updater.set_settings(entry["settings"])
        self.executor.replay(entry["published"], number=entry["number"])
        return same


__all__ = ["TrainingState"]
