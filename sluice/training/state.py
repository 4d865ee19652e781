"""The state of a run: what a checkpoint holds, what the journal adds to it, and how both become the state again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.optim.swa_utils import AveragedModel

from sluice._base.errors import InputError
from sluice.audit.scores import Observations
from sluice.gradients.sharding import is_sharded
from sluice.training.executor import Executor, ReplayableExecutor
from sluice.training.weights import WeightUpdater


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
    observations: Observations | None = None

    @property
    def replayable(self) -> bool:
        """Whether published values lead from one state to the next: not with seeded noise, whose place they do not tell."""
        return isinstance(self.executor, ReplayableExecutor) and self.executor.noise.secure

    @property
    def history(self) -> range:
        """The releases whose published values are part of the state, by how many releases it contained after them."""
        kept = self.executor.history if isinstance(self.executor, ReplayableExecutor) else 0
        return range(max(0, self.executor.released - kept) + 1, self.executor.released + 1 if kept else 0)

    def state_dict(self) -> dict[str, Any]:
        return self._with(self.executor.state_dict())

    def without_history(self) -> dict[str, Any]:
        """`state_dict` without what the journal has of `history`."""
        assert isinstance(self.executor, ReplayableExecutor)
        return {**self._with(self.executor.state_without_history()), "history": list(self.history)}

    def _with(self, releases: dict[str, Any]) -> dict[str, Any]:
        if any(map(is_sharded, self.module.parameters())):
            raise InputError(
                "the state of a sharded model is not written yet: no worker has all of it. Keep a ledger, which needs none, "
                "and save weights by torch.distributed.checkpoint."
            )
        self.updater.put_back()
        scheduler = self.updater.lr_scheduler
        audited = {} if self.observations is None else {"observations": self.observations.state_dict()}
        return {
            **audited,
            "releases": releases,
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
        if self.observations is not None:
            self.observations.load_state_dict(state["observations"])
        self.executor.restore(state["releases"])
        self.updater.remember()

    def entry(self, published: Mapping[str, Any]) -> dict[str, Any]:
        """What leads from the present state to that after the release that is being made.

        Buffers are not in it: a model in which they change is refused (`sluice.gradients.interference`).
        """
        return {
            "number": self.executor.spent,
            "published": dict(published),
            "settings": self.updater.settings(),
            "weights": self.updater.digest(),
        }

    def recall(self, entries: Iterable[Mapping[str, Any]]) -> None:
        """Complete a state that was written without its history."""
        assert isinstance(self.executor, ReplayableExecutor)
        self.executor.recall({entry["number"]: entry["published"] for entry in entries})

    def replay(self, entry: Mapping[str, Any]) -> bool:
        """Make a release again; whether the weights before it were those that it was made on, bit for bit."""
        assert isinstance(self.executor, ReplayableExecutor)
        same: bool = self.updater.digest() == entry["weights"]
        self.updater.set_settings(entry["settings"])
        self.executor.replay(entry["published"], number=entry["number"])
        return same


__all__ = ["TrainingState"]
