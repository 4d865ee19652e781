"""From scores and coins to the result of an audit, and how scores are gathered while a run is made."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import scipy

from sluice._base import validate
from sluice._base.errors import InputError
from sluice.audit.bounds import f_dp_p_value, one_run_p_value
from sluice.audit.curves import Claim
from sluice.audit.guesses import DISPLACEMENT, LENGTHS, METHODS, Channel, Plan, require_canaries
from sluice.audit.result import AuditResult, Bound

Array = np.ndarray

ASSUMPTIONS = {"one-run": "", "f-dp": "the trade-off curve of the run is that of a Gaussian mechanism"}

#: Coins that are fair look less fair than this once in a million audits.
_LEAST_FAIR = 1e-6
#: Beyond this, canaries times delta, the unconditional bound gets worse with more canaries.
_MOST_CANARY_DELTA = 0.1


def right_guesses(scores: Array, members: Array, *, guesses: int) -> int:
    """How many are right if the canaries with the highest scores are guessed to be in, and those with the lowest out.

    Guarantee:
        The guesses are a function of the scores alone. Equal scores are ranked by the canaries' numbers, which say nothing
        of the coins.
    """
    order = np.argsort(scores, kind="stable")
    half = guesses // 2
    said_in, said_out = order[len(order) - (guesses - half) :], order[:half]
    return int(members[said_in].sum() + (~members[said_out]).sum())


def audit_scores(
    scores: Mapping[str, Array],
    members: Array,
    *,
    plan: Plan,
    delta: float,
    claim: Claim | None = None,
    kind: str = "scores",
    rehearsal: bool = False,
) -> AuditResult:
    """Bound epsilon by scores of canaries that were in the data by fair coins.

    Args:
        scores: by name, one number for each canary; higher for those that seem to be in.
        members: which were in.
        plan: how many guesses to make with each score.
        claim: what is put to the test.

    Guarantee:
        If coins were fair and independent and the plan was fixed before, each bound exceeds the true epsilon with
        probability at most ``1 - plan.confidence`` (`sluice.audit.bounds` says what each assumes), and a true claim is
        refuted with no more.
    """
    validate.open_fraction(delta=delta)
    members = _checked_members(members)
    checked = {name: _checked_scores(name, values, len(members)) for name, values in scores.items()}
    if all((values == values[0]).all() for values in checked.values()):
        raise InputError(f"{', '.join(checked)}: the same for all canaries, so that nothing can be guessed.")
    if set(checked) != set(plan.guesses):
        raise InputError(
            f"plan is not for these scores: it has {sorted(plan.guesses)}, and they are {sorted(checked)}."
        )
    count = len(members)
    bounds = tuple(_best_bound(method, checked, members, plan=plan, delta=delta) for method in METHODS)
    p_value = None if claim is None else _p_value(claim, checked, members, plan=plan)
    return AuditResult(
        lower_bound=bounds[0].lower_bound,
        bounds=bounds,
        delta=delta,
        confidence=plan.confidence,
        canaries=count,
        kind=kind,
        claimed=None if claim is None else claim.epsilon,
        proved=claim is not None and claim.proved,
        p_value=p_value,
        refuted=p_value is not None and p_value < 1 - plan.confidence,
        rehearsal=rehearsal,
        notes=tuple(_notes(count, delta, claim, bounds)),
    )


def epsilon_lower_bound(
    scores: Array,
    members: Array,
    *,
    delta: float,
    method: str = "one-run",
    guesses: Plan | int,
    confidence: float = 0.95,
) -> float:
    """The lower bound alone: "one-run", or "f-dp", which assumes a Gaussian trade-off curve.

    Args:
        guesses: how many to make, fixed before anything was looked at, or what `plan_guesses` found.
    """
    validate.one_of(tuple(METHODS), method=method)
    plan = guesses if isinstance(guesses, Plan) else Plan.fixed(guesses, confidence=confidence)
    name = next(iter(plan.guesses))
    found = audit_scores({name: scores}, members, plan=plan.only(name), delta=delta)
    return next(bound.lower_bound for bound in found.bounds if bound.method == method)


def _best_bound(method: str, scores: Mapping[str, Array], members: Array, *, plan: Plan, delta: float) -> Bound:
    def bound_by(name: str) -> Bound:
        guesses = plan.guesses[name][method]
        if guesses > len(members):
            raise InputError(f"guesses={guesses} is not allowed: there are {len(members)} canaries.")

        def bound(correct: int) -> float:
            return METHODS[method](
                canaries=len(members),
                guesses=guesses,
                correct=correct,
                delta=delta,
                confidence=plan.confidence_of(name),
            )

        correct = right_guesses(scores[name], members, guesses=guesses)
        return Bound(
            method=method,
            assumption=ASSUMPTIONS[method],
            lower_bound=bound(correct),
            score=name,
            guesses=guesses,
            correct=correct,
            ceiling=bound(guesses),
        )

    return max((bound_by(name) for name in scores), key=lambda each: each.lower_bound)


def _p_value(claim: Claim, scores: Mapping[str, Array], members: Array, *, plan: Plan) -> float:
    """By the whole curve of the claim where it has one, else by its one pair: which of the two is fixed by the claim."""
    bare = len(claim.profile) == 1
    found = []
    for name, values in scores.items():
        guesses = plan.test_guesses[name]["one-run" if bare else "f-dp"]
        correct = right_guesses(values, members, guesses=guesses)
        game = {"canaries": len(members), "guesses": guesses, "correct": correct}
        p_value = (
            one_run_p_value(claim.epsilon, delta=claim.delta, **game) if bare else f_dp_p_value(claim.curve, **game)
        )
        found.append(p_value / plan.share(name))
    return min(1.0, *found)


def _notes(canaries: int, delta: float, claim: Claim | None, bounds: tuple[Bound, ...]) -> list[str]:
    notes = []
    if canaries * delta > _MOST_CANARY_DELTA:
        notes.append(
            f"{canaries:,} canaries times delta {delta:g} is more than {_MOST_CANARY_DELTA}: fewer canaries would give a "
            "better unconditional bound."
        )
    ceiling = max(bound.ceiling for bound in bounds)
    if claim is not None and claim.epsilon > ceiling:
        needed = math.ceil(canaries * math.exp(min(claim.epsilon - ceiling, 40.0)))
        notes.append(
            f"No guesses of {canaries:,} canaries can show more than epsilon {ceiling:.3g}, and {claim.epsilon:.3g} is "
            f"claimed: it takes about {needed:,} canaries to refute it by a bound."
        )
    return notes


def _checked_members(members: Array) -> Array:
    found = np.asarray(members)
    if found.ndim != 1 or not (found.dtype == bool or np.isin(found, (0, 1)).all()):
        raise InputError("members is not allowed: it must be one row of true and false, one for each canary.")
    found = found.astype(bool)
    require_canaries(len(found))
    count, inside = len(found), int(found.sum())
    tail = float(scipy.special.bdtr(min(inside, count - inside), count, 0.5))
    if 2 * tail < _LEAST_FAIR:
        raise InputError(
            f"members is not allowed: {inside:,} of {count:,} canaries are in the data, which fair coins would hardly do. "
            "Include each by a fair coin of its own."
        )
    return found


def _checked_scores(name: str, scores: Array, count: int) -> Array:
    found = np.asarray(scores, dtype=float)
    if found.shape != (count,):
        raise InputError(f"{name} has shape {found.shape} and there are {count} coins: give one score for each canary.")
    if np.isnan(found).any():
        raise InputError(f"{name} holds values that are not a number: give each canary a score.")
    return found


class Observations:
    """What the released sums say of each canary, added up release by release. Post-processing of what is public.

    Args:
        channel: of the mechanism; None where its releases are no sums of this kind: then only weights are looked at.

    Attributes:
        latest: the sum on each canary's own coordinate in the last release, over the sensitivity.
    """

    def __init__(self, *, canaries: int, channel: Channel | None) -> None:
        self.channel = channel
        self.latest: Array | None = None
        self._evidence = {name: np.zeros(canaries) for name in LENGTHS} if channel is not None else {}

    @property
    def names(self) -> tuple[str, ...]:
        """The scores that `scores` will give."""
        return (*self._evidence, DISPLACEMENT)

    def add(self, sums: Array) -> None:
        """Take in one release: the sum on each canary's own coordinate, over the sensitivity."""
        self.latest = sums
        for name, evidence in self._evidence.items():
            assert self.channel is not None
            # What is not finite says nothing.
            found = self.channel.evidence(np.asarray(sums, dtype=float), length=LENGTHS[name])
            evidence += np.where(np.isfinite(found), found, 0.0)

    def scores(self, displacement: Array) -> dict[str, Array]:
        """All scores, with how far each canary's weight has moved against its gradient."""
        return {**self._evidence, DISPLACEMENT: np.nan_to_num(np.asarray(displacement, dtype=float))}

    def state_dict(self) -> dict[str, Any]:
        return {name: evidence.tolist() for name, evidence in self._evidence.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, evidence in self._evidence.items():
            evidence[:] = state[name]


__all__ = ["Observations", "audit_scores", "epsilon_lower_bound", "right_guesses"]
