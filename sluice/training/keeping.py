"""How a run is kept so that a crash costs one release at most: a journal entry with each, a checkpoint now and then."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sluice._base import validate
from sluice.runs.checkpoint import checkpoint_releases, load_checkpoint, remove_draft, save_checkpoint
from sluice.runs.journal import Journal
from sluice.training.state import TrainingState

# A checkpoint is due when the journal has grown by this many times its size, or by so many bytes and entries: writing
# checkpoints then adds half to the cost of the journal, and both together take seven checkpoints' room on disk.
_GROWTH = 2
_SMALL_JOURNAL = 8 << 20
_MOST_ENTRIES = 64


class StateKeeper:
    """Keeps the state of a run in a folder from now on.

    Args:
        state: of the run, between two releases.
        folder: where checkpoints and journal are kept, by one process at a time. Sensitive.
        config_hash: sha256 of the run's configuration.
        every: releases between two checkpoints, without a journal: releases since the last one are lost in a crash. None
            loses one at most.

    Guarantee:
        With ``every=None``, whenever release n + 1 is logged, the state that release n left is on disk: as an entry of the
        journal that follows from the newest checkpoint, and from the one before, without a gap.
    """

    def __init__(self, state: TrainingState, folder: Path, *, config_hash: str, every: int | None = None) -> None:
        if every is not None:
            validate.positive_integer(every=every)
        self._state = state
        self._folder = folder
        self._config_hash = config_hash
        self._every = every if every is not None or state.replayable else 1
        self.begin()

    def begin(self) -> None:
        """Begin with the present state; what is kept of any other that came after it is gone."""
        self._journal = Journal(self._folder, config_hash=self._config_hash)
        self._journal.keep(after=-1, up_to=self._state.executor.released)
        self.checkpoint()

    def before_update(self, published: Mapping[str, Any]) -> None:
        """Write what is being released to the journal."""
        if self._every is not None:
            return
        digests = self._state.buffer_digests()
        changed = {name for name, found in digests.items() if found != self._buffers.get(name)}
        entry = self._state.entry(published, buffers=changed)
        self._bytes += self._journal.append(self._state.executor.released + 1, entry)
        self._entries += 1
        self._buffers = digests

    def after_release(self) -> None:
        """Make a checkpoint where one is due."""
        if self._every is not None:
            due = self._state.executor.released % self._every == 0
        else:
            due = self._entries >= _MOST_ENTRIES or self._bytes >= max(_GROWTH * self._size, _SMALL_JOURNAL)
        if due:
            self.checkpoint()

    def checkpoint(self) -> None:
        """Write the whole state."""
        released = self._state.executor.released
        path = save_checkpoint(
            self._folder,
            self._state.state_dict(),
            config_hash=self._config_hash,
            release=released,
            reuse=self._every is None,
        )
        self._size, self._bytes, self._entries = path.stat().st_size, 0, 0
        self._buffers = self._state.buffer_digests()
        self._journal.keep(after=min(checkpoint_releases(self._folder)), up_to=released)

    def finish(self) -> None:
        """Write the whole state and leave nothing but checkpoints."""
        self.checkpoint()
        self._journal.remove()
        remove_draft(self._folder)


def restore(state: TrainingState, folder: Path, *, config_hash: str) -> tuple[str, ...] | None:
    """Go back to the newest state that a folder leads to. `Executor.begin_after` must follow.

    Returns:
        What the user should know; None if there is no checkpoint at all, and nothing has changed.
    """
    found = load_checkpoint(folder, config_hash=config_hash)
    if found is None:
        return None
    state.restore(found.payload)
    same, replayed = True, 0
    if state.replayable:
        for entry in Journal(folder, config_hash=config_hash).entries(after=found.release):
            same, replayed = state.replay(entry) and same, replayed + 1
    notes = [f"{found.note} The journal has {replayed} more."] if found.note else []
    if not same:
        notes.append(
            "The optimizer did not repeat its steps bit for bit, so the weights are not exactly those that the "
            "interruption lost. What was released and charged is the same."
        )
    return tuple(notes)


__all__ = ["StateKeeper", "restore"]
