"""Keeping the state of an engine's run, in memory or on disk, and going on from it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sluice.mechanism.base import Mechanism
from sluice.runs.folder import configuration_hash
from sluice.runs.ledger_recorder import LedgerRecorder
from sluice.training.executor import Executor
from sluice.training.keeping import Keeping, StateKeeper
from sluice.training.state import TrainingState
from sluice.training.weights import WeightUpdater


class Resumable(ABC):
    """An engine's run that can be kept and resumed."""

    _recorder: LedgerRecorder | None
    _keeping: Keeping
    _state: TrainingState
    _updater: WeightUpdater

    @property
    @abstractmethod
    def mechanism(self) -> Mechanism:
        """What this run promises: public."""

    @property
    @abstractmethod
    def released(self) -> int:
        """How many releases have been made: public."""

    @abstractmethod
    def _running(self) -> Executor[Any]:
        """What makes the releases; refused where no run is set up."""

    @property
    def has_ledger(self) -> bool:
        """Whether releases are written to a ledger, which knows of them after a crash."""
        return self._recorder is not None

    def accept_weights(self) -> None:
        """Take weights that were changed by hand as they are. Only for changes that do not depend on the data."""
        self._running()
        self._updater.remember()
        self._keeping.checkpoint()  # no release leads to these

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next release depends on: weights, optimizer, schedule, noise, reference, average.

        Sensitive: it belongs in ``private/`` (a seeded source can be replayed from it).
        """
        self._running()
        return self._state.state_dict()

    def load_state_dict(self, state: Mapping[str, Any], *, lost: int = 0) -> None:
        """Continue from `state_dict`, on an engine set up with the same arguments; ``lost`` more are charged and gone."""
        charged = self._running().unrepeatable
        self._state.restore(state)
        self._continue(charged=charged, lost=lost)

    def save(self, folder: str | Path) -> Path:
        """Write a checkpoint of `state_dict` into a folder that keeps the last two. Sensitive: keep it private."""
        self._running()
        return self._keeping.save(self._state, Path(folder), config_hash=self._mechanism_hash())

    def keep_in(self, folder: str | Path, *, every: int | None = None, config_hash: str | None = None) -> StateKeeper:
        """Keep the run in a folder from now on, so that a crash costs one release at most (docs/runs.md).

        Args:
            folder: for this run alone. Sensitive: keep it private. To resume from it, call `load` first.
            every: None writes what each release needs before the next one is logged. A number makes checkpoints that many
                releases apart instead, and a crash costs all releases since the last one.
            config_hash: whose state it is; None takes the mechanism's.
        """
        self._running()
        hash_ = config_hash or self._mechanism_hash()
        return self._keeping.start(self._state, Path(folder), config_hash=hash_, every=every)

    def load(self, folder: str | Path, *, config_hash: str | None = None, spent: int = 0) -> str | None:
        """Resume from the newest state that a folder leads to, by its checkpoints and its journal.

        Args:
            config_hash: as for `keep_in`.
            spent: how many releases are logged, where that is not in the engine's own ledger.

        Returns:
            A note, such as on a damaged checkpoint that was passed over, or None.

        Guarantee:
            Releases that are logged and that this state does not contain stay charged.
        """
        self._running()
        recorder = self._recorder
        return self._keeping.load(
            self._state,
            Path(folder),
            config_hash=config_hash or self._mechanism_hash(),
            lost=lambda applied: max(spent - applied, recorder.continue_from(applied) if recorder else 0),
        )

    def _continue(self, *, charged: int, lost: int) -> None:
        executor, recorder = self._running(), self._recorder
        logged = executor.context.workers.from_first(lambda: recorder.continue_from(self.released) if recorder else 0)
        executor.begin_after(max(lost, logged, charged - self.released))
        self._keeping.restart()

    def _mechanism_hash(self) -> str:
        return configuration_hash(self.mechanism.to_dict())


__all__ = ["Resumable"]
