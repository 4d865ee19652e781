"""The one shape of everything that makes releases: counted, resumable, and put on record before they are applied."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from sluice.errors import InputError

if TYPE_CHECKING:
    from sluice.workbench import Loss, Workbench


@dataclass
class PrivateTrace:
    """What must never be published: one row for each release that was made. Kept for the developer's own eyes."""

    attempts: list[int] = field(default_factory=list)
    measured: list[int] = field(default_factory=list)
    metrics: list[float] = field(default_factory=list)

    def record(self, *, attempts: int, measured: int, metric: float) -> None:
        self.attempts.append(attempts)
        self.measured.append(measured)
        self.metrics.append(metric)


class Procedure(ABC):
    """Makes the releases of one promise, one at a time.

    Attributes:
        released: updates that the weights contain.
        lost: releases that were put on record and then lost in a crash; they count as spent.
        trace: sensitive.
    """

    def __init__(self, *, releases: int, bench: Workbench) -> None:
        self.bench = bench
        self.noise = bench.noise
        self.trace = PrivateTrace()
        self.released = 0
        self.lost = 0
        self._releases = releases

    @property
    def spent(self) -> int:
        """Releases that have to be paid for: those made, and those that a crash took after they were on record."""
        return self.released + self.lost

    @property
    def done(self) -> bool:
        """Whether the last release has been made."""
        return self.spent >= self._releases

    @abstractmethod
    def make_release(self, loss: Loss) -> None:
        """Make the next release, however many attempts it takes."""

    def put_on_record(self) -> None:
        """Write the next release ahead of applying it; refuses more releases than were promised."""
        self.require_more()
        self.bench.before_release(self.released + 1)

    def require_more(self) -> None:
        if self.done:
            raise InputError(
                f"all releases={self._releases} of this run are made: more would exceed the budget. "
                "Start a run with more releases, calibrated for them."
            )

    def count(self, *, attempts: int, measured: int, metric: float = 0.0) -> None:
        """Count a release that was put on record."""
        self.released += 1
        self.trace.record(attempts=attempts, measured=measured, metric=metric)

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint has to keep between two releases. Sensitive."""
        return {"released": self.released, "noise": self.noise.state_dict(), **self.own_state()}

    def load_state_dict(self, state: Mapping[str, Any], *, lost: int = 0) -> None:
        """Continue from a checkpoint; ``lost`` releases after it are on record and gone."""
        self.released = state["released"]
        self.lost = lost
        self.noise.load_state_dict(state["noise"])
        self.load_own_state(state)

    def own_state(self) -> dict[str, Any]:
        """What the method keeps from release to release, beside the count and the noise."""
        return {}

    def load_own_state(self, state: Mapping[str, Any]) -> None:
        """The inverse of `own_state`. Called after the count is restored."""
        return


__all__ = ["PrivateTrace", "Procedure"]
