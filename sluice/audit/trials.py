"""Independent trials of one test, with the canary and without: runs that are repeated, or releases of two runs.

Some of the trials choose the test's threshold, the others are counted, so that a good choice cannot flatter the count.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import scipy

from sluice._base.errors import InputError
from sluice.audit.bounds import clopper_pearson, gaussian_fit, trials_p_value
from sluice.audit.curves import Claim
from sluice.audit.result import AuditResult, Bound

Array = np.ndarray

BOUNDS: Mapping[str, Callable[..., float]] = {"clopper-pearson": clopper_pearson, "gaussian-fit": gaussian_fit}
ASSUMPTIONS = {
    "clopper-pearson": "",
    "gaussian-fit": "the trade-off curve of a trial is that of a Gaussian mechanism",
}

_CANDIDATES = 100


@dataclass(frozen=True, kw_only=True, eq=False)
class Trials:
    """Scores of independent trials.

    Attributes:
        scores: one for each trial; higher where the canary seems to be in.
        members: in which of them it was.
        choosing: which trials the threshold is chosen by; the others are counted.
        score: what the scores are called.
        kind: of the canary, and what a trial was.
        claim: what is claimed of one trial; None for nothing.
        notes: what else is to be known.

    Guarantee:
        If trials are independent and each is private as claimed, every bound exceeds the true epsilon of a trial with
        probability at most ``1 - confidence``, and a true claim is refuted with no more.
    """

    scores: Array
    members: Array
    choosing: Array
    score: str
    kind: str
    delta: float
    confidence: float = 0.95
    claim: Claim | None = None
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for part, what in ((self.choosing, "that choose the threshold"), (~self.choosing, "that are counted")):
            if not self.members[part].any() or self.members[part].all():
                raise InputError(f"trials: those {what} are all with the canary or all without. Make more of them.")

    @property
    def result(self) -> AuditResult:
        """What the trials show."""
        bounds = tuple(self._bound(method) for method in BOUNDS)
        claim = self.claim
        p_value = None
        if claim is not None:
            p_value = trials_p_value(claim.curve, **self.counts("gaussian-fit"))
        return AuditResult(
            lower_bound=bounds[0].lower_bound,
            bounds=bounds,
            delta=self.delta,
            confidence=self.confidence,
            canaries=len(self.scores),
            kind=self.kind,
            claimed=None if claim is None else claim.epsilon,
            proved=claim is not None and claim.proved,
            p_value=p_value,
            refuted=p_value is not None and p_value < 1 - self.confidence,
            rehearsal=True,
            notes=self.notes,
        )

    def counts(self, method: str) -> dict[str, int]:
        """How often the test of one of the bounds was right, over the trials that are counted."""
        return self._counts(self._threshold(method))

    def _bound(self, method: str) -> Bound:
        counts = self.counts(method)
        perfect = {**counts, "hits": counts["with_canary"], "alarms": 0}
        return Bound(
            method=method,
            assumption=ASSUMPTIONS[method],
            lower_bound=self._value(method, counts),
            score=self.score,
            guesses=counts["with_canary"] + counts["without"],
            correct=counts["hits"] + counts["without"] - counts["alarms"],
            ceiling=self._value(method, perfect),
        )

    def _threshold(self, method: str) -> float:
        """The one that promises the best bound, by the trials that choose it."""
        order = np.sort(self.scores[self.choosing])
        between = (order[1:] + order[:-1]) / 2
        candidates = between[np.unique(np.linspace(0, len(between) - 1, _CANDIDATES).astype(int))]
        expected = self._expected_if_normal if method == "gaussian-fit" else self._counts_of_choosing

        def worth(threshold: float) -> tuple[float, int]:
            counts = expected(threshold)
            # Where none promises any, the one with the most right guesses.
            return self._value(method, counts), counts["hits"] - counts["alarms"]

        return float(max(candidates, key=worth))

    def _counts_of_choosing(self, threshold: float) -> dict[str, int]:
        return self._counts(threshold, choosing=True)

    def _expected_if_normal(self, threshold: float) -> dict[str, int]:
        """Counts, had scores the normal laws that are fitted to them: where few lie, in the tails, chance would choose."""
        counted = self.members[~self.choosing]
        inside, outside = (self._share_above(threshold, members) for members in (True, False))
        with_canary, without = int(counted.sum()), int((~counted).sum())
        return {
            "hits": round(inside * with_canary),
            "with_canary": with_canary,
            "alarms": round(outside * without),
            "without": without,
        }

    def _share_above(self, threshold: float, members: bool) -> float:
        scores = self.scores[self.choosing & (self.members == members)]
        spread = max(float(scores.std()), 1e-300)
        return float(scipy.special.ndtr((float(scores.mean()) - threshold) / spread))

    def _value(self, method: str, counts: Mapping[str, int]) -> float:
        return BOUNDS[method](**counts, delta=self.delta, confidence=self.confidence)

    def _counts(self, threshold: float, *, choosing: bool = False) -> dict[str, int]:
        part = self.choosing if choosing else ~self.choosing
        said_in, inside = self.scores[part] > threshold, self.members[part]
        return {
            "hits": int((said_in & inside).sum()),
            "with_canary": int(inside.sum()),
            "alarms": int((said_in & ~inside).sum()),
            "without": int((~inside).sum()),
        }


__all__ = ["Trials"]
