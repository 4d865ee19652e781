"""How a run is kept so that a crash costs one release at most: a journal entry with each, a checkpoint now and then."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from sluice._base import validate
from sluice._base.background import Background
from sluice._base.errors import InputError, SluiceError
from sluice.runs.checkpoint import checkpoint_releases, draft_checkpoint, load_checkpoint, remove_draft, save_checkpoint
from sluice.runs.journal import Journal
from sluice.runs.record_writer import RecordWriter
from sluice.training.state import TrainingState

# A checkpoint is due when the journal has grown by this many times its size, but not for less than so many bytes, and
# always after so many entries. Checkpoints then add a quarter to what the journal writes, and both together take the room
# of eleven.
_GROWTH = 4
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
        continues: whether the state is the one that the folder leads to, so that what is in it still counts.

    Guarantee:
        With ``every=None``, whenever release n + 1 is logged, the state that release n left is on disk: as an entry of the
        journal that follows from the newest checkpoint, and from the one before, without a gap.
    """

    def __init__(
        self, state: TrainingState, folder: Path, *, config_hash: str, every: int | None = None, continues: bool = False
    ) -> None:
        if every is not None:
            validate.positive_integer(every=every)
        self._state = state
        self._folder = folder
        self._config_hash = config_hash
        self._every = every if every is not None or state.replayable else 1
        self._writer = RecordWriter()
        self._saving = Background()
        self._unsettled = False
        self.begin(continues=continues)

    def begin(self, *, continues: bool) -> None:
        """Begin with the present state; what is kept of others that came after it, or led elsewhere, is forgotten."""
        self._saving.wait()
        self._journal = Journal(self._folder, config_hash=self._config_hash)
        released = self._state.executor.released
        self._journal.keep(after=-1 if continues else released, up_to=released)
        self.checkpoint()

    def before_release(self) -> None:
        """Wait until what the last release left is on disk; raise what went wrong with it."""
        self._journal.wait()
        if not self._saving.busy:
            self._settle()

    def before_update(self, published: Mapping[str, Any]) -> None:
        """Write what is being released to the journal."""
        if self._every is None:
            self._bytes += self._journal.append(self._state.executor.released + 1, self._state.entry(published))
            self._entries += 1

    def after_release(self) -> None:
        """Make a checkpoint where one is due."""
        if self._every is not None:
            if self._state.executor.released % self._every == 0:
                self.checkpoint()
        elif self._entries >= _MOST_ENTRIES or self._bytes >= max(_GROWTH * self._size, _SMALL_JOURNAL):
            self._draft()

    def checkpoint(self) -> None:
        """Write the state; it is on disk when this returns."""
        self._draft()
        self._settle()

    def finish(self) -> None:
        """Write the whole state and leave nothing but checkpoints."""
        self._draft(whole=True)
        self._settle()
        self._journal.remove()
        remove_draft(self._folder)

    def close(self) -> None:
        """Wait until nothing is being written any more. What goes wrong now is no loss: it is not needed to go on."""
        for background in (self._journal.wait, self._saving.wait):
            with suppress(SluiceError):
                background()

    def _draft(self, *, whole: bool = False) -> None:
        """Write the state, but for what is in the journal and stays there, and leave the rest to the background."""
        self._settle()
        state, history = self._state, self._state.history
        brief = not whole and bool(history) and self._every is None and self._journal.holds(history)
        draft = draft_checkpoint(
            self._folder,
            state.without_history() if brief else state.state_dict(),
            config_hash=self._config_hash,
            release=state.executor.released,
            writer=self._writer,
            reuse=self._every is None,
        )
        self._size, self._bytes, self._entries = draft.size, 0, 0
        self._saving.start(draft.complete)
        self._unsettled = True

    def _settle(self) -> None:
        """Wait for the last checkpoint, and give up the entries that it makes superfluous."""
        self._saving.wait()
        if self._unsettled:
            oldest = min(checkpoint_releases(self._folder))
            self._journal.keep(after=oldest - len(self._state.history), up_to=self._state.executor.released)
            self._unsettled = False


class IdleKeeper(StateKeeper):
    """That of every worker but the first, which alone keeps the run that all have in common."""

    def __init__(self) -> None:
        pass

    def begin(self, *, continues: bool) -> None:
        pass

    def checkpoint(self) -> None:
        pass

    def finish(self) -> None:
        pass

    def close(self) -> None:
        pass


def restore(state: TrainingState, folder: Path, *, config_hash: str) -> tuple[str, ...] | None:
    """Go back to the newest state that a folder leads to. `Executor.begin_after` must follow.

    Returns:
        What the user should know; None if there is no checkpoint at all, and nothing has changed.
    """
    found = load_checkpoint(folder, config_hash=config_hash)
    if found is None:
        return None
    journal = Journal(folder, config_hash=config_hash)
    state.restore(found.payload)
    notes = []
    if history := found.payload.get("history"):
        entries = [entry for release in history if (entry := journal.read(release)) is not None]
        state.recall(entries)
        if len(entries) < len(history):
            notes.append(
                f"{len(history) - len(entries)} entries of the journal are damaged: the noise of these steps will not "
                "be cancelled by later ones. The guarantee is the same."
            )
    same, replayed = True, 0
    if state.replayable:
        for entry in journal.entries(after=found.release):
            same, replayed = state.replay(entry) and same, replayed + 1
    if found.note:
        notes.append(f"{found.note} The journal has {replayed} more.")
    if not same:
        notes.append(
            "The optimizer did not repeat its steps bit for bit, so the weights are not exactly those that the "
            "interruption lost. What was released and charged is the same."
        )
    return tuple(notes)


class Keeping:
    """Where an engine keeps its run: nowhere, until it is told."""

    def __init__(self) -> None:
        self._keeper: StateKeeper | None = None
        self._loaded: tuple[Path, int] | None = None

    def start(self, state: TrainingState, folder: Path, *, config_hash: str, every: int | None) -> StateKeeper:
        """Keep the run in a folder from now on."""
        if not state.executor.context.workers.is_first:
            return IdleKeeper()
        continues = self._loaded == (folder, state.executor.released)
        if checkpoint_releases(folder) and not continues:
            raise InputError(
                f"folder={str(folder)!r} holds checkpoints: call engine.load with it first, or give another."
            )
        self._keeper = StateKeeper(state, folder, config_hash=config_hash, every=every, continues=continues)
        return self._keeper

    def save(self, state: TrainingState, folder: Path, *, config_hash: str) -> Path:
        """Write a checkpoint into a folder that keeps the last two."""
        content, release = state.state_dict(), state.executor.released
        workers = state.executor.context.workers
        return workers.from_first(lambda: save_checkpoint(folder, content, config_hash=config_hash, release=release))

    def load(self, state: TrainingState, folder: Path, *, config_hash: str, lost: Callable[[int], int]) -> str | None:
        """`restore`, and remember where from; its notes in one, or None.

        Args:
            lost: how many releases are logged beside so many that a state contains.
        """
        executor = state.executor

        def by_first() -> str | None:
            charged = executor.unrepeatable
            note = self._restore(state, folder, config_hash=config_hash)
            executor.begin_after(max(lost(executor.released), charged - executor.released))
            self.restart()
            return note

        return executor.context.workers.restored(state, by_first)

    def _restore(self, state: TrainingState, folder: Path, *, config_hash: str) -> str | None:
        self.close()
        notes = restore(state, folder, config_hash=config_hash)
        if notes is None:
            raise InputError(f"folder={str(folder)!r} holds no checkpoint: give a folder that engine.save wrote to.")
        self._loaded = folder, state.executor.released
        return " ".join(notes) or None

    def restart(self) -> None:
        """Keep a state that was loaded, and forget where the one before would have led to."""
        if self._keeper is not None:
            self._keeper.begin(continues=False)

    def before_release(self, number: int) -> None:
        if self._keeper is not None:
            self._keeper.before_release()

    def before_update(self, published: Mapping[str, Any]) -> None:
        if self._keeper is not None:
            self._keeper.before_update(published)

    def after_release(self) -> None:
        if self._keeper is not None:
            self._keeper.after_release()

    def checkpoint(self) -> None:
        if self._keeper is not None:
            self._keeper.checkpoint()

    def close(self) -> None:
        if self._keeper is not None:
            self._keeper.close()


__all__ = ["Keeping", "StateKeeper", "restore"]
