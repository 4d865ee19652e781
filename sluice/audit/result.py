"""What an audit found: a lower bound on epsilon, and whether the claim stands against it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sluice._base import codec
from sluice._base.rounding import rounded_up


@dataclass(frozen=True, kw_only=True)
class Bound:
    """A lower bound on epsilon by one method.

    Attributes:
        method: "one-run" or "f-dp"; "clopper-pearson" or "gaussian-fit" where runs were repeated.
        assumption: what it takes for granted beside fair coins; empty where that is nothing.
        lower_bound: at the audit's delta and confidence.
        score: by which canaries were ranked; where several were tried, each at its share of the confidence, the best.
        guesses: how many guesses were made, which was fixed before.
        correct: how many of them were right.
        ceiling: what the bound would be if all of them were. A bound near it means "at least".
    """

    method: str
    assumption: str
    lower_bound: float
    score: str
    guesses: int
    correct: int
    ceiling: float


@dataclass(frozen=True, kw_only=True)
class AuditResult:
    """What an audit says. It can refute a claim; it can never prove one.

    Attributes:
        lower_bound: on epsilon; unconditional: the first of ``bounds``.
        bounds: by each method, those without assumptions first.
        delta: at which epsilon is bounded.
        confidence: with which each bound holds.
        canaries: how many there were, each in the data by a coin.
        kind: which canaries: "quiet", "loud", "mislabelled", "blank", or "scores" where they came from elsewhere.
        claimed: the epsilon that is put to the test; None where nothing is claimed.
        proved: whether that epsilon is proved by a sound accountant, or only claimed.
        p_value: how probable such guesses are, at most, if the claim is true; None without a claim.
        refuted: whether that is less than ``1 - confidence``.
        rehearsal: whether this was a run for the audit alone, whose model must not be published.
        notes: what weakens the audit.
    """

    lower_bound: float
    bounds: tuple[Bound, ...]
    delta: float
    confidence: float
    canaries: int
    kind: str
    claimed: float | None
    proved: bool
    p_value: float | None
    refuted: bool
    rehearsal: bool = False
    notes: tuple[str, ...] = ()

    @property
    def verdict(self) -> str:
        """One word or two, and never "private"."""
        if self.claimed is None:
            return "nothing claimed"
        return "refuted" if self.refuted else "not refuted"

    @property
    def method(self) -> str:
        """Of the first bound; so are the four that follow."""
        return self.bounds[0].method

    @property
    def assumption(self) -> str:
        return self.bounds[0].assumption

    @property
    def guesses(self) -> int:
        return self.bounds[0].guesses

    @property
    def correct(self) -> int:
        return self.bounds[0].correct

    @property
    def ceiling(self) -> float:
        """What the unconditional bound would be if all guesses were right."""
        return self.bounds[0].ceiling

    @property
    def rows(self) -> tuple[tuple[str, str], ...]:
        """Names and values, as they are shown."""
        claim = "none"
        if self.claimed is not None:
            claim = f"epsilon = {rounded_up(self.claimed)} ({'proved' if self.proved else 'claimed, not proved'})"
        rows = [("Claim", claim), ("Verdict", self.verdict)]
        if self.p_value is not None:
            rows.append(("p-value of the claim", f"{self.p_value:.2g}"))
        for bound in self.bounds:
            name = f"Lower bound, {_NAMES[bound.method]}"
            what = (
                f"epsilon >= {_rounded_down(bound.lower_bound)} (at most {_rounded_down(bound.ceiling)} can be shown)"
            )
            guessed = f"{bound.correct:,} of {bound.guesses:,} guesses right, by {bound.score}"
            rows.append((name, f"{what}; {guessed}"))
        rows += [
            ("Delta", f"{self.delta:g}"),
            ("Confidence", f"{self.confidence:.0%}"),
            ("Canaries", f"{self.canaries:,} {self.kind}"),
        ]
        return tuple(rows)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for strict JSON; `result_of` gives an equal result back."""
        data: dict[str, Any] = codec.encode(self)
        return {**data, "verdict": self.verdict}


def result_of(data: Mapping[str, Any], *, where: str) -> AuditResult:
    """The inverse of `AuditResult.to_dict`."""
    known = {key: value for key, value in data.items() if key != "verdict"}
    result: AuditResult = codec.decode(AuditResult, known, what=where)
    return result


_NAMES = {
    "one-run": "no assumption",
    "f-dp": "if Gaussian",
    "clopper-pearson": "no assumption",
    "gaussian-fit": "if Gaussian",
}


def _rounded_down(value: float) -> str:
    return f"{int(value * 1000) / 1000:.3f}"


__all__ = ["AuditResult", "Bound", "result_of"]
