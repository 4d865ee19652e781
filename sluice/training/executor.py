"""The one shape of everything that makes releases: prepared without a trace, logged, and only then applied."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar, final

from sluice._base.errors import InputError
from sluice._base.interrupts import uninterrupted
from sluice.randomness.model_state import ModelRandomness

if TYPE_CHECKING:
    from torch import Tensor

    from sluice.gradients import Chunk
    from sluice.training.context import Loss, TrainingContext

T = TypeVar("T")


@dataclass
class PrivateTrace:
    """What must never be published: one row for each release that was made. Kept for the developer's own eyes."""

    attempts: list[int] = field(default_factory=list)
    measured: list[int] = field(default_factory=list)
    metrics: list[float] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Draft(Generic[T]):
    """A release that is ready to be logged. Sensitive: it holds un-noised values.

    Attributes:
        content: what the method needs to apply it.
        attempts, measured, metric: for the private trace.
    """

    content: T
    measured: int
    attempts: int = 1
    metric: float = 0.0


class Executor(ABC, Generic[T]):
    """Makes the releases of one mechanism, one at a time.

    Every release has three stages, and a method says what happens in the first and in the last:

    | stage | what it may do | if it is interrupted |
    |---|---|---|
    | `prepare` | sample, measure, decide; put back whatever it tries out | nothing has changed: the release is prepared again, with fresh draws |
    | logging | count the release as spent, write it to the ledger | the release is lost: spent, never made, its turn skipped |
    | `apply` | add noise, change weights and the method's state | cannot be by a signal, which waits; after an exception the executor refuses to continue until a state is loaded |

    Guarantee:
        What a later release depends on (weights, optimizer, the method's state) changes in `apply` alone, so after the
        release is counted and logged. The number of the next release, `spent`, is the only clock: whatever goes by turns
        (batches of the matrix mechanism, rows of its noise) reads it and cannot fall out of step.

    Attributes:
        released: updates that the weights contain.
        lost: releases that were logged and never applied; they count as spent.
        trace: sensitive.
        takes_workers: whether several workers can share the records of each batch (docs/distributed.md): sums over records
            are made by `RawSum` and ``workers.total``, and nothing else differs from worker to worker.
        takes_shards: whether the model may be sharded over them (docs/scale.md): gradients come from ``context.rounds``, become
            public by ``context.noisy``, and nothing else looks at the model.
    """

    takes_workers: ClassVar[bool] = False
    takes_shards: ClassVar[bool] = False

    def __init__(self, *, releases: int, context: TrainingContext) -> None:
        context.workers.require_same({"the number of records": context.dataset_size})
        self.context = context
        self.noise = context.noise
        self.trace = PrivateTrace()
        self.released = 0
        self.lost = 0
        self._releases = releases
        self._lost_before = 0
        self._applying = False

    @property
    def spent(self) -> int:
        """Releases that are charged: those made, and those that were lost after they were logged."""
        return self.released + self.lost

    @property
    def done(self) -> bool:
        """Whether the last release has been made."""
        return self.spent >= self._releases

    @abstractmethod
    def prepare(self, loss: Loss) -> Draft[T]:
        """Sample, measure and decide for the next release, however many attempts it takes.

        Guarantee:
            Weights, optimizer state and everything in `own_state` are bit for bit what they were, also where this ends
            by an exception.
        """

    @abstractmethod
    def apply(self, content: T) -> None:
        """Make a release that has just been logged: noise, the method's state, weights."""

    def catch_up(self) -> None:
        """Bring the method's state past releases that were lost. Called before each release; must be idempotent."""
        return

    @final
    def make_release(self, loss: Loss) -> None:
        """Make the next release."""
        self.require_more()
        updater = self.context.updater
        updater.check_untouched(entries=False)
        with ModelRandomness(self.noise):
            draft = self.prepare(loss)
            updater.check_untouched()  # a forward pass that writes to its parameters would publish what it saw
            self.commit(draft)

    @final
    def commit(self, draft: Draft[T]) -> None:
        """Log a release, then apply it."""
        self.require_more()
        with uninterrupted():
            self.context.require_in_step(self.spent)
            number = self.spent - self._lost_before + 1
            self.lost += 1  # spent from here on, and lost until it is applied
            try:
                self.context.before_release(number)
            except BaseException:
                self.catch_up()
                raise
            self._applying = True
            self.apply(draft.content)
            self._count_as_applied()
            self.trace.attempts.append(draft.attempts)
            self.trace.measured.append(draft.measured)
            self.trace.metrics.append(draft.metric)
            self.context.after_release()

    def _count_as_applied(self) -> None:
        self.released += 1
        self.lost -= 1
        self._applying = False

    def require_more(self) -> None:
        """Refuse a release that was not promised, or that would follow one that was left half applied."""
        if self._applying:
            raise InputError(
                f"release {self.spent} was interrupted while it was being applied, so weights and state may be half "
                "updated. It is charged. Load the last checkpoint, or start a new run."
            )
        self.catch_up()
        if self.done:
            raise InputError(
                f"all releases={self._releases} of this run are made: more would exceed the budget. "
                "Start a run with more releases, calibrated for them."
            )

    def begin_after(self, lost: int) -> None:
        """Continue a run of which at least this many releases are charged that the weights do not contain."""
        self.lost = self._lost_before = max(lost, self.lost)
        self.catch_up()

    @property
    def unrepeatable(self) -> int:
        """How many releases stay charged whatever state is loaded: seeded ones will come out as before."""
        return self.spent if self.noise.secure else 0

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint has to keep between two releases. Sensitive."""
        return {**self._counts(), **self.own_state()}

    def _counts(self) -> dict[str, Any]:
        return {"released": self.released, "spent": self.spent, "noise": self.noise.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any], *, lost: int = 0) -> None:
        """Continue from a checkpoint; ``lost`` releases beside those in it are logged and gone.

        Guarantee:
            Releases that this very executor has logged beyond the checkpoint stay charged, whatever ``lost`` says,
            unless the noise is seeded and they will come out as before.
        """
        charged = self.unrepeatable
        self.restore(state)
        self.begin_after(max(lost, charged - self.released))

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go back to a checkpoint, as it was when it was made. `begin_after` must follow: more may have been lost since."""
        self.released = state["released"]
        # Earlier versions did not write the number; and what a seed repeats is not lost.
        self.lost = state.get("spent", self.released) - self.released if self.noise.secure else 0
        self._applying = False
        self.noise.load_state_dict(state["noise"])
        self.load_own_state(state)

    def own_state(self) -> dict[str, Any]:
        """What the method keeps from release to release, beside the count and the noise."""
        return {}

    def load_own_state(self, state: Mapping[str, Any]) -> None:
        """The inverse of `own_state`. Called after the count is restored."""
        return


class ReplayableExecutor(Executor[T]):
    """An executor whose state follows from what it published: `apply` is `publish`, which draws, and `update`, which does not.

    What was published is written to the journal in between, so that a run that is resumed can make the same updates again.
    A run of any other executor is kept by a whole checkpoint with every release.
    """

    @abstractmethod
    def publish(self, content: T) -> dict[str, Any]:
        """Add the noise of a release that has just been logged.

        Returns:
            All that `update` needs, as tensors, numbers, strings, lists and dictionaries.
        """

    @abstractmethod
    def update(self, published: Mapping[str, Any]) -> None:
        """Change weights and the method's state by what was published, which may be used up in doing so.

        Guarantee:
            The same state and the same values give the same result, bit for bit as far as the user's optimizer does:
            nothing is drawn, and no record is read. So making an update again is post-processing.
        """

    @property
    def history(self) -> int:
        """How many of the values last published are part of the state: what the journal has of them no checkpoint repeats."""
        return 0

    def own_state_without_history(self) -> dict[str, Any]:
        """`own_state` without what `recall` brings back."""
        return self.own_state()

    def state_without_history(self) -> dict[str, Any]:
        """`state_dict` without what `recall` brings back."""
        return {**self._counts(), **self.own_state_without_history()}

    def recall(self, published: Mapping[int, Mapping[str, Any]]) -> None:
        """Complete a state without its history.

        Args:
            published: what each of the last `history` releases published, by its number among all that were charged. One
                that is missing counts as lost.
        """
        return

    @final
    def apply(self, content: T) -> None:
        published = self.publish(content)
        self.context.before_update(published)
        self.update(published)

    @final
    def replay(self, published: Mapping[str, Any], *, number: int) -> None:
        """Make an update again that was the given one of all releases that were charged, lost ones included."""
        self.lost = number - 1 - self.released
        self.catch_up()
        self.lost += 1
        self._applying = True
        self.update(published)
        self._count_as_applied()


class PiecewiseExecutor(ReplayableExecutor[T]):
    """An executor that the user's own loop can drive, because it looks at each chunk of a batch once.

    Use: ``indices = draw()``; ``absorb(chunk)`` for each chunk of that batch until it says no; ``finish()``.

    Attributes:
        batch: a number that changes whenever a batch begins, or is given up: by `draw`, by a release, by a state that is
            loaded. Chunks of an earlier one must not be absorbed.
    """

    batch: int = 0

    @property
    @abstractmethod
    def expected_batch_size(self) -> float:
        """How many records a batch has on average: public."""

    @property
    @abstractmethod
    def still_possible(self) -> bool:
        """Whether the attempt in progress may still be released: sensitive."""

    @abstractmethod
    def draw(self) -> Tensor:
        """Start an attempt: the indices of its batch, which may be empty."""

    @abstractmethod
    def absorb(self, chunk: Chunk | None) -> bool:
        """Take in a chunk of the batch, or none where other workers still have one; false once the attempt is rejected."""

    @abstractmethod
    def finish(self) -> bool:
        """Release the attempt, or forget it. Whether it was released is sensitive."""

    def serve_loop(self) -> None:
        """Prepare to be driven by a loop, whose larger rounding errors all releases from now on are charged for."""
        self.context = replace(self.context, loop_batch=self.expected_batch_size)


__all__ = ["Draft", "Executor", "PiecewiseExecutor", "PrivateTrace", "ReplayableExecutor"]
