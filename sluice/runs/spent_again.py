"""A second use of a run's records: an audit on them has a ledger of its own, and adds to what the run costs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from sluice._base.rounding import rounded_up
from sluice.runs.folder import RunFolder
from sluice.runs.ledger import LedgerContents, read_ledger
from sluice.runs.privacy_spent import PrivacySpent, joint_spending, mechanism_of


@dataclass(frozen=True, kw_only=True)
class SpentAgain:
    """An audit on a run's own records.

    Attributes:
        file: the name of its ledger, in ``public/``.
        run: what the ledger of the run says.
        audit: what the ledger of the audit says.
        together: what both cost together, at the run's delta.
    """

    file: str
    run: LedgerContents
    audit: LedgerContents
    together: PrivacySpent

    def at(self, delta: float | None) -> PrivacySpent:
        """What both cost together at another delta; at the run's own where none is given."""
        return self.together if delta is None else joint_spending([self.run, self.audit], delta=delta)

    @property
    def sentence(self) -> str:
        """What a reader of the certificate has to know."""
        both = "nothing is proved for both together"
        if self.together.epsilon is not None:
            both = (
                f"both together have epsilon = {rounded_up(self.together.epsilon)} at delta = {self.together.delta:g}"
            )
        return f"The records of this run were used a second time, for an audit ({self.file}): {both}."

    def as_json(self) -> dict[str, Any]:
        """What the certificate says of it."""
        epsilon = self.together.epsilon
        return {
            "ledger": self.file,
            "ledger_head": self.audit.head,
            "counted_updates": self.audit.spent,
            "planned_updates": mechanism_of(self.audit.header).covered_releases(self.audit.spent),
            "epsilon": epsilon if epsilon is None or math.isfinite(epsilon) else str(epsilon),
            "delta": self.together.delta,
        }


def spent_again(folder: RunFolder, contents: LedgerContents) -> SpentAgain | None:
    """The audit on the records of the run whose ledger says this; None where there was none.

    Guarantee:
        All releases that the audit's ledger plans are charged, made or not, as those of the run are.
    """
    path = folder.audit_ledger_path
    if not path.exists():
        return None
    audit = read_ledger(path)
    together = joint_spending([contents, audit], delta=contents.header.delta)
    return SpentAgain(file=path.name, run=contents, audit=audit, together=together)


__all__ = ["SpentAgain", "spent_again"]
