"""All that an audit by one run rests on, from which its result and its page follow."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from sluice.audit.curves import Claim
from sluice.audit.guesses import Plan
from sluice.audit.result import AuditResult
from sluice.audit.scores import audit_scores

Array = np.ndarray


@dataclass(frozen=True, kw_only=True, eq=False)
class Evidence:
    """Scores of canaries, the coins that put them into the data, and what was fixed before anybody looked.

    Attributes:
        scores: by name, one number for each canary.
        members: which canaries were in. Sensitive until the audit is made.
        plan: how many guesses are made with each score.
        claim: what is put to the test; None for nothing.
    """

    scores: Mapping[str, Array]
    members: Array
    plan: Plan
    delta: float
    claim: Claim | None
    kind: str
    rehearsal: bool = False

    @property
    def result(self) -> AuditResult:
        return audit_scores(
            self.scores,
            self.members,
            plan=self.plan,
            delta=self.delta,
            claim=self.claim,
            kind=self.kind,
            rehearsal=self.rehearsal,
        )


__all__ = ["Evidence"]
