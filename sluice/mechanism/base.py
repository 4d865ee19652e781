"""What a run promises: frozen and public, whatever its method, and the only thing that an accountant ever reads."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from sluice._base import validate
from sluice._base.codec import Encoded
from sluice._base.errors import InputError
from sluice.accounting import ACCOUNTANTS, create_accountant
from sluice.accounting.dpa import DpEvent
from sluice.mechanism.stages import Stages


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A figure that somebody claims for such a run and nobody has proved. It is never called epsilon.

    Attributes:
        label: who claims it.
        reading: which of several formulas.
        value: the figure.
    """

    label: str
    reading: str
    value: float


@dataclass(frozen=True, kw_only=True)
class PrivacyFigure:
    """One accountant's figure for a mechanism.

    ``guaranteed`` tells whether it is a bound that is proved; ``meaning`` says in a few words what it is.
    """

    accountant: str
    value: float
    guaranteed: bool
    meaning: str


class Mechanism(Encoded, ABC):
    """A mechanism, as far as ledgers, accountants and certificates have to know it.

    Attributes:
        kind: its name in a ledger.
        claims_beside_proof: whether claims are listed even where an epsilon is proved.
        releases: how many updates are released at most.
        prior_releases: noise multipliers of Gaussian releases made before training from the same records.
        stages: how a run is charged whose end nobody fixed in advance; None where ``releases`` is its end.
    """

    tag: ClassVar[str | None] = "kind"
    claims_beside_proof: ClassVar[bool] = False

    releases: int
    prior_releases: tuple[float, ...] = ()
    stages: Stages | None = None

    def require_complete(self) -> None:
        """Refuse a mechanism whose noise has yet to be chosen: it can be neither trained nor read from a ledger."""
        return

    @property
    def accountants(self) -> tuple[str, ...]:
        """The sound accountants that can read it, the tightest first."""
        return ACCOUNTANTS

    @property
    @abstractmethod
    def provable(self) -> bool:
        """Whether an epsilon is proved for it. If not, figures are only "claimed"."""

    @property
    def unproved_because(self) -> str:
        """Why no epsilon is proved, as a sentence; empty where one is."""
        return ""

    def require_proof(self) -> None:
        """Refuse to speak of an epsilon where none is proved."""
        if not self.provable:
            raise InputError(
                f"no epsilon is proved for this run: {self.unproved_because} Use a method with a proof (for a gate: a "
                "public reference), or read get_claimed_epsilon(delta), which is not a guarantee."
            )

    @property
    def as_claimed(self) -> Mechanism:
        """What an audit holds a run to: the mechanism itself, or what one passes itself off as for which nothing is proved.

        An epsilon of what it is not is a claim, and has to be called one.
        """
        return self

    @abstractmethod
    def event_after(self, releases: int) -> DpEvent:
        """The event of a run that was planned to make this many releases, prior releases included."""

    @property
    def composable(self) -> bool:
        """Whether its events compose with those of other runs; if not, epsilons and deltas of runs are added."""
        return self.stages is None

    @property
    def dp_event(self) -> DpEvent:
        """The event of the whole run."""
        return self.event_after(self.releases)

    def epsilon_after(self, releases: int, *, delta: float, accountant: str) -> float:
        """Epsilon of a run that was planned to make this many releases.

        Guarantee:
            An upper bound under adding or removing one record, by the named sound accountant. A run that stopped early
            costs what all of its planned releases cost.
        """
        validate.open_fraction(delta=delta)
        self._require_accountant(accountant)
        return float(create_accountant(accountant).compose(self.event_after(releases)).get_epsilon(delta))

    def covered_releases(self, spent: int) -> int:
        """How many releases a run is charged for that has made so many: all that were planned, or those of its stage."""
        return self.releases if self.stages is None else min(self.releases, self.stages.reached_by(spent).releases)

    def epsilon_spent(self, spent: int, *, delta: float, accountant: str) -> float:
        """What a run guarantees that has made so many releases, whenever and for whatever reason it stops.

        Guarantee:
            The epsilon of all planned releases; in a run without a planned end, that of its stage at the stage's part of
            delta (docs/accounting.md, sections 3.5 and 12.1).
        """
        share = 1.0 if self.stages is None else self.stages.reached_by(spent).delta_share
        return self.epsilon_after(self.covered_releases(spent), delta=delta * share, accountant=accountant)

    def claims_after(self, releases: int, *, delta: float) -> tuple[Claim, ...]:
        """What others would claim after this many releases."""
        return ()

    def meaning(self, accountant: str) -> str:
        """What an epsilon of this accountant is, in a few words."""
        return {
            "pld": "proved, by privacy-loss distributions",
            "rdp": "proved, by Renyi divergences: simpler and looser",
        }[accountant]

    def report(self, *, delta: float) -> tuple[PrivacyFigure, ...]:
        """What a whole run costs by each accountant, stopped early or not: the tightest proof first, claims last.

        Of a run without a planned end it is what the first stage costs.

        Guarantee:
            A function of public values alone. Nothing is called guaranteed unless a sound accountant says it.
        """
        figures = []
        if self.provable:
            for name in self.accountants:
                value = self.epsilon_spent(0, delta=delta, accountant=name)
                figures.append(PrivacyFigure(accountant=name, value=value, guaranteed=True, meaning=self.meaning(name)))
        for claim in self.claims_after(self.covered_releases(0), delta=delta):
            meaning = f"{claim.reading} reading: no guarantee"
            figures.append(PrivacyFigure(accountant=claim.label, value=claim.value, guaranteed=False, meaning=meaning))
        return tuple(figures)

    @abstractmethod
    def theorem(self, accountant: str) -> str:
        """What is proved and where the proof is, in one line."""

    @property
    @abstractmethod
    def sampling(self) -> Mapping[str, Any]:
        """How batches are drawn: ``kind``, and ``rate``, the largest probability with which a record is in one."""

    @property
    @abstractmethod
    def summary(self) -> tuple[tuple[str, str], ...]:
        """What to show of it before a run: names and values."""

    @property
    def releases_metric(self) -> bool:
        """Whether a noisy number beside the update is part of each release."""
        return False

    def ending_after(self, releases: int) -> str:
        """Why a finished run ended after this many releases, as a sentence; empty where it made all of them."""
        return ""

    def _require_accountant(self, accountant: str) -> None:
        if accountant not in self.accountants:
            raise InputError(
                f"accountant={accountant!r} is not allowed for {self.kind}: its proof is by "
                f"{' or '.join(self.accountants)}. Use that one."
            )

    def _require_releases(self, releases: int) -> None:
        if not isinstance(releases, int) or not 0 <= releases <= self.releases:
            raise InputError(f"releases={releases!r} is not allowed: it must be an integer in 0 .. {self.releases}.")


__all__ = ["Claim", "Mechanism"]
