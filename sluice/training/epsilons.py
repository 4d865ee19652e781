"""What a run costs, as its engine tells."""

from __future__ import annotations

from abc import ABC, abstractmethod

from sluice.mechanism.base import Mechanism
from sluice.mechanism.delta import warn_of_delta


class Epsilons(ABC):
    """The figures that an engine has for its run.

    Attributes:
        accountant: by which: "pld" or "rdp".
    """

    accountant: str

    @property
    @abstractmethod
    def mechanism(self) -> Mechanism:
        """What this run promises: public."""

    @property
    @abstractmethod
    def spent(self) -> int:
        """How many releases are charged: public."""

    def get_epsilon(self, delta: float) -> float:
        """What the releases so far cost, by the sound accountant, if the run was planned to stop here.

        It is this run's guarantee only if this number of releases was fixed in advance. Quote `get_certified_epsilon`
        for a run that stops early because it looks good enough, gave up, or was interrupted. A run whose gate cannot
        be proved (a hidden reference) has no epsilon: InputError says so; see `get_claimed_epsilon`.
        """
        self.mechanism.require_proof()
        warn_of_delta(delta, self.mechanism)
        return self.get_claimed_epsilon(delta)

    def get_certified_epsilon(self, delta: float) -> float:
        """What this run guarantees, whenever and for whatever reason it stops: epsilon of all planned releases.

        In a run without a planned end it is that of the stage that was reached (docs/accounting.md, section 12.1).
        """
        self.mechanism.require_proof()
        warn_of_delta(delta, self.mechanism)
        return self.mechanism.epsilon_spent(self.spent, delta=delta, accountant=self.accountant)

    def get_claimed_epsilon(self, delta: float) -> float:
        """`get_epsilon` as if the reference were public. With a hidden one it is no guarantee: it can be exceeded."""
        return self.mechanism.as_claimed.epsilon_after(self.spent, delta=delta, accountant=self.accountant)


__all__ = ["Epsilons"]
