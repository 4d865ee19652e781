"""From a target to the scores of each attack on it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from sluice._base.errors import InputError
from sluice.attacks.evaluation import AttackEvaluation, RocCurve, evaluate, roc_curve
from sluice.attacks.lira import lira_scores
from sluice.attacks.references import References
from sluice.attacks.rmia import MODELS_TO_CHOOSE_SLOPE, PUBLISHED_SLOPE, rmia_scores
from sluice.attacks.scores import Scores, log_odds, probabilities_of_label
from sluice.attacks.shadow import fit_shadow, shadow_features
from sluice.attacks.thresholds import gap_scores, loss_scores
from sluice.attacks.white_box import WhiteBoxFeatures, fit_white_box, white_box_features
from sluice.experiments.attacks.cells import ModelCell, hidden_of, train_models
from sluice.experiments.attacks.recipes import shadow_settings
from sluice.experiments.attacks.split import FourWaySplit, Positions, shadow_membership
from sluice.experiments.attacks.targets import Target, model_on

Report = Callable[[int, int], None]


@dataclass(frozen=True, kw_only=True, eq=False)
class AttackScores:
    """What one attack says of records: the higher, the likelier a member.

    Attributes:
        members: who is one.
        threshold: what is above is called a member; None for attacks that only rank.
    """

    name: str
    scores: Scores
    members: NDArray[np.bool_]
    threshold: float | None = None

    @property
    def evaluation(self) -> AttackEvaluation:
        return evaluate(self.scores, self.members, threshold=self.threshold)

    @property
    def curve(self) -> RocCurve:
        return roc_curve(self.scores, self.members)


def threshold_attacks(target: Target) -> list[AttackScores]:
    """The loss, and whether the model is right."""
    logits, labels = target.logits[target.attacked], target.pool.labels[target.attacked]
    return [
        AttackScores(name="loss", scores=loss_scores(logits, labels), members=target.truth),
        AttackScores(name="gap", scores=gap_scores(logits, labels), members=target.truth, threshold=0.0),
    ]


def shadow_attack(
    target: Target, split: FourWaySplit, *, kind: str, seed: int, work: Path, epochs: int = 50
) -> AttackScores:
    """Black-Box/Shadow: an attack net that one shadow model has taught, on the attacker's part of the records.

    Args:
        kind: how the shadow model is trained, "ordinary" or "same".
    """
    cell = _shadow(target, split.shadow_train, kind=kind, seed=seed)
    (logits,) = train_models([cell], work=work)
    labels = target.pool.labels
    drawn = np.random.default_rng([seed, 1]).permutation(split.shadow_train)[: len(split.shadow_test)]
    known = np.concatenate([drawn, split.shadow_test])
    truth = np.repeat([True, False], [len(drawn), len(split.shadow_test)])
    fitted = fit_shadow(logits[known], labels[known], truth, seed=seed, epochs=epochs)
    features = shadow_features(target.logits[target.attacked], labels[target.attacked])
    return AttackScores(name=f"shadow, {kind}", scores=fitted.scores(features), members=target.truth, threshold=0.0)


def white_box_attack(target: Target, *, seed: int, epochs: int = 50) -> AttackScores:
    """White-Box/Partial: a third of members and non-members is known, equally many of each; another third is attacked."""
    generator = np.random.default_rng([seed, 2])
    third = min(len(target.members), len(target.non_members)) // 3
    if third < 10:
        raise InputError(
            f"records: {third} in a third of the members or non-members are too few to learn an attack from."
        )
    members, others = generator.permutation(target.members), generator.permutation(target.non_members)
    truth = np.repeat([True, False], third)

    def features(positions: Positions) -> WhiteBoxFeatures:
        hidden = hidden_of(target.model, target.pool.examples.subset(positions))
        return white_box_features(target.logits[positions], target.pool.labels[positions], hidden)

    known = np.concatenate([members[:third], others[:third]])
    attacked = np.concatenate([members[third : 2 * third], others[third : 2 * third]])
    fitted = fit_white_box(features(known), truth, seed=seed, epochs=epochs)
    scores = fitted.scores(features(attacked).blocks)
    return AttackScores(name="white-box", scores=scores, members=truth, threshold=0.0)


@dataclass(frozen=True, kw_only=True, eq=False)
class ShadowLogits:
    """What shadow models on random halves of a pool say of all its records."""

    logits: NDArray[np.float32]
    inside: NDArray[np.bool_]


def shadow_logits(
    target: Target,
    *,
    shadows: int,
    kind: str,
    seed: int,
    work: Path,
    jobs: int | None = None,
    report: Report = lambda done, total: None,
) -> ShadowLogits:
    """Train the shadow models, or read those that are there."""
    inside = shadow_membership(len(target.pool), shadows=shadows, seed=seed)
    cells = [
        _shadow(target, np.flatnonzero(row), kind=kind, seed=seed, number=number) for number, row in enumerate(inside)
    ]
    found = train_models(cells, work=work, jobs=jobs, report=report)
    return ShadowLogits(logits=np.stack(found), inside=inside)


def lira_attacks(target: Target, shadows: ShadowLogits) -> list[AttackScores]:
    """Online and offline LiRA, with pooled variance and, where each record has two models on a side, its own."""
    references = _references(target, shadows, log_odds)
    counts = shadows.inside[:, target.attacked].sum(axis=0)
    enough = min(counts.min(), len(shadows.inside) - counts.max()) >= 2
    return [
        AttackScores(
            name=f"lira {variant}, {variance}",
            scores=lira_scores(references, variant=variant, variance=variance),
            members=target.truth,
            threshold=0.0 if variant == "online" else None,
        )
        for variant in ("online", "offline")
        for variance in (("pooled", "per-record") if enough else ("pooled",))
    ]


def rmia_attacks(target: Target, shadows: ShadowLogits, *, gamma: float = 2.0) -> list[AttackScores]:
    """Online and offline RMIA; the attacked records themselves stand for the population."""
    references = _references(target, shadows, probabilities_of_label)
    slope = PUBLISHED_SLOPE if references.models < MODELS_TO_CHOOSE_SLOPE else None
    return [
        AttackScores(
            name=f"rmia {variant}",
            scores=rmia_scores(references, variant=variant, gamma=gamma, offline_slope=slope),
            members=target.truth,
        )
        for variant in ("online", "offline")
    ]


def _shadow(target: Target, positions: Positions, *, kind: str, seed: int, number: int = 0) -> ModelCell:
    settings = shadow_settings(target.settings, kind=kind, seed=seed, number=number)
    return model_on(positions, target.source, settings, made_for=len(target.members))


def _references(target: Target, shadows: ShadowLogits, score: Callable[..., Scores]) -> References:
    attacked = target.attacked
    labels = target.pool.labels[attacked]
    return References.of(
        target=score(target.logits[attacked], labels),
        shadows=np.stack([score(logits[attacked], labels) for logits in shadows.logits]),
        inside=shadows.inside[:, attacked],
    )
